"""Drafts from trained heads: SSD's (arXiv 2606.20543), and EAGLE's chain of one of them (arXiv 2401.15077)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssd_train.decoding.parts import CorrectingDrafter
from ssd_train.distributions import guided_probabilities
from ssd_train.heads.corrector import FrozenCorrector, neighbours
from ssd_train.heads.predictors import Direction, Heads


class HeadDrafter(CorrectingDrafter):
    """The head of a draft's (rows, columns) offset from its source: one of the two must be 0.

    The predictions of both CFG streams are combined exactly as the backbone's logits are. With ``chain``, horizontal
    drafts come from their left neighbour whatever their source is, by the +1 head, and the predicted state stands for
    the draft's own until the backbone gives that: one head, run autoregressively on its own predictions.

    With ``sweeps``, the heads' corrector revises drafts after each judgement. A drafter that corrects between a
    backbone's parallel passes makes these a parareal scheme (Lions, Maday & Turinici, 2001), on tokens.
    """

    def __init__(self, chain: bool = False, sweeps: int = 0):
        if sweeps < 0:
            raise ValueError(f"sweeps is {sweeps}; expected at least 0")
        self.chain = self.sequential = chain
        self.sweeps = sweeps
        self.heads: Heads | None = None

    def bind(self, backbone, heads: Heads | None) -> "HeadDrafter":
        if heads is None:
            raise ValueError(
                "this decoder drafts with heads, but there are none: run stages=[cache,train,export] first, or set "
                "decode.heads to a folder or a hub id"
            )
        if self.chain and heads.spec.space != "latent":
            raise ValueError("a chain feeds predicted states back; token-space heads predict none")
        if self.chain and not heads.spec.k_horizontal:
            raise ValueError("a chain is made of the horizontal +1 head, but there is none: train with k_horizontal=1")
        if self.sweeps and heads.corrector is None:
            raise ValueError(
                f"sweeps is {self.sweeps}, but these heads were trained without a corrector (head.corrector=null); "
                "expected sweeps=0, or others"
            )
        self.heads = heads.to(device=backbone.device, dtype=backbone.dtype)
        if self.sweeps:
            self.context = neighbours(backbone.grid, heads.spec.corrector.context).to(backbone.device)
            self.corrector = FrozenCorrector(heads.corrector, backbone.output.embedding)
        return self

    def require(self, source, position, grid) -> None:
        rows, columns = grid.offset(source, position)
        if (rows == 0) == (columns == 0) or rows < 0 or columns < 0:
            raise ValueError(
                f"no head drafts {rows} rows down and {columns} columns right; one of them must be 0 (a Jacobi window "
                "needs source: above)"
            )
        self.heads.predictor(*self._head(rows, columns))

    def _head(self, rows: int, columns: int) -> tuple[Direction, int]:
        """The one that drafts at this offset."""
        if rows:
            return Direction.VERTICAL, rows
        return Direction.HORIZONTAL, 1 if self.chain else columns

    def propose(self, state, items, source, offset: Sequence[tuple[int, int]]) -> Tensor:
        groups: dict[tuple[int, int], list[int]] = {}
        for i, pair in enumerate(offset):
            groups.setdefault(pair, []).append(i)
        if len(groups) == 1:
            logits = self._logits(state, items, source, offset[0], slice(None))
        else:
            shape = state.streams, len(offset), state.backbone.vocabulary
            logits = torch.empty(shape, dtype=state.q.dtype, device=state.device)
            for pair, members in groups.items():
                logits[:, members] = self._logits(state, items, source, pair, members)
        return guided_probabilities(logits, state.sampling)

    def revision(self, state, judged, hidden, left, fed) -> Callable[[Tensor, Tensor], Tensor]:
        return self.corrector.begin(hidden, left, fed)

    def _logits(self, state, items, source, offset: tuple[int, int], chosen: list[int] | slice) -> Tensor:
        """Draft logits [S, n, V] of the n chosen items, which are all at one offset."""
        direction, distance = self._head(*offset)
        chained = self.chain and direction is Direction.HORIZONTAL
        position = items.position[chosen] - 1 if chained else source.position[chosen]
        z = self._inputs(state, source.sample[chosen], position, self.heads.context(direction))
        predicted = self.heads(direction, distance, z)
        if chained:
            at = items.sample[chosen], items.position[chosen]
            state.hidden[:, *at] = predicted * self.heads.spec.state_scale
        return self.heads.logits(direction, distance, predicted, state.backbone.readout)

    def _inputs(self, state, sample: Tensor, position: Tensor, context: int) -> Tensor:
        """z [S, n, 2dc] of sources [n] and their neighbours in the row; zeros beyond the row's ends and for neighbours
        that are not there yet."""
        near = torch.arange(context, device=state.device) - context // 2
        column = position[:, None] % state.grid.width + near
        at = (sample[:, None], (position[:, None] + near).clamp(0, state.grid.size - 1))
        token = state.tokens[at]
        embedded = state.backbone.embed(token.clamp_min(0)).expand(state.streams, -1, -1, -1)
        z = self.heads.inputs(state.hidden[:, *at], embedded)
        if context > 1:
            z = z * ((column >= 0) & (column < state.grid.width) & (token >= 0))[..., None]
        return z.flatten(2)
