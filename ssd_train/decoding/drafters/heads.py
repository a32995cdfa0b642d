"""Drafts from trained heads: SSD's (arXiv 2606.20543), and EAGLE's chain of one of them (arXiv 2401.15077)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_train.decoding.parts import Drafter
from ssd_train.distributions import guided_probabilities
from ssd_train.heads.predictors import Direction, Heads


class HeadDrafter(Drafter):
    """The head of a draft's (rows, columns) offset from its source: one of the two must be 0.

    The predictions of both CFG streams are combined exactly as the backbone's logits are. With ``chain``, horizontal
    drafts come from their left neighbour whatever their source is, by the +1 head, and the predicted state stands for
    the draft's own until the backbone gives that: one head, run autoregressively on its own predictions.

    With ``revise``, a draft whose left neighbour was re-drawn moves to the state H + f(z') - f(z): the backbone's for
    the old neighbour, and by how much the horizontal +1 head's prediction changes with the new one. The backbone with
    its parallel passes and a cheap model that corrects between them is the parareal scheme (Lions, Maday & Turinici,
    2001), on tokens.
    """

    def __init__(self, chain: bool = False, revise: bool = False):
        self.chain = self.sequential = chain
        self.revise = self._revised if revise else None
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
        if self.revise and (heads.spec.space != "latent" or not heads.spec.k_horizontal):
            raise ValueError(
                f"revise=true moves states by the horizontal +1 head; these heads are in {heads.spec.space} space with "
                f"k_horizontal={heads.spec.k_horizontal}: expected latent space and at least 1"
            )
        self.heads = heads.to(device=backbone.device, dtype=backbone.dtype)
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

    def _revised(self, state, items) -> Tensor:
        b, left = items.sample, items.position - 1
        tokens = torch.stack([state.fed[b, left], state.tokens[b, left]])
        embedded = state.backbone.embed(tokens)[:, None].expand(-1, state.streams, -1, -1)
        z = self.heads.inputs(state.hidden[:, b, left].expand_as(embedded), embedded)
        fed, now = self.heads(Direction.HORIZONTAL, 1, z)
        hidden = state.hidden[:, b, items.position] + (now - fed) * self.heads.spec.state_scale
        state.hidden[:, b, items.position] = hidden
        return guided_probabilities(state.backbone.readout(hidden), state.sampling)

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
