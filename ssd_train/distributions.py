"""From logits to the target distribution p and the draft distribution q, and samples from them.

The only maker of p and q: both come from :func:`guided_probabilities`, so they always went through the
same processing, in the published order guidance -> temperature -> top-k -> top-p -> softmax. (Which ids
may occur at all is settled before: a backbone's readout covers exactly the image vocabulary.)

Shapes: N any leading shape, V vocabulary, leading S = 2 streams, (conditional, unconditional), or 1 without guidance.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution. ``guidance`` s is in u + s * (c - u); 1 is no guidance.

    ``temperature`` 0 is greedy (one-hot). ``top_k`` 0 and ``top_p`` 1 switch these off.
    """

    guidance: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"sampling.temperature is {self.temperature}; expected >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k is {self.top_k}; expected >= 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; expected in (0, 1] (1 keeps every token)")


def guide(logits: Tensor, guidance: float) -> Tensor:
    """Classifier-free guidance: [S, *N, V] -> [*N, V], u + s * (c - u), which is c where s is 1."""
    if guidance == 1:
        return logits[0]
    conditional, unconditional = logits
    return unconditional + guidance * (conditional - unconditional)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [*N, V] -> distribution [*N, V] after temperature, top-k and top-p. One-hot at temperature 0."""
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        mass_before[..., 0] = 0
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        dropped.scatter_(-1, order, mass_before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits.softmax(-1)


def guided_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The streams' logits [S, *N, V] -> the distribution [*N, V] that tokens are sampled from."""
    return probabilities(guide(logits, sampling.guidance), sampling)


def sample(p: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: distribution [*N, V] (unnormalised is fine) and u [*N] in (0, 1) -> tokens [*N].

    Zero-probability tokens are never drawn.
    """
    cdf = p.cumsum(-1, dtype=torch.float64)
    level = (u * cdf[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf, level, right=True).squeeze(-1).clamp_max_(p.shape[-1] - 1)


def race(p: Tensor, u: Tensor) -> Tensor:
    """The first token to arrive at exponential clocks of rates p: unnormalised [*N, V] and u [*N, V] in (0, 1) ->
    tokens [*N]. Distributed as p, and with the same u a distribution close to p mostly gives the same token: two
    differ with probability at most 2 TV / (1 + TV). (The Gumbel-max trick without its logarithms of zero.)"""
    return (p / -u.log()).argmax(-1)


def sound(q: Tensor) -> Tensor:
    """[N, V] -> [N] bool: which are distributions. NaN is none."""
    return (q.sum(-1) - 1).abs() < 1e-3


def ratio(p: Tensor, q: Tensor, draft: Tensor) -> Tensor:
    """p/q of the drafts: [N, V], [N, V], [N] -> [N]. A draft that was drawn from q has q > 0; q is 0 where a lossy rule
    let a token stand that the p of that judgement excluded: it goes on standing, 1."""
    at = draft[:, None]
    p, q = p.gather(1, at).squeeze(1), q.gather(1, at).squeeze(1)
    return torch.where(q > 0, p / q, 1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)), [*N, V]; p itself where p <= q everywhere (a rejection then has probability 0)."""
    excess = (p - q).clamp_min_(0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp_min(torch.finfo(p.dtype).tiny), p)


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """Probability that a draft from q is accepted by the strict rule, sum_v min(p, q): [*N, V] -> [*N]."""
    return torch.minimum(p, q).sum(-1)


class Verdict(NamedTuple):
    """One judgement of N positions: the token that stands now, and whether it is the accepted draft."""

    token: Tensor  # [N] int64
    accepted: Tensor  # [N] bool


def accept_and_redraw(draft: Tensor, accept: Tensor, weight: Tensor, u_accept: Tensor, u_redraw: Tensor) -> Verdict:
    """The accept-and-redraw step; every decoder's.

    draft [N] int64; accept [N], the rule's acceptance probability; weight [N, V], the rule's (unnormalised)
    re-draw distribution; u_accept, u_redraw [N] in (0, 1). With the strict rule the marginal of the result is
    exactly p when draft ~ q (Leviathan et al., arXiv 2211.17192, theorem 1). NaN never accepts.
    """
    accepted = u_accept < accept
    return Verdict(torch.where(accepted, draft, sample(weight, u_redraw)), accepted)
