"""Drafts from trained SSD heads (arXiv 2606.20543)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_train.decoding.parts import Drafter
from ssd_train.distributions import guided_probabilities
from ssd_train.heads import Direction, Heads


class HeadDrafter(Drafter):
    """The head of a draft's (rows, columns) offset from its source: one of the two must be 0.

    The predictions of both CFG streams are combined exactly as the backbone's logits are.
    """

    def __init__(self) -> None:
        self.heads: Heads | None = None

    def bind(self, backbone, heads: Heads | None) -> "HeadDrafter":
        if heads is None:
            raise ValueError("this decoder drafts with heads, but there are none: train and export some first")
        self.heads = heads.to(device=backbone.device, dtype=backbone.dtype)
        return self

    def propose(self, state, items, source: Tensor, offset: Sequence[tuple[int, int]]) -> Tensor:
        groups: dict[tuple[int, int], list[int]] = {}
        for i, pair in enumerate(offset):
            groups.setdefault(pair, []).append(i)
        backbone = state.backbone
        z = self.heads.inputs(
            state.hidden[:, items.sample, source], backbone.embed(state.tokens[items.sample, source]).expand(2, -1, -1)
        )
        if len(groups) == 1:
            return guided_probabilities(self._logits(offset[0], z, backbone), state.sampling)
        logits = torch.empty(2, len(source), backbone.vocabulary, dtype=state.q.dtype, device=state.device)
        for pair, members in groups.items():
            chosen = torch.tensor(members, device=state.device)
            logits[:, chosen] = self._logits(pair, z[:, chosen], backbone)
        return guided_probabilities(logits, state.sampling)

    def _logits(self, offset: tuple[int, int], z: Tensor, backbone) -> Tensor:
        rows, columns = offset
        if (rows == 0) == (columns == 0) or rows < 0 or columns < 0:
            raise ValueError(f"no head drafts {rows} rows down and {columns} columns right; one of them must be 0")
        direction = Direction.VERTICAL if rows else Direction.HORIZONTAL
        return self.heads.logits(direction, rows or columns, z, backbone.readout)
