"""CSD's entropy-relaxed rule (arXiv 2606.27829)."""

import torch
from torch import Tensor

from ssd_train.decoding.rules.strict import Strict
from ssd_train.distributions import acceptance_rate


class EntropyRelaxed(Strict):
    """Accept with min(1, p/q + strength * H(p)), H in nats, where TV(p, q) < threshold; elsewhere strictly. The
    residual is unchanged. Published: strength 0.5; threshold 0.35 (Lumina), 0.65 to 0.8 (Janus)."""

    lossless = False

    def __init__(self, strength: float = 0.5, threshold: float = 0.65):
        if strength < 0:
            raise ValueError(f"strength is {strength}; expected >= 0")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}; expected between 0 and 1")
        self.strength, self.threshold = strength, threshold

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        accept, weight = super().__call__(p, q, draft)
        close = 1 - acceptance_rate(p, q) < self.threshold
        entropy = torch.special.entr(p).sum(-1)
        return accept + torch.where(close, self.strength * entropy, 0), weight
