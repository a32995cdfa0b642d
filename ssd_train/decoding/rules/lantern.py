"""LANTERN's latent-neighbourhood rule (arXiv 2410.03355)."""

import torch
from torch import Tensor

from ssd_train.decoding.parts import Rule
from ssd_train.distributions import residual


class LatentNeighbourhood(Rule):
    """p(t) is replaced by p(t) plus the probability of its nearest neighbours by embedding, nearest first, as many of
    ``k`` as keep the added mass within ``delta`` (with ``relative``: within (delta - 1) p(t)); a rejected draft is
    re-drawn with these neighbours' p set to 0. Published: k = 1000, delta = 0.1, or k = 10, delta = 5 relative."""

    def __init__(self, k: int = 1000, delta: float = 0.1, relative: bool = False):
        if k < 0:
            raise ValueError(f"k is {k}; expected >= 0")
        if relative and delta < 1:
            raise ValueError(f"delta is {delta}; expected at least 1, a multiple of p(t)")
        if not relative and not 0 <= delta < 1:
            raise ValueError(f"delta is {delta}; expected a probability, below 1 (or relative=true)")
        self.k, self.delta, self.relative = k, delta, relative
        self.neighbours: Tensor | None = None

    def bind(self, backbone) -> "LatentNeighbourhood":
        """Ranks all pairs of embeddings once: [V, k] int64."""
        embedding = backbone.output.embedding.float()
        k = min(self.k, len(embedding) - 1)
        rows = []
        for start in range(0, len(embedding), 1024):
            distance = torch.cdist(embedding[start : start + 1024], embedding)
            distance.diagonal(start).fill_(-1)  # before any duplicate
            rows.append(distance.argsort(-1)[:, 1 : k + 1])
        self.neighbours = torch.cat(rows)
        return self

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        near = self.neighbours[draft]
        p_near, p_draft = p.gather(1, near), p.gather(1, draft[:, None])
        limit = (self.delta - 1) * p_draft if self.relative else self.delta
        within = p_near.cumsum(-1) <= limit
        q_draft = q.gather(1, draft[:, None]).squeeze(1)
        accept = torch.where(q_draft > 0, (p_draft.squeeze(1) + (p_near * within).sum(-1)) / q_draft, 1)
        kept = p.scatter(1, near, torch.where(within, 0, p_near))
        return accept, residual(kept, q)
