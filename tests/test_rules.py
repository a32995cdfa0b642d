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


@pytest.mark.parametrize("rule", [Strict(), Addition(), Amplify(), EntropyRelaxed(), Grouped(), LatentNeighbourhood()])
def test_a_vocabulary_of_one_token_is_always_accepted(rule):
    rule.bind(backbone([1.0, 2.0]))
    one = torch.ones(2, 1).double()
    accept, weight = rule(one, one, torch.zeros(2, dtype=torch.int64))
    assert (accept >= 1).all()
    assert (weight > 0).all()


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
    ],
)
def test_bad_settings_name_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
