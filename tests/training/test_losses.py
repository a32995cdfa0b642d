"""Losses against values worked out by hand or by torch.distributions."""

import math

import pytest
import torch

from ssd_train.distributions import acceptance_rate
from ssd_train.training import losses


def test_smooth_l1_by_hand():
    """0.5 x^2 below 1, |x| - 0.5 above; the mean over everything."""
    predicted = torch.tensor([[0.0, 0.5], [3.0, -1.0]])
    target = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    assert losses.smooth_l1(predicted, target).item() == pytest.approx((0 + 0.125 + 1.5 + 0) / 4)


def test_kl_is_from_p_to_q():
    logits = torch.randn(3, 4, 6, dtype=torch.float64)
    p = torch.randn(3, 4, 6, dtype=torch.float64).softmax(-1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(probs=p), torch.distributions.Categorical(logits=logits)
    ).mean()
    assert losses.kl(logits, p).item() == pytest.approx(expected.item())
    assert losses.kl(p.log(), p).item() == pytest.approx(0, abs=1e-12)


def test_kl_ignores_tokens_that_p_excludes():
    """After top-k p has zeros: 0 log 0 = 0, and the gradient stays finite."""
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    p = torch.tensor([[0.25, 0.75, 0.0]])
    loss = losses.kl(logits, p)
    log_q = [x - math.log(sum(math.exp(y) for y in (1, 2, 3))) for x in (1, 2)]
    expected = 0.25 * (math.log(0.25) - log_q[0]) + 0.75 * (math.log(0.75) - log_q[1])
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert torch.allclose(logits.grad, logits.detach().softmax(-1) - p, atol=1e-6)


def test_total_variation_is_the_rate_of_strict_rejection():
    logits = torch.randn(3, 4, 6, dtype=torch.float64)
    p = torch.randn(3, 4, 6, dtype=torch.float64).softmax(-1)
    half_l1 = 0.5 * (logits.softmax(-1) - p).abs().sum(-1).mean()
    assert losses.total_variation(logits, p).item() == pytest.approx(half_l1.item())
    assert losses.total_variation(logits, p).item() == pytest.approx(
        1 - acceptance_rate(p, logits.softmax(-1)).mean().item()
    )
    assert losses.total_variation(p.log(), p).item() == pytest.approx(0, abs=1e-12)


def test_cross_entropy_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0]]])
    tokens = torch.tensor([[1, 1]])
    assert losses.cross_entropy(logits, tokens).item() == pytest.approx((math.log(4 / 3) + math.log(5.0)) / 2)
