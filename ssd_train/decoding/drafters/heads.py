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
        backbone, at = state.backbone, (source.sample, source.position)
        z = self.heads.inputs(state.hidden[:, *at], backbone.embed(state.tokens[at]).expand(2, -1, -1))
        if len(groups) == 1:
            logits = self._logits(state, items, offset[0], z)
        else:
            logits = torch.empty(2, len(offset), backbone.vocabulary, dtype=state.q.dtype, device=state.device)
            for pair, members in groups.items():
                chosen = torch.tensor(members, device=state.device)
                logits[:, chosen] = self._logits(state, items, pair, z[:, chosen])
        return guided_probabilities(logits, state.sampling)

    def _logits(self, state, items, offset: tuple[int, int], z: Tensor) -> Tensor:
        """z [2, n, 2d] -> draft logits [2, n, V]"""
        rows, columns = offset
        if (rows == 0) == (columns == 0) or rows < 0 or columns < 0:
            raise ValueError(f"no head drafts {rows} rows down and {columns} columns right; one of them must be 0")
        head = (Direction.VERTICAL, rows) if rows else (Direction.HORIZONTAL, columns)
        if not self.chain:
            return self.heads.logits(*head, z, state.backbone.readout)
        predicted = self.heads(*head, z) * self.heads.spec.state_scale
        state.hidden[:, items.sample, items.position] = predicted
        return state.backbone.readout(predicted)
