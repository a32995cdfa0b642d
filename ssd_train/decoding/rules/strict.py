"""Speculative sampling's rule (arXiv 2211.17192; 2302.01318)."""

from torch import Tensor

from ssd_train.decoding.parts import Rule
from ssd_train.distributions import ratio, residual


class Strict(Rule):
    """Accept with min(1, p/q), else re-draw from the residual distribution norm(max(0, p - q))."""

    lossless = True

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        return ratio(p, q, draft), residual(p, q)
