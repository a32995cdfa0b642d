"""What a state becomes when its neighbours are re-drawn, said by a small network instead of a backbone pass.

A backbone with parallel passes and a cheap model that corrects between them is the parareal scheme (Lions, Maday &
Turinici, "Résolution d'EDP par un schéma en temps « pararéel »", 2001), on tokens. The trained correction is ours.
N positions, S streams, C neighbours, d the backbone's width, m the corrector's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssd_train.grid import Grid


@dataclass(frozen=True)
class CorrectorSpec:
    """``width`` m, ``depth`` gated layers, and how many of the nearest neighbours it sees (``context``, C)."""

    width: int = 512
    depth: int = 1
    context: int = 5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"corrector.{name} is {value!r}; expected at least 1")


class Gated(nn.Module):
    """W2(SiLU(W1 n) * W3 n), n = RMSNorm(x): [..., m] -> 2m -> [..., out]."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.w1 = nn.Linear(width, 2 * width, bias=False)
        self.w3 = nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Corrector(nn.Module):
    """H' = H + s G(x), x = U [H ; H_left] / s + V [e(t_left) ; e(t_1) - e(t'_1) ; ... ; e(t_C) - e(t'_C)] / s_e

    H is a position's state when its neighbours were fed as t', and H' what it should be with t in their place; H_left
    is the state of the position to its left, e the backbone's input embeddings, s and s_e the standard deviations of
    states and embeddings. G is ``depth`` :class:`Gated` layers, residual but for the last, from m to d, which starts
    at 0. Both CFG streams go through the same weights. Where no neighbour differs, H' is H.
    (3 + C) dm + 2dm + 4m^2 parameters at depth 1, 6m^2 more a layer, and norms.
    """

    def __init__(self, spec: CorrectorSpec, width: int, state_scale: float = 1.0, embedding_scale: float = 1.0):
        super().__init__()
        self.state_scale, self.embedding_scale = state_scale, embedding_scale
        self.states = nn.Linear(2 * width, spec.width, bias=False)
        self.tokens = nn.Linear((1 + spec.context) * width, spec.width, bias=False)
        self.layers = nn.ModuleList(Gated(spec.width, spec.width) for _ in range(spec.depth - 1))
        self.last = Gated(spec.width, width)
        nn.init.zeros_(self.last.w2.weight)

    def forward(
        self, hidden: Tensor, left: Tensor, fed: Tensor, now: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """H and H_left [S, N, d]; the tokens of the neighbours as fed and as they stand, [N, C] int64, nearest first,
        -1 where there is none; ``embed`` from tokens [...] to embeddings [..., d]. Returns H' [S, N, d]."""
        was, becomes = (embed(tokens.clamp_min(0)) * (tokens >= 0)[..., None] for tokens in (fed, now))
        seen = torch.cat([becomes[:, :1], becomes - was], 1).flatten(1) / self.embedding_scale
        return self.add(hidden, self.of_states(hidden, left, fed) + self.tokens(seen), fed, now)

    def of_states(self, hidden: Tensor, left: Tensor, fed: Tensor) -> Tensor:
        """U [H ; H_left] / s, [S, N, m]."""
        left = left * (fed[:, :1] >= 0)
        return self.states(torch.cat([hidden, left], -1) / self.state_scale)

    def add(self, hidden: Tensor, x: Tensor, fed: Tensor, now: Tensor) -> Tensor:
        """H + s G(x) where a neighbour differs, else H."""
        for layer in self.layers:
            x = x + layer(x)
        return hidden + self.last(x) * self.state_scale * (fed != now).any(1)[:, None]


class FrozenCorrector:
    """A corrector that no longer learns, for the sweeps of a decoder: V e(t) of a neighbour is a row of a table, and
    what all sweeps after a judgement have in common is computed once. Gives what the corrector does, up to rounding.

    The tables are 2 C (V + 1) m numbers for a vocabulary of V."""

    def __init__(self, corrector: Corrector, embedding: Tensor):
        """``embedding`` [V, d]: the backbone's input embeddings."""
        self.corrector = corrector
        width = embedding.shape[1]
        weights = corrector.tokens.weight.unflatten(1, (-1, width))  # [m, 1 + C, d]
        left, *each = torch.einsum("mcd,vd->cvm", weights, embedding / corrector.embedding_scale)
        fed = F.pad(torch.stack(each), (0, 0, 1, 0))  # row 0 of each neighbour: none there
        now = fed.clone()
        now[0, 1:] += left
        self.now, self.fed = now.flatten(0, 1), fed.flatten(0, 1)
        self.first = 1 + torch.arange(len(each), device=embedding.device) * fed.shape[1]

    def begin(self, hidden: Tensor, left: Tensor, fed: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Of N positions, as :meth:`Corrector.forward` takes them. Returns a function from n of their indices [n] and
        these ones' neighbours as they stand [n, C] to H' [S, n, d]."""
        x = self.corrector.of_states(hidden, left, fed) - F.embedding_bag(fed + self.first, self.fed, mode="sum")

        def corrected(index: Tensor, now: Tensor) -> Tensor:
            seen = x[:, index] + F.embedding_bag(now + self.first, self.now, mode="sum")
            return self.corrector.add(hidden[:, index], seen, fed[index], now)

        return corrected


def nearest(count: int) -> list[tuple[int, int]]:
    """(rows, columns) offsets of the ``count`` nearest positions that come before one in raster order: left, above,
    above-left, above-right, two to the left, two above, ..."""
    offsets = product(range(-count, 1), range(-count, count + 1))
    return sorted((o for o in offsets if o < (0, 0)), key=lambda o: (o[0] ** 2 + o[1] ** 2, -o[0], o[1]))[:count]


def neighbours(grid: Grid, count: int) -> Tensor:
    """Of each position its ``count`` nearest earlier ones as positions, [L, count] int64; L where the row or the grid
    ends before."""
    table = []
    for row, column in product(range(grid.height), range(grid.width)):
        near = [(row + down, column + right) for down, right in nearest(count)]
        table.append([grid.position(y, x) if y >= 0 and 0 <= x < grid.width else grid.size for y, x in near])
    return torch.tensor(table)
