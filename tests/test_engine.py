"""The engine and the schedules: passes, batch invariance, errors."""

import micro
import pytest
import torch

from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.distributions import Sampling, guided_probabilities
from ssd_train.grid import Grid
from ssd_train.heads import Heads, HeadSpec

SAMPLING = Sampling(guidance=2.0)


@pytest.fixture(scope="module")
def backbone():
    return micro.janus((4, 6), scale=20.0)


@pytest.fixture(scope="module")
def heads(backbone):
    torch.manual_seed(0)
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=5, k_vertical=2))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def ssd(**settings):
    return Decoder(Rows(**settings), HeadDrafter(), Strict())


def count_passes(schedule, grid):
    """Runs a script without a backbone; nothing is ever accepted."""

    class Nothing:
        accepted = [False]

    script, passes, outcome = schedule.script(grid), 1, None
    while True:
        try:
            step = script.send(outcome)
        except StopIteration:
            return passes
        passes += bool(step.feed)
        outcome = Nothing()


@pytest.mark.parametrize("height, width", [(24, 24), (16, 16), (48, 48), (90, 90), (68, 120), (9, 11)])
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_passes_of_the_published_schedule(height, width, rounds):
    """N1 + R (r + 1), N1 = 2 ceil((w - 1) / 5) + 1 (method: arXiv 2606.20543)."""
    first_row = 2 * -(-(width - 1) // 5) + 1
    assert count_passes(Rows(rounds=rounds), Grid(height, width)) == first_row + (height - 1) * (rounds + 1)


def test_published_pass_counts():
    """Janus-Pro: 34, 57, 80. Lumina staged b=5, i=4; Emu3 r=6: the published formula adds 2 for end-of-line tokens,
    which cost us no pass of their own."""
    assert [count_passes(Rows(rounds=r), Grid(24, 24)) for r in (0, 1, 2)] == [34, 57, 80]
    blocks, rows = 24, 47
    staged = Rows(rounds=5, rows_per_block=2, staged_rounds=4)
    assert count_passes(staged, Grid(48, 48, True)) == 21 + blocks * 5 + rows + (rows - blocks) * 4
    assert count_passes(Rows(rounds=6), Grid(90, 90, True)) == 37 + 89 * 7


def test_a_chunk_of_one_token_needs_no_verification():
    assert count_passes(Rows(rounds=0), Grid(1, 7)) == 1 + 2 + 1


def test_passes_in_the_engine_match_the_script(backbone, heads):
    prompts = micro.prompts(2)
    for decoder in ssd(rounds=1), ssd(rounds=2, rows_per_block=2, staged_rounds=1), Decoder(Autoregressive()):
        decoded = decoder.bind(backbone, heads)(backbone, prompts, [0, 1], SAMPLING)
        assert decoded.trace.passes == [count_passes(decoder.schedule, backbone.grid)] * 2
        assert decoded.tokens.min() >= 0
    assert decoded.trace.passes == [backbone.grid.size] * 2


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"rounds": 0},
        {"rounds": 2},
        {"rounds": None, "first_row_rounds": None, "until_settled": True},
        {"rounds": 3, "rows_per_block": 2, "staged_rounds": 1, "until_settled": True},
    ],
)
def test_a_sample_is_the_same_alone_and_in_a_batch(backbone, heads, settings):
    """Identical tokens and passes in float64, prompts of unequal lengths, samples that settle at different times."""
    decoder = (Decoder(Autoregressive()) if settings is None else ssd(**settings)).bind(backbone, heads)
    prompts, seeds = micro.prompts(5, unequal=True), [11, 12, 13, 14, 15]
    together = decoder(backbone, prompts, seeds, SAMPLING)
    for b in reversed(range(5)):
        keep = prompts.attend[0, b]
        one = PromptBatch(prompts.ids[:, b : b + 1, keep], prompts.attend[:, b : b + 1, keep])
        alone = decoder(backbone, one, seeds[b : b + 1], SAMPLING)
        assert torch.equal(alone.tokens[0], together.tokens[b])
        assert alone.trace.passes == together.trace.passes[b : b + 1]


def test_seeds_matter(backbone, heads):
    decoder = ssd(rounds=1).bind(backbone, heads)
    prompts = micro.prompts(1)
    images = {tuple(decoder(backbone, prompts, [seed], SAMPLING).tokens.flatten().tolist()) for seed in range(8)}
    assert len(images) > 4


def test_ar_states_are_the_teacher_forced_ones(backbone):
    prompts = micro.prompts(3, unequal=True)
    decoded = Decoder(Autoregressive())(backbone, prompts, [1, 2, 3], SAMPLING)
    forced = backbone.teacher_force(prompts, decoded.tokens.flatten(1))
    assert torch.allclose(decoded.hidden, forced, atol=1e-12)
    assert forced.std() > 0.1


def test_greedy_settles_on_greedy_ar(backbone, heads):
    """Temperature 0 with rounds to the fixed point: bit for bit the greedy AR image."""
    greedy = Sampling(guidance=2.0, temperature=0)
    prompts = micro.prompts(4)
    settled = ssd(rounds=None, first_row_rounds=None, until_settled=True).bind(backbone, heads)
    expected = Decoder(Autoregressive())(backbone, prompts, range(4), greedy)
    assert torch.equal(settled(backbone, prompts, range(4), greedy).tokens, expected.tokens)


def test_settling_changes_nothing_but_the_passes(backbone, heads):
    """Leaving a row after a round without re-draws gives the very tokens of running all rounds."""
    prompts, seeds = micro.prompts(6), range(6)
    everything = dict(rounds=5, first_row_rounds=5)
    full = ssd(**everything).bind(backbone, heads)(backbone, prompts, seeds, SAMPLING)
    settled = ssd(**everything, until_settled=True).bind(backbone, heads)(backbone, prompts, seeds, SAMPLING)
    assert torch.equal(full.tokens, settled.tokens)
    assert max(settled.trace.passes) < full.trace.passes[0]


def test_trace_accounts_for_every_draft(backbone, heads):
    decoded = ssd(rounds=2, chunk=3).bind(backbone, heads)(backbone, micro.prompts(2), [0, 1], SAMPLING)
    trace, grid = decoded.trace, backbone.grid
    first = trace.drafted & (trace.round == 1)
    # everything but position 0, each later row's first token, and each later chunk's first token
    chunk_starts = {0, 4}
    drafted = set(range(grid.size)) - {grid.position(y, 0) for y in range(1, grid.height)} - chunk_starts
    for sample in range(2):
        assert set(trace.position[first & (trace.sample == sample)].tolist()) == drafted
    vertical = first & (trace.position >= grid.width)
    assert trace.offset[vertical].unique(dim=0).tolist() == [[1, 0]]
    assert trace.offset[first & ~vertical].unique(dim=0).tolist() == [[0, 1], [0, 2], [0, 3]]
    last = {}
    for sample, position, token in zip(*(x.tolist() for x in (trace.sample, trace.position, trace.token)), strict=True):
        last[sample, position] = token
    assert all(decoded.tokens[s].flatten()[p] == t for (s, p), t in last.items())


def test_perfect_drafts_are_always_accepted(backbone):
    """A drafter that proposes the target itself: the whole first round passes."""

    class Oracle(HeadDrafter):
        def bind(self, backbone, heads):
            return self

        def propose(self, state, items, source, offset):
            tokens = state.tokens[:, :-1].clamp_min(0).clone()
            hidden = backbone.teacher_force(state.prompts, tokens)
            return guided_probabilities(backbone.readout(hidden[:, items.sample, items.position]), state.sampling)

    decoder = Decoder(Rows(rounds=1, chunk=1), Oracle(), Strict()).bind(backbone)
    trace = decoder(backbone, micro.prompts(3), [0, 1, 2], SAMPLING).trace
    first_in_row = trace.drafted & (trace.position % backbone.grid.width == 1) & (trace.round == 1)
    assert trace.accepted[first_in_row].all()


def test_errors_name_the_value_and_the_mend(backbone, heads):
    with pytest.raises(ValueError, match="Rows drafts: it needs a drafter and a rule"):
        Decoder(Rows()).bind(backbone)
    with pytest.raises(ValueError, match="train and export some first"):
        ssd().bind(backbone)
    with pytest.raises(ValueError, match=r"no vertical head for offset 3; there are .*'vertical_2'"):
        ssd(rounds=0, rows_per_block=3).bind(backbone, heads)(backbone, micro.prompts(1), [0], SAMPLING)
    with pytest.raises(ValueError, match="2 prompts but 1 seeds"):
        Decoder(Autoregressive())(backbone, micro.prompts(2), [0], SAMPLING)
    with pytest.raises(ValueError, match="rounds is null, no limit; that needs until_settled=true"):
        Rows(rounds=None)
    with pytest.raises(ValueError, match="chunk is 0; expected at least 1"):
        Rows(chunk=0)


def test_wide_heads_see_in_decoding_what_they_saw_in_training(backbone):
    """A vertical head with three neighbours: the drafter's z equals the training grid's, edges included."""
    from ssd_train.heads import Direction, pairs, widen

    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=1, k_vertical=1, context=3)).double()
    seen = {}

    class Spy(HeadDrafter):
        def _inputs(self, state, tokens, sample, position, context):
            z = super()._inputs(state, tokens, sample, position, context)
            if context > 1:
                seen.update(zip(position.tolist(), z.unbind(1), strict=True))
            return z

    decoder = Decoder(Rows(rounds=0, chunk=1), Spy(), Strict()).bind(backbone, heads)
    decoded = decoder(backbone, micro.prompts(1), [3], SAMPLING)
    grid = backbone.grid
    hidden = decoded.hidden.unflatten(2, (grid.height, grid.width))
    z = widen(heads.inputs(hidden, backbone.embed(decoded.tokens).expand(2, -1, -1, -1, -1)), 3)
    expected = pairs(z, grid, Direction.VERTICAL, 1)[0].flatten(2, 3)[:, 0]
    assert set(seen) == {p for p in range(grid.size - grid.width) if p % grid.width}
    for position, mine in seen.items():
        assert torch.allclose(mine, expected[:, position], atol=1e-12)
