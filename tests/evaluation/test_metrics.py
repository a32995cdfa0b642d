"""Figures computed by hand, and NLL against an independent loop over an uncached model."""

import json
import math

import micro
import pytest
import torch

from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.decoding.trace import Trace
from ssd_train.distributions import Sampling
from ssd_train.evaluation import metrics
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Heads, HeadSpec

GRID = Grid(2, 3)


def trace(*items, passes=(3,)):
    """Items are (sample, position, round, drafted, accepted, (rows, columns))."""
    sample, position, rounds, drafted, accepted, offset = zip(*items, strict=True)
    return Trace(
        passes=list(passes),
        pass_index=torch.zeros(len(items), dtype=torch.int64),
        sample=torch.tensor(sample),
        position=torch.tensor(position),
        round=torch.tensor(rounds),
        drafted=torch.tensor(drafted),
        accepted=torch.tensor(accepted),
        token=torch.zeros(len(items), dtype=torch.int64),
        offset=torch.tensor(offset),
    )


ONE = trace(
    (0, 0, 1, False, False, (0, 0)),  # drawn, not drafted: counts nowhere
    (0, 1, 1, True, True, (0, 1)),
    (0, 2, 1, True, False, (0, 2)),
    (0, 1, 2, True, True, (0, 1)),
    (0, 2, 2, True, True, (0, 2)),
    (0, 3, 1, False, False, (0, 0)),
    (0, 4, 1, True, False, (1, 0)),
    (0, 5, 1, True, True, (1, 0)),
)
TWO = trace((0, 1, 1, True, False, (0, 1)), (1, 4, 1, True, False, (1, 0)), passes=(5, 10))


def test_acceptance_by_hand():
    acceptance = metrics.acceptance([ONE], GRID)
    assert acceptance.rate == 4 / 6
    assert acceptance.by_round == {1: 2 / 4, 2: 1.0}
    assert acceptance.by_offset == {"horizontal_1": 1.0, "horizontal_2": 0.0, "vertical_1": 0.5}
    nan = math.nan
    expected = torch.tensor([[nan, 1, 0], [nan, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(acceptance.map, expected, equal_nan=True, rtol=0, atol=0)


def test_later_judgements_do_not_count_for_offsets_and_the_map():
    again = trace(*((0, 1, rounds, True, rounds > 1, (0, 1)) for rounds in (1, 2, 3)))
    acceptance = metrics.acceptance([again], GRID)
    assert acceptance.by_offset == {"horizontal_1": 0.0}
    assert acceptance.map[0, 1] == 0
    assert acceptance.rate == 2 / 3


def test_traces_merge_like_counts():
    together = metrics.acceptance([ONE, TWO], GRID).to_dict()
    assert (metrics.acceptance([ONE], GRID) + metrics.acceptance([TWO], GRID)).to_dict() == together
    offsets = together["counts"]["by_offset"]
    assert offsets == {"horizontal_1": [1, 2], "horizontal_2": [0, 1], "vertical_1": [1, 3]}
    assert together["rate"] == 4 / 8


def test_acceptance_to_json_has_null_for_nan():
    content = json.loads(json.dumps(metrics.acceptance([ONE], GRID).to_dict(), allow_nan=False))
    assert content["map"] == [[None, 1.0, 0.0], [None, 0.0, 1.0]]
    assert content["by_round"] == {"1": 0.5, "2": 1.0}
    nothing = metrics.acceptance([trace((0, 0, 1, False, False, (0, 0)))], GRID).to_dict()
    assert (nothing["rate"], nothing["by_round"], nothing["by_offset"]) == (None, {}, {})


def test_offsets_that_no_single_head_covers_keep_apart():
    diagonal = trace((0, 4, 1, True, True, (1, -1)), (0, 5, 1, True, False, (1, 0)))
    assert metrics.acceptance([diagonal], GRID).by_offset == {"rows_1_columns_-1": 1.0, "vertical_1": 0.0}


def test_acceptance_of_a_real_trace_agrees_with_a_plain_count():
    backbone = micro.janus((4, 4), vocabulary=6)
    torch.manual_seed(0)
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=3, k_vertical=1))
    decoder = Decoder(Rows(rounds=2, chunk=3), HeadDrafter(), Strict()).bind(backbone, heads)
    traces = [
        decoder(backbone, micro.prompts(8), range(seed, seed + 8), Sampling(guidance=2.0), timed=True).trace
        for seed in (0, 8)
    ]
    acceptance = metrics.acceptance(traces, backbone.grid)
    first = {}
    for t in traces:
        columns = (t.round, t.drafted, t.accepted, t.offset)
        for rounds, drafted, accepted, offset in zip(*(c.tolist() for c in columns), strict=True):
            if drafted and rounds == 1:
                first.setdefault(tuple(offset), []).append(accepted)
    for (rows, columns), outcomes in first.items():
        name = f"vertical_{rows}" if rows else f"horizontal_{columns}"
        assert acceptance.by_offset[name] == sum(outcomes) / len(outcomes)
    # A row's first position is drawn, never drafted; one chunk does the first row.
    assert acceptance.map.isnan().sum() == 4
    assert set(acceptance.by_offset) == {"horizontal_1", "horizontal_2", "horizontal_3", "vertical_1"}
    assert metrics.mean_passes(traces) == 1 + 1 * (1 + 1) + 3 * (2 + 1)
    assert 0 < metrics.draft_fraction(traces) < 1


def test_mean_passes_is_over_images_not_traces():
    assert metrics.mean_passes([ONE, TWO]) == (3 + 5 + 10) / 3


def test_draft_fraction():
    timed = Trace(passes=[2], seconds={"prompt": 1.0, "draft": 2.0, "pass": 5.0})
    more = Trace(passes=[2], seconds={"prompt": 1.0, "draft": 1.0})
    assert metrics.draft_fraction([timed, more]) == 0.3
    with pytest.raises(ValueError, match="timed=True"):
        metrics.draft_fraction([Trace(passes=[2])])


def repeated(n):
    one = micro.prompts(1)
    return PromptBatch(one.ids.repeat(1, n, 1), one.attend.repeat(1, n, 1))


def independent_nll(backbone, prompts, tokens, sampling):
    """Token by token from the transformers class's own logits; a plain softmax over the kept tokens."""
    flat = tokens.flatten(1)
    with backbone.intact(), torch.no_grad():
        logits = backbone.reference_logits(prompts, flat)
    batch = len(flat)
    means = []
    for b in range(batch):
        total = 0.0
        for j, token in enumerate(flat[b].tolist()):
            conditional, unconditional = logits[b, j], logits[batch + b, j]
            guided = unconditional + sampling.guidance * (conditional - unconditional)
            guided = guided / sampling.temperature
            kept = guided.tolist()
            if sampling.top_k:
                kept = sorted(kept)[-sampling.top_k :]
                if guided[token] < kept[0]:  # excluded: its cost without top-k
                    kept = guided.tolist()
            total -= float(guided[token]) - math.log(sum(math.exp(x) for x in kept))
        means.append(total / flat.shape[1])
    return torch.tensor(means, dtype=torch.float64)


@pytest.mark.parametrize("sampling", [Sampling(2.0), Sampling(1.5, temperature=0.7), Sampling(2.0, 0.6, top_k=3)])
@pytest.mark.parametrize("elements", [1, 100, 2**24])
def test_nll_against_an_independent_loop(sampling, elements):
    backbone = micro.janus((3, 4), vocabulary=7, scale=4.0)
    prompts = micro.prompts(3, unequal=True)
    tokens = torch.randint(7, (3, 3, 4), generator=torch.Generator().manual_seed(0))
    nll = metrics.negative_log_likelihood(backbone, prompts, tokens, sampling, elements)
    expected = independent_nll(backbone, prompts, tokens, sampling)
    torch.testing.assert_close(nll, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(3.0, top_k=1), Sampling(3.0, top_p=0.05), Sampling(3.0, 0.0)])
def test_an_excluded_token_costs_something_finite_and_more_than_any_kept_one(sampling):
    backbone = micro.janus((1, 2), vocabulary=6)
    greedy = Decoder(Autoregressive()).bind(backbone)(backbone, repeated(1), [0], Sampling(3.0, 0.0)).tokens
    tokens = torch.stack([greedy.expand(6, 1, 2)[..., 0], torch.arange(6)[:, None]], -1)
    cost = 2 * metrics.negative_log_likelihood(backbone, repeated(6), tokens, sampling)
    free = 2 * metrics.negative_log_likelihood(backbone, repeated(6), tokens, Sampling(3.0))
    untruncated = -(-free).log_softmax(0)  # of the last token alone
    best = int(greedy[0, 0, 1])
    excluded = torch.arange(6) != best
    assert cost[best] == 0
    assert torch.isfinite(cost).all()
    assert (cost[excluded] > 0).all()
    torch.testing.assert_close(cost[excluded], untruncated[excluded])


def test_nll_of_ar_samples_is_the_entropy_rate():
    """Mean NLL of exact samples is the mean entropy of p along them; 600 images, 6 standard errors: 2e-9."""
    backbone = micro.janus((2, 2), vocabulary=4, scale=3.0)
    sampling, n = Sampling(1.5), 600
    prompts = repeated(n)
    tokens = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(n), sampling).tokens
    hidden = backbone.teacher_force(prompts, tokens.flatten(1))
    conditional, unconditional = backbone.readout(hidden)
    p = (unconditional + 1.5 * (conditional - unconditional)).softmax(-1)
    entropy = torch.special.entr(p).sum(-1).mean(1)
    nll = metrics.negative_log_likelihood(backbone, prompts, tokens, sampling)
    difference = nll - entropy
    assert abs(difference.mean()) < 6 * difference.std() / n**0.5


def test_texture_by_hand():
    flat = torch.full((1, 6, 6, 3), 90, dtype=torch.uint8)
    assert metrics.texture(flat) == {"laplacian_variance": 0.0, "luma_deviation": 0.0}
    board = (torch.arange(6)[:, None] + torch.arange(6)) % 2 * 100
    board = board.to(torch.uint8)[None, :, :, None].expand(1, 6, 6, 3)
    # The Laplacian is +400 on black and -400 on white squares, half of each.
    figures = metrics.texture(board)
    assert figures["laplacian_variance"] == pytest.approx(400**2)
    assert figures["luma_deviation"] == pytest.approx(50)
    # A ramp has contrast but no fine detail; of green alone, luma sees 0.587.
    ramp = torch.zeros(1, 6, 6, 3, dtype=torch.uint8)
    ramp[..., 1] = torch.arange(6) * 10
    figures = metrics.texture(torch.cat([ramp, flat]))
    assert figures["laplacian_variance"].tolist() == pytest.approx([0, 0], abs=1e-12)
    assert figures["luma_deviation"].tolist() == pytest.approx([5.87 * (35 / 12) ** 0.5, 0])


def test_washing_out_lowers_texture():
    noise = torch.randint(256, (2, 16, 16, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    washed = (noise // 2 + 64).to(torch.uint8)
    sharp, pale = metrics.texture(noise), metrics.texture(washed)
    assert pale["laplacian_variance"].tolist() == pytest.approx((sharp["laplacian_variance"] / 4).tolist(), rel=0.02)
    assert pale["luma_deviation"].tolist() == pytest.approx((sharp["luma_deviation"] / 2).tolist(), rel=0.02)


def test_code_entropy():
    assert metrics.code_entropy(torch.tensor([[[0, 1], [2, 3]]]), 8) == pytest.approx(math.log(4))
    skewed = metrics.code_entropy(torch.tensor([0, 0, 0, 1]), 2)
    assert skewed == pytest.approx(2 * math.log(2) - 0.75 * math.log(3))
    assert metrics.code_entropy(torch.zeros(2, 3, 3, dtype=torch.int64), 8) == 0


def test_wilson():
    """The interval's ends are the proportions p that lie z standard errors *of p* from the measured one."""
    value, low, high = metrics.wilson(45, 50, z=1.96)
    assert value == 0.9
    assert low < 0.9 < high
    for p in low, high:
        assert abs(0.9 - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / 50))
    assert metrics.wilson(450, 500)[1] > low
    assert metrics.wilson(0, 10)[:2] == (0, 0)
    assert metrics.wilson(10, 10)[::2] == (1, 1)
    assert metrics.wilson(0, 10)[2] == pytest.approx(1.96**2 / (10 + 1.96**2))
    with pytest.raises(ValueError, match="11 successes of 10"):
        metrics.wilson(11, 10)
    with pytest.raises(ValueError, match="0 successes of 0"):
        metrics.wilson(0, 0)


def test_the_energy_distance_by_hand():
    """Ranks of 1, 2 and 9, 8 are 1, 2 and 4, 3: 2 * 2 - 0.5 - 0.5 over 2 * 2. Two of the four ways to change sides
    (all, none) are as far apart."""
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[9.0], [8.0]])
    distance, p = metrics.energy_distance(a, b, permutations=4000)
    assert distance == pytest.approx(0.75)
    assert p == pytest.approx(0.5, abs=0.04)
    assert metrics.energy_distance(a, a) == (0, 1)
    assert metrics.energy_distance(a * 1e9, b * 1e9)[0] == pytest.approx(0.75)
    with pytest.raises(ValueError, match="1 and 2 images; expected a pair a prompt"):
        metrics.energy_distance(a[:1], b)


def test_the_energy_distance_tells_a_shift_from_chance_and_outliers_do_not_rule_it():
    """200 data sets of one distribution: p is uniform, below 0.05 in 2 to 22 of them but for one time in 10^3. A shift
    of one of five features by 0.7 is seen, with outliers of 1e6 in both sets too."""
    torch.manual_seed(0)
    p = [metrics.energy_distance(*torch.randn(2, 40, 5), permutations=99)[1] for _ in range(200)]
    assert 2 <= sum(x <= 0.05 for x in p) <= 22
    a, b = torch.randn(2, 128, 5)
    b[:, 2] += 0.7
    a[0], b[1] = 1e6, -1e6
    assert metrics.energy_distance(a, b)[1] < 0.01
