"""GSD's grouped rule (arXiv 2508.07747)."""

import torch
from torch import Tensor

from ssd_train.decoding.rules.strict import Strict


class Grouped(Strict):
    """Accept with min(1, sum_G p / sum_G q). G holds the draft t and those of the ``size`` tokens around it in the
    ranking by p that have |p(v) - p(t)| < ``gap`` and whose embeddings lie within a squared distance of ``distance``.
    The residual is unchanged. Published: 14, 0.15, 0.5 (distances of Lumina's embedding rows)."""

    lossless = False

    def __init__(self, size: int = 14, gap: float = 0.15, distance: float = 0.5):
        if size < 0:
            raise ValueError(f"size is {size}; expected >= 0")
        self.size, self.gap, self.distance = size, gap, distance
        self.embedding: Tensor | None = None

    def bind(self, backbone) -> "Grouped":
        self.embedding = backbone.output.embedding
        return self

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        _, weight = super().__call__(p, q, draft)
        order = p.sort(dim=-1, descending=True, stable=True).indices
        rank = (order == draft[:, None]).int().argmax(-1, keepdim=True)
        # At an end of the ranking the window is shifted, not cut, so that it always holds ``size`` others.
        last = p.shape[-1] - 1
        start = (rank - self.size // 2).clamp(min=0).clamp(max=max(0, last - self.size))
        members = order.gather(1, (start + torch.arange(min(self.size, last) + 1, device=p.device)))
        p_members, p_draft = p.gather(1, members), p.gather(1, draft[:, None])
        apart = (self.embedding[members].float() - self.embedding[draft].float()[:, None]).square().sum(-1)
        group = ((p_members - p_draft).abs() < self.gap) & (apart < self.distance) | (members == draft[:, None])
        p_group, q_group = ((x * group).sum(-1) for x in (p_members, q.gather(1, members)))
        return torch.where(q_group > 0, p_group / q_group, 1), weight
