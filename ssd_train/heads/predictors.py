"""The predictors f_phi that draft (Spatially Speculative Decoding, arXiv 2606.20543).

From the state H that predicted a token and that token's embedding, a predictor guesses the state at a neighbour:
``offset`` columns to the right (horizontal) or rows below (vertical). The frozen norm and output layers turn the
guess into a draft distribution. d is the backbone's width, m the hidden width, V the image vocabulary.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssd_train.grid import Grid
from ssd_train.heads.corrector import Corrector, CorrectorSpec


class Direction(StrEnum):
    HORIZONTAL = "horizontal"
    VERTICAL = "vertical"


@dataclass(frozen=True)
class HeadSpec:
    """Which predictors there are and how wide. ``hidden`` defaults to 2d.

    ``space`` "latent" predicts states; "token" is the baseline that predicts logits with a trained vocabulary
    projection of its own instead of the frozen readout. ``state_scale`` and ``embedding_scale`` are the standard
    deviations of H and of the embeddings in the training cache: predictors see and predict unit-scale numbers.

    ``context`` (odd) is how many neighbours in the source's row a vertical head sees, the source in the middle; 1 is
    the published predictor. Horizontal heads see their source alone: what is to its right is not there yet.
    ``corrector``, if there is one, is trained with them and keeps their drafts up to date.
    """

    width: int
    vocabulary: int
    k_horizontal: int = 5
    k_vertical: int = 5
    hidden: int = 0
    space: str = "latent"
    context: int = 1
    state_scale: float = 1.0
    embedding_scale: float = 1.0
    corrector: CorrectorSpec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.corrector, dict):  # as an export's config.json has it
            object.__setattr__(self, "corrector", CorrectorSpec(**self.corrector))
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if kind in (int, float, str) and type(value) is not kind and not (kind is float and type(value) is int):
                raise ValueError(f"{field.name} is {value!r}; expected a {kind.__name__}")
        if self.width < 1 or self.vocabulary < 1 or self.hidden < 0:
            sizes = self.width, self.vocabulary, self.hidden
            raise ValueError(f"width, vocabulary and hidden are {sizes}; expected 1 or more")
        if self.k_horizontal < 0 or self.k_vertical < 0 or self.k_horizontal + self.k_vertical == 0:
            raise ValueError(
                f"k_horizontal={self.k_horizontal}, k_vertical={self.k_vertical}: expected >= 0 and at least one head"
            )
        if self.space not in ("latent", "token"):
            raise ValueError(f"space is {self.space!r}; expected 'latent' or 'token'")
        if self.context < 1 or self.context % 2 == 0:
            raise ValueError(f"context is {self.context}; expected an odd number, 1 or more")
        if not (0 < self.state_scale < inf and 0 < self.embedding_scale < inf):
            raise ValueError(f"scales must be positive numbers, got {self.state_scale} and {self.embedding_scale}")
        if not self.hidden:
            object.__setattr__(self, "hidden", 2 * self.width)

    def offsets(self) -> Iterator[tuple[Direction, int]]:
        for direction, count in (Direction.HORIZONTAL, self.k_horizontal), (Direction.VERTICAL, self.k_vertical):
            for offset in range(1, count + 1):
                yield direction, offset


class Predictor(nn.Module):
    """f(z) = W0 z + W2(SiLU(W1 n) * W3 n), n = RMSNorm(W0 z): z [..., 2d] -> [..., d]. 3dm + 2d^2 + d parameters.

    Starts as the identity on the source's state: W0 = [I, 0], W2 = 0. With ``context`` neighbours z is [..., 2dc].
    """

    def __init__(self, width: int, hidden: int, context: int = 1):
        super().__init__()
        self.w0 = nn.Linear(2 * width * context, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        with torch.no_grad():
            self.w0.weight.zero_()
            self.w0.weight[:, (context // 2) * 2 * width :][:, :width].copy_(torch.eye(width))
            self.w2.weight.zero_()

    def forward(self, z: Tensor) -> Tensor:
        projected = self.w0(z)
        normed = self.norm(projected)
        return projected + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Heads(nn.Module):
    """One independent :class:`Predictor` a direction and offset, and the :class:`Corrector` or None."""

    def __init__(self, spec: HeadSpec):
        super().__init__()
        self.spec = spec
        self.predictors = nn.ModuleDict()
        for direction, offset in spec.offsets():
            self.predictors[name(direction, offset)] = Predictor(spec.width, spec.hidden, self.context(direction))
        self.vocabulary_projections = nn.ModuleDict()
        if spec.space == "token":
            for key in self.predictors:
                self.vocabulary_projections[key] = nn.Linear(spec.width, spec.vocabulary, bias=False)
        self.corrector = None
        if spec.corrector is not None:
            self.corrector = Corrector(spec.corrector, spec.width, spec.state_scale, spec.embedding_scale)

    def parts(self) -> dict[str, list[nn.Module]]:
        """What is called, and gathered with FSDP, by itself: a head with its vocabulary projection; the corrector."""
        groups = self.predictors, self.vocabulary_projections
        parts = {key: [group[key] for group in groups if key in group] for key in self.predictors}
        return parts if self.corrector is None else parts | {"corrector": [self.corrector]}

    def context(self, direction: Direction) -> int:
        return self.spec.context if direction is Direction.VERTICAL else 1

    def inputs(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """z = [H ; e(t)] at unit scale: two [..., d] -> [..., 2d]."""
        return torch.cat([hidden / self.spec.state_scale, embedded / self.spec.embedding_scale], -1)

    def forward(self, direction: Direction, offset: int, z: Tensor) -> Tensor:
        """z [..., 2dc] -> the predicted state *over* ``state_scale`` [..., d] (in token space: a feature)."""
        return self.predictor(direction, offset)(z)

    def predictor(self, direction: Direction, offset: int) -> nn.Module:
        """Raises ValueError if there is none."""
        key = name(direction, offset)
        if key not in self.predictors:
            raise ValueError(
                f"no {direction} head for offset {offset}; there are {sorted(self.predictors)}: set head.k_{direction}="
                f"{offset} and train, or decode with what there is"
            )
        return self.predictors[key]

    def logits(self, direction: Direction, offset: int, predicted: Tensor, readout: nn.Module) -> Tensor:
        """A head's prediction [..., d] -> draft logits [..., V], through the frozen ``readout`` (H -> logits) or, in
        token space, through the head's own vocabulary projection."""
        if self.spec.space == "token":
            return self.vocabulary_projections[name(direction, offset)](predicted)
        return readout(predicted * self.spec.state_scale)

    def config(self) -> dict:
        return asdict(self.spec)


def name(direction: Direction, offset: int) -> str:
    """'vertical_1': how a head is called in tensors, logs and reports."""
    return f"{direction}_{offset}"


def widen(z: Tensor, context: int) -> Tensor:
    """Puts each column's ``context`` neighbours, left to right, side by side, zeros beyond the edge:
    [..., w, k] -> [..., w, context k]."""
    if context == 1:
        return z
    reach = context // 2
    padded = F.pad(z, (0, 0, reach, reach))
    return torch.cat([padded[..., i : i + z.shape[-2], :] for i in range(context)], -1)


def source_rectangle(grid: Grid, direction: Direction, offset: int) -> tuple[int, int]:
    """(rows, columns) of the positions whose neighbour at the offset lies on the grid: the top-left rectangle."""
    if direction is Direction.HORIZONTAL:
        return grid.height, max(0, grid.width - offset)
    return max(0, grid.height - offset), grid.width


def pairs(x: Tensor, grid: Grid, direction: Direction, offset: int) -> tuple[Tensor, Tensor]:
    """Sources and targets of one head from a grid-shaped x [..., h, w, d]: two [..., h', w', d] views."""
    rows, columns = source_rectangle(grid, direction, offset)
    source = x[..., :rows, :columns, :]
    if direction is Direction.HORIZONTAL:
        return source, x[..., :, grid.width - columns :, :]
    return source, x[..., grid.height - rows :, :, :]
