"""Rules that relax the acceptance probability by a constant (the baselines of CSD, arXiv 2606.27829)."""

from torch import Tensor

from ssd_train.decoding.rules.strict import Strict


class Addition(Strict):
    """Accept with min(1, p/q + epsilon). Published: epsilon 0.1 (Lumina), 0.4 (Janus)."""

    lossless = False

    def __init__(self, epsilon: float = 0.1):
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is {epsilon}; expected between 0 and 1")
        self.epsilon = epsilon

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        accept, weight = super().__call__(p, q, draft)
        return accept + self.epsilon, weight


class Amplify(Strict):
    """Accept with min(1, k p/q). Published: k 1.3 (Lumina), 4 (Janus)."""

    lossless = False

    def __init__(self, k: float = 1.3):
        if k < 1:
            raise ValueError(f"k is {k}; expected at least 1")
        self.k = k

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        accept, weight = super().__call__(p, q, draft)
        return self.k * accept, weight
