"""Drafts from trained heads: SSD's (arXiv 2606.20543), and EAGLE's chain of one of them (arXiv 2401.15077)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_train.decoding.parts import Drafter
from ssd_train.distributions import guided_probabilities
from ssd_train.heads import Direction, Heads


class HeadDrafter(Drafter):
    """The head of a draft's (rows, columns) offset from its source: one of the two must be 0.

    The predictions of both CFG streams are combined exactly as the backbone's logits are. With ``chain`` a predicted
    state stands for the draft's own until the backbone gives that, and the next draft may have it as its source: one
    head, run autoregressively on its own predictions.
    """

    def __init__(self, chain: bool = False):
        self.chain = self.sequential = chain
        self.heads: Heads | None = None

    def bind(self, backbone, heads: Heads | None) -> "HeadDrafter":
        if heads is None:
            raise ValueError("this decoder drafts with heads, but there are none: train and export some first")
        if self.chain and heads.spec.space != "latent":
            raise ValueError("a chain feeds predicted states back; token-space heads predict none")
        self.heads = heads.to(device=backbone.device, dtype=backbone.dtype)
        return self

    def propose(self, state, items, source, offset: Sequence[tuple[int, int]]) -> Tensor:
        groups: dict[tuple[int, int], list[int]] = {}
        for i, pair in enumerate(offset):
            groups.setdefault(pair, []).append(i)
        if len(groups) == 1:
            logits = self._logits(state, items, source, offset[0], slice(None))
        else:
            shape = 2, len(offset), state.backbone.vocabulary
            logits = torch.empty(shape, dtype=state.q.dtype, device=state.device)
            for pair, members in groups.items():
                chosen = torch.tensor(members, device=state.device)
                logits[:, chosen] = self._logits(state, items, source, pair, chosen)
        return guided_probabilities(logits, state.sampling)

    def _logits(self, state, items, source, offset: tuple[int, int], chosen: Tensor | slice) -> Tensor:
        """Draft logits [2, n, V] of the n chosen items, which are all at one offset."""
        rows, columns = offset
        if (rows == 0) == (columns == 0) or rows < 0 or columns < 0:
            raise ValueError(f"no head drafts {rows} rows down and {columns} columns right; one of them must be 0")
        direction = Direction.VERTICAL if rows else Direction.HORIZONTAL
        z = self._inputs(state, source.sample[chosen], source.position[chosen], self.heads.context(direction))
        if not self.chain:
            return self.heads.logits(direction, rows or columns, z, state.backbone.readout)
        predicted = self.heads(direction, rows or columns, z) * self.heads.spec.state_scale
        state.hidden[:, items.sample[chosen], items.position[chosen]] = predicted
        return state.backbone.readout(predicted)

    def _inputs(self, state, sample: Tensor, position: Tensor, context: int) -> Tensor:
        """z [2, n, 2dc] of sources [n] and their neighbours in the row, zeros beyond its ends."""
        near = torch.arange(context, device=state.device) - context // 2
        column = position[:, None] % state.grid.width + near
        at = (sample[:, None], (position[:, None] + near).clamp(0, state.grid.size - 1))
        embedded = state.backbone.embed(state.tokens[at]).expand(2, -1, -1, -1)
        z = self.heads.inputs(state.hidden[:, *at], embedded)
        if context > 1:
            z = z * ((column >= 0) & (column < state.grid.width))[..., None]
        return z.flatten(2)
