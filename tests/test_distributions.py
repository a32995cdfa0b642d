import math

import pytest
import torch

from ssd_train.decoding.rules.strict import Strict
from ssd_train.distributions import (
    Sampling,
    accept_and_redraw,
    acceptance_rate,
    guide,
    guided_probabilities,
    probabilities,
    ratio,
    residual,
    sample,
    sound,
)  # fmt: skip
from ssd_train.draws import uniform

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).double()


def random_distribution(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).softmax(-1)


def test_guidance_by_hand():
    streams = torch.tensor([[[1.0, 2.0]], [[0.5, 3.0]]])
    assert guide(streams, 3.0).tolist() == [[2.0, 0.0]]
    assert torch.equal(guide(streams, 1.0), streams[0])


def test_processing_by_hand():
    e = LOGITS.exp()
    assert torch.allclose(probabilities(LOGITS, Sampling()), e / e.sum())
    assert torch.allclose(probabilities(LOGITS, Sampling(temperature=0.5)), (2 * LOGITS).softmax(-1))
    top_2 = torch.cat([e[:, :2] / e[:, :2].sum(), 0 * e[:, 2:]], 1)
    assert torch.allclose(probabilities(LOGITS, Sampling(top_k=2)), top_2)
    assert probabilities(LOGITS, Sampling(temperature=0)).tolist() == [[1, 0, 0, 0]]
    # cumulative mass .644, .881, .968: 0.7 needs the second token, 0.6 does not
    assert (probabilities(LOGITS, Sampling(top_p=0.7)) > 0).tolist() == [[True, True, False, False]]
    assert (probabilities(LOGITS, Sampling(top_p=0.6)) > 0).tolist() == [[True, False, False, False]]
    assert torch.equal(probabilities(LOGITS, Sampling(top_k=9)), probabilities(LOGITS, Sampling()))


def test_guidance_comes_before_top_k():
    """Top-k of the conditional stream alone would keep the other token."""
    streams = torch.tensor([[[1.0, 0.9]], [[1.0, 0.0]]])
    assert guided_probabilities(streams, Sampling(guidance=2.0, top_k=1)).tolist() == [[0.0, 1.0]]


def test_sampling_never_draws_a_token_of_zero_probability():
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(5, 1)
    u = torch.tensor([2.0**-33, 0.4999, 0.5, 0.5001, 1 - 2.0**-33], dtype=torch.float64)
    assert sample(p, u).tolist() == [1, 1, 3, 3, 3]


def test_residual_by_hand():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.6, 0.2]])
    assert torch.allclose(residual(p, q), torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.equal(residual(p, p), p)
    assert acceptance_rate(p, q).item() == pytest.approx(0.7)


@pytest.mark.parametrize("case", ["random", "q misses tokens of p", "p misses tokens of q", "p = q", "one-hot q"])
def test_strict_accept_and_redraw_has_marginal_p_exactly(case):
    """By enumeration over drafts, not by sampling: sum_t q(t) [a(t) 1(t) + (1 - a(t)) residual] = p."""
    p, q = random_distribution(20, 6, seed=1), random_distribution(20, 6, seed=2)
    if case == "q misses tokens of p":
        q[:, :3] = 0
    elif case == "p misses tokens of q":
        p[:, :3] = 0
    elif case == "p = q":
        q = p.clone()
    elif case == "one-hot q":
        q = torch.eye(6, dtype=torch.float64)[torch.arange(20) % 6]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    marginal = torch.zeros_like(p)
    for token in range(6):
        draft = torch.full((20,), token)
        accept, weight = Strict()(p, q, draft)
        accept = torch.where(q[:, token] > 0, accept.clamp(max=1), 0)
        marginal[:, token] += q[:, token] * accept
        marginal += (q[:, token] * (1 - accept))[:, None] * weight / weight.sum(-1, keepdim=True)
    assert torch.allclose(marginal, p, atol=1e-12)


def test_accept_and_redraw_draws_what_the_enumeration_says():
    """Chi-square over 200,000 draws; the upper 1e-4 quantile at 4 degrees of freedom is 23.5."""
    n = 200_000
    p, q = random_distribution(1, 5, seed=3).expand(n, -1), random_distribution(1, 5, seed=4).expand(n, -1)
    u = uniform(torch.arange(n)[:, None], 0, 0, torch.arange(3))
    draft = sample(q, u[:, 0])
    token, accepted = accept_and_redraw(draft, *Strict()(p, q, draft), u[:, 1], u[:, 2])
    observed = torch.bincount(token, minlength=5)
    assert (((observed - n * p[0]) ** 2) / (n * p[0])).sum() < 23.5
    rate = acceptance_rate(p[0], q[0])
    assert abs(accepted.double().mean() - rate) < 4 * (rate * (1 - rate) / n).sqrt()


def test_degenerate_vocabulary_and_greedy():
    one = torch.ones(3, 1)
    accept, weight = Strict()(one, one, torch.zeros(3, dtype=torch.long))
    assert accept.tolist() == [1, 1, 1]
    assert torch.equal(weight, one)
    p, q = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    accept, weight = Strict()(p, q, torch.tensor([0]))
    assert accept.item() == 0
    assert weight.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_bad_settings_name_the_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"sampling\.{name} is {value}; expected"):
        Sampling(**bad)


def test_what_is_no_distribution_is_not_sound():
    q = torch.tensor([[0.5, 0.5], [math.nan, 1.0], [math.inf, 0.0], [0.0, 0.0]])
    assert sound(q).tolist() == [True, False, False, False]


def test_nan_never_accepts():
    accept = torch.tensor([math.nan, 1.0, 0.0])
    half, other = torch.full((3,), 0.5), torch.tensor([[0.0, 1.0]] * 3)
    verdict = accept_and_redraw(torch.tensor([0, 0, 0]), accept, other, half, half)
    assert verdict.accepted.tolist() == [False, True, False]
    assert verdict.token.tolist() == [1, 0, 1]


def test_a_draft_that_q_excludes_stands():
    p, q = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.2, 0.8]]), torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.4, 0.6]])
    assert ratio(p, q, torch.tensor([0, 0, 0])).tolist() == [1.0, 1.0, 0.5]
