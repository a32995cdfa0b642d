"""Training-free drafts: blind guesses that Jacobi iterations repair (SJD, arXiv 2410.01699)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_train.decoding.parts import Drafter


class Random(Drafter):
    """Uniformly random tokens, q uniform."""

    uses_heads = False

    def propose(self, state, items, source, offset: Sequence[tuple[int, int]]) -> Tensor:
        vocabulary = state.backbone.vocabulary
        return torch.full((len(offset), vocabulary), 1 / vocabulary, dtype=state.q.dtype, device=state.device)


class Copy(Drafter):
    """The token at the source position as it stands, q one-hot."""

    uses_heads = False

    def propose(self, state, items, source, offset: Sequence[tuple[int, int]]) -> Tensor:
        token = state.tokens[source.sample, source.position]
        q = torch.zeros(len(offset), state.backbone.vocabulary, dtype=state.q.dtype, device=state.device)
        return q.scatter_(1, token[:, None], 1.0)
