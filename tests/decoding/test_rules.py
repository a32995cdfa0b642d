"""Each acceptance rule at values worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from ssd_train.decoding.rules.constant import Addition, Amplify
from ssd_train.decoding.rules.csd import EntropyRelaxed
from ssd_train.decoding.rules.grouped import Grouped
from ssd_train.decoding.rules.lantern import LatentNeighbourhood
from ssd_train.decoding.rules.strict import Strict
from ssd_train.distributions import Sampling, accept_and_redraw, guided_probabilities

P = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).double()
Q = torch.tensor([[0.4, 0.4, 0.1, 0.1]]).double()
RESIDUAL = [0.0, 0.0, 0.4, 0.6]  # max(0, p - q) = (0, 0, .2, .3)


def judge(rule, draft, p=P, q=Q):
    accept, weight = rule(p, q, torch.tensor([draft]))
    return accept.item(), (weight / weight.sum()).squeeze(0).tolist()


def backbone(*rows):
    return SimpleNamespace(output=SimpleNamespace(embedding=torch.tensor(rows)))


def test_strict():
    accept, weight = judge(Strict(), 0)
    assert accept == pytest.approx(0.25)
    assert weight == pytest.approx(RESIDUAL)
    assert judge(Strict(), 3)[0] == pytest.approx(4.0)


def test_addition_and_amplify():
    assert judge(Addition(0.1), 0) == (pytest.approx(0.35), pytest.approx(RESIDUAL))
    assert judge(Amplify(1.3), 1) == (pytest.approx(0.65), pytest.approx(RESIDUAL))


def test_entropy_relaxed():
    """TV(p, q) = 0.5; H(p) = 1.2799 nats."""
    entropy = -sum(x * math.log(x) for x in P[0].tolist())
    assert judge(EntropyRelaxed(0.5, threshold=0.51), 0) == (
        pytest.approx(0.25 + 0.5 * entropy), pytest.approx(RESIDUAL)
    )  # fmt: skip
    assert judge(EntropyRelaxed(0.5, threshold=0.49), 0)[0] == pytest.approx(0.25)
    one_hot = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).double()
    assert judge(EntropyRelaxed(0.5, threshold=1.0), 0, p=one_hot)[0] == 0


def test_grouped():
    """Ranking by p: 3 2 1 0. Around token 2, a window of two others: tokens 3 and 1."""
    near = backbone([0.0], [0.5], [0.0], [0.5])
    assert judge(Grouped(2, gap=0.15, distance=0.5).bind(near), 2) == (
        pytest.approx((0.4 + 0.3 + 0.2) / (0.1 + 0.1 + 0.4)), pytest.approx(RESIDUAL)
    )  # fmt: skip
    # a gap of 0.05 leaves the draft alone, and so does a distance that no neighbour is within
    assert judge(Grouped(2, gap=0.05, distance=0.5).bind(near), 2)[0] == pytest.approx(3.0)
    assert judge(Grouped(2, gap=0.15, distance=0.2).bind(near), 2)[0] == pytest.approx(3.0)
    # at the end of the ranking the window is shifted: around token 0 stand 1 and 2, of which 2 is over the gap
    assert judge(Grouped(2, gap=0.15, distance=0.5).bind(near), 0)[0] == pytest.approx((0.1 + 0.2) / 0.8)


def test_latent_neighbourhood():
    """Token 0's neighbours by embedding: 1, then 2, then 3."""
    line = backbone([0.0], [1.0], [2.0], [3.5])
    # p of 1 (0.2) fits into delta = 0.3, that of 1 and 2 (0.5) does not; 1 is then out of the residual
    assert judge(LatentNeighbourhood(k=3, delta=0.3).bind(line), 0) == (
        pytest.approx((0.1 + 0.2) / 0.4), pytest.approx(RESIDUAL)
    )  # fmt: skip
    accept, weight = judge(LatentNeighbourhood(k=3, delta=0.51).bind(line), 0)
    assert accept == pytest.approx((0.1 + 0.2 + 0.3) / 0.4)
    assert weight == pytest.approx([0, 0, 0, 1])
    assert judge(LatentNeighbourhood(k=1, delta=0.5).bind(line), 0)[0] == pytest.approx(0.3 / 0.4)
    # relative: the added mass within (3.5 - 1) * 0.1
    assert judge(LatentNeighbourhood(k=3, delta=3.5, relative=True).bind(line), 0)[0] == pytest.approx(0.3 / 0.4)
    # no neighbours: the strict rule
    assert judge(LatentNeighbourhood(k=0).bind(line), 1) == (pytest.approx(0.5), pytest.approx(RESIDUAL))


def guided(conditional, unconditional):
    """Guidance 2 and top 3 of the logarithms of these: proportional to c^2 / u, without the smallest."""
    logits = torch.tensor([conditional, unconditional]).double().log()[:, None]
    return guided_probabilities(logits, Sampling(guidance=2.0, top_k=3))


@pytest.mark.parametrize(
    "rule, draft, accept, weight",
    [
        (Strict(), 0, 1.0, [0.8, 0.2, 0, 0]),
        (Strict(), 2, 0.5, [0.8, 0.2, 0, 0]),
        (Strict(), 3, 0, [0.8, 0.2, 0, 0]),
        (Addition(0.1), 2, 0.6, [0.8, 0.2, 0, 0]),
        (Addition(0.1), 3, 0.1, [0.8, 0.2, 0, 0]),
        (Amplify(1.5), 2, 0.75, [0.8, 0.2, 0, 0]),
        (Amplify(1.5), 3, 0, [0.8, 0.2, 0, 0]),
        # TV is 0.625, the entropy (4 log 2 + 3 log 8/3 + log 8) / 8 = 0.9743.
        (EntropyRelaxed(0.5, threshold=0.63), 2, 0.5 + 0.48716, [0.8, 0.2, 0, 0]),
        (EntropyRelaxed(0.5, threshold=0.63), 3, 0.48716, [0.8, 0.2, 0, 0]),
        (EntropyRelaxed(0.5, threshold=0.62), 3, 0, [0.8, 0.2, 0, 0]),
        # By p the ranking is 0 1 2 3: around 2 stand 1, a gap of 0.25 away, and 3, one of 0.125; around 3 the same.
        (Grouped(2, gap=0.3, distance=9), 2, 0.5 / 1, [0.8, 0.2, 0, 0]),
        (Grouped(2, gap=0.2, distance=9), 2, 0.125 / 0.75, [0.8, 0.2, 0, 0]),
        (Grouped(2, gap=0.2, distance=9), 3, 0.125 / 0.75, [0.8, 0.2, 0, 0]),
        # Nearest to 2 is 1; nearest to 3 are 2 and then 1.
        (LatentNeighbourhood(1, delta=0.4), 2, (0.125 + 0.375) / 0.25, [1, 0, 0, 0]),
        (LatentNeighbourhood(1, delta=0.3), 2, 0.5, [0.8, 0.2, 0, 0]),
        (LatentNeighbourhood(2, delta=0.2), 3, 0.125 / 0.5, [0.8, 0.2, 0, 0]),
        (LatentNeighbourhood(2, delta=0.6), 3, (0.125 + 0.375) / 0.5, [1, 0, 0, 0]),
    ],
)
def test_with_guidance_and_top_k(rule, draft, accept, weight):
    """p from (8, 6, 2, 1) and q from (1, 2, 2, 4), each without its 1: max(0, p - q) = (4, 1, 0, 0) / 8."""
    p, q = guided([4, 6, 2, 4], [2, 6, 2, 16]), guided([2, 4, 2, 4], [4, 8, 2, 4])
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.375, 0.125, 0]]).double())
    torch.testing.assert_close(q, torch.tensor([[0, 0.25, 0.25, 0.5]]).double())
    found = judge(rule.bind(backbone([0.0], [1.0], [2.0], [3.5])), draft, p, q)
    assert found == (pytest.approx(accept, abs=1e-5), pytest.approx(weight))


RULES = [Strict(), Addition(), Amplify(), EntropyRelaxed(), Grouped(), LatentNeighbourhood()]
LEFT, RIGHT = [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    "p, q, draft, accepted",
    [
        ([1.0], [1.0], 0, True),
        (P[0].tolist(), P[0].tolist(), 0, True),
        (LEFT, RIGHT, 0, True),
        (LEFT, RIGHT, 2, False),
        (LEFT, LEFT, 2, True),
    ],
    ids=["one token", "p is q", "q rules it out", "disjoint", "both rule it out"],
)
def test_degenerate_distributions(rule, p, q, draft, accepted):
    """Certain verdicts, but for Addition's epsilon. A rejected draft is re-drawn from all of p, as q covers none of
    it; what both rule out was let pass by a lossy rule before and stands."""
    rule.bind(backbone(*([0.1 * i] for i in range(len(p)))))
    numbers = torch.linspace(0.01, 0.99, 50).double()
    p, q = (torch.tensor([x]).double().expand(50, -1) for x in (p, q))
    drafts = torch.full((50,), draft)
    accept, weight = rule(p, q, drafts)
    epsilon = getattr(rule, "epsilon", 0.0)
    u = 1 - 1e-9 if accepted else epsilon + 1e-9
    verdict = accept_and_redraw(drafts, accept, weight, torch.full_like(numbers, u), numbers)
    assert (verdict.accepted == accepted).all()
    assert weight.isfinite().all()
    assert (weight.sum(1) > 0).all()
    if accepted:
        assert (verdict.token == draft).all()
        assert (accept[q[:, draft] > 0] >= 1).all()
    else:
        assert (accept == epsilon).all()
        torch.testing.assert_close(weight / weight.sum(1, keepdim=True), p)
        assert (p.gather(1, verdict.token[:, None]) > 0).all()


def test_only_the_strict_rule_calls_itself_lossless():
    assert Strict().lossless
    lossy = Addition(), Amplify(), EntropyRelaxed(), Grouped(), LatentNeighbourhood()
    assert not any(rule.lossless for rule in lossy)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Addition(1.5), "epsilon is 1.5; expected between 0 and 1"),
        (lambda: Amplify(0.5), "k is 0.5; expected at least 1"),
        (lambda: EntropyRelaxed(strength=-1), "strength is -1; expected >= 0"),
        (lambda: EntropyRelaxed(threshold=2), "threshold is 2; expected between 0 and 1"),
        (lambda: Grouped(size=-1), "size is -1; expected >= 0"),
        (lambda: LatentNeighbourhood(delta=0.5, relative=True), "delta is 0.5; expected at least 1"),
        (lambda: LatentNeighbourhood(delta=1.0), "delta is 1.0; expected a probability, below 1"),
    ],
)
def test_bad_settings_name_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
