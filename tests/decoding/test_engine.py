"""The engine and the schedules: passes, batch invariance, errors."""

import random
from types import SimpleNamespace

import micro
import pytest
import torch

from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding import engine
from ssd_train.decoding.drafters.early_exit import EarlyExit
from ssd_train.decoding.drafters.guess import Copy, Random
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.parts import Drafter
from ssd_train.decoding.rules.constant import Amplify
from ssd_train.decoding.rules.csd import EntropyRelaxed
from ssd_train.decoding.rules.lantern import LatentNeighbourhood
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.chunks import Chunks
from ssd_train.decoding.schedules.jacobi import JacobiWindow
from ssd_train.decoding.schedules.parallel_jacobi import ParallelJacobi
from ssd_train.decoding.schedules.prefix import Prefix
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.decoding.schedules.wave import Wave
from ssd_train.decoding.schedules.zipar import ZipAR
from ssd_train.decoding.state import State
from ssd_train.distributions import Sampling, guided_probabilities
from ssd_train.grid import Grid
from ssd_train.heads.corrector import CorrectorSpec
from ssd_train.heads.predictors import Heads, HeadSpec

SAMPLING = Sampling(guidance=2.0)
CORRECTOR = CorrectorSpec(width=8, depth=2)


@pytest.fixture(scope="module")
def backbone():
    return micro.janus((4, 6), scale=20.0)


@pytest.fixture(scope="module")
def heads(backbone):
    torch.manual_seed(0)
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=5, k_vertical=2, corrector=CORRECTOR))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def ssd(**settings):
    return Decoder(Rows(**settings), HeadDrafter(), Strict())


def window(rows=1.5, coupled=True, reach=3):
    return JacobiWindow(rows, coupled, source="above", reach=reach)


def chain():
    return Prefix(length=3, source="left", within_row=True)


def rehearse(schedule, grid, accept):
    """The steps of a script without a backbone; ``accept()`` decides about each judged position."""
    script, outcome = schedule.script(grid), None
    while True:
        try:
            step = script.send(outcome)
        except StopIteration:
            return
        yield step
        outcome = SimpleNamespace(accepted=[accept() for _ in step.judge])


def count_passes(schedule, grid):
    """Nothing is ever accepted."""
    return 1 + sum(bool(step.feed) for step in rehearse(schedule, grid, lambda: False))


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


@pytest.mark.parametrize("length", [4, 7, 21])
def test_a_window_drafts_only_from_what_has_been_judged(length):
    """Whatever is accepted: sources are judged positions, in the first row within reach; no position is drafted twice;
    and rejections all along cost no more passes than AR."""
    grid, chance = Grid(5, 7), random.Random(0)
    for share in (0, 0.3, 0.7, 0.9, 1):
        judged, drafted, passes = {0}, [], 1
        for step in rehearse(window(length / 7), grid, lambda share=share: chance.random() < share):
            for position, source in step.draft:
                assert source in judged
                assert source == position - 7 if position >= 7 else 1 <= position - source <= 3
            drafted += [position for position, _ in step.draft]
            assert len(step.judge) < length
            judged.update(step.judge)
            passes += 1
        assert drafted == list(range(1, grid.size))
        assert passes <= grid.size if share < 1 else passes < grid.size / 2


@pytest.mark.parametrize("length, lag", [(2, 1), (3, 1), (3, 2), (16, 2), (16, 8)])
def test_parallel_windows_copy_only_what_is_there(length, lag):
    """Whatever is accepted, and where: drafts are copied from tokens of earlier passes, and at the end every position
    has one. A row that is accepted faster than the one above it catches up with it, but does not overtake."""
    grid, chance = Grid(5, 11), random.Random(0)
    for _ in range(50):
        there = {0}
        luck = iter(lambda: chance.random() < chance.choice((0, 0.5, 1)), None)
        for step in rehearse(ParallelJacobi(length, lag), grid, lambda luck=luck: next(luck)):
            assert there.issuperset(source for _, source in step.draft)
            there.update(position for position, _ in step.draft)
            assert there.issuperset(step.feed)
            there.update(step.judge)
        assert there == set(range(grid.size))


def test_a_wave_that_settles_takes_fewer_passes():
    """The bounds: one pass a chunk and row less than the rounds where all is accepted, none less where nothing is."""
    grid = Grid(6, 11)
    settle = [Wave(4, stagger, until_settled=True) for stagger in (1, 2, 4)]
    for schedule, rounds in zip(settle, (Wave(4, 1), Wave(4, 2), Wave(4, 4)), strict=True):
        assert count_passes(schedule, grid) == count_passes(rounds, grid)
        accepted = [step for step in rehearse(schedule, grid, lambda: True) if step.feed]
        # N1 is 2 ceil((w - 1) / 5) + 1, the prompt's pass not in the list; then a row a pass.
        assert len(accepted) == 2 * 2 + grid.height - 1


def test_a_settled_row_of_a_wave_has_final_cache_entries(backbone, heads):
    """All but the last row's states are the teacher-forced ones, whatever was accepted when: every token was fed, at
    last, behind final ones."""
    prompts, seeds = micro.prompts(6), range(6)
    for rounds, stagger, threshold in (2, 1, None), (3, 2, None), (3, 1, 0.3), (None, 1, None), (None, 1, 0.5):
        schedule = Wave(rounds, stagger, threshold, until_settled=True)
        decoded = Decoder(schedule, HeadDrafter(), Strict()).bind(backbone, heads)(backbone, prompts, seeds, SAMPLING)
        forced = backbone.teacher_force(prompts, decoded.tokens.flatten(1))
        settled = backbone.grid.row(backbone.grid.height - 1).start
        assert torch.allclose(decoded.hidden[:, :, :settled], forced[:, :, :settled], atol=1e-12)


@pytest.mark.parametrize("grid", [(3, 7), (7, 3)], ids=["wide", "high"])
@pytest.mark.parametrize(
    "schedule",
    [
        *(ZipAR(lead) for lead in (1, 2, 5)),
        *(ParallelJacobi(length, lag) for length, lag in ((2, 1), (4, 1), (4, 2), (9, 5))),
        Rows(rounds=1, rows_per_block=2, staged_rounds=1),
        Chunks(length=2),
        Prefix(length=3),
        window(reach=None),
        window(coupled=False, reach=None),
        Wave(rounds=2),
        Wave(rounds=3, stagger=1),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_what_later_tokens_see_is_what_stands(monkeypatch, schedule, grid):
    """The last token that the backbone consumed at a position is the one in the image, unless that was settled in the
    last pass, after which nothing is drawn: no cache entry is left of a rejected draft or a stand-in."""
    states = []

    class Kept(engine.State):
        def finish_trace(self):
            states.append(self)
            return super().finish_trace()

    monkeypatch.setattr(engine, "State", Kept)
    backbone = micro.janus(grid, scale=20.0)
    decoder = Decoder(schedule, Copy(), Strict()).bind(backbone)
    trace = decoder(backbone, micro.prompts(8), range(8), SAMPLING).trace
    judged = torch.zeros(8, backbone.grid.size, dtype=torch.int64)
    judged.view(-1).scatter_reduce_(0, trace.sample * backbone.grid.size + trace.position, trace.pass_index, "amax")
    earlier = judged < judged.amax(1, keepdim=True)
    assert earlier[:, : -grid[1]].float().mean() > 0.9
    assert ((states[0].fed == states[0].tokens)[:, :-1] | ~earlier).all()


BATCHED = {
    "ar": lambda: Decoder(Autoregressive()),
    "ssd, r = 0": lambda: ssd(rounds=0),
    "ssd, r = 2": lambda: ssd(rounds=2),
    "ssd, until settled": lambda: ssd(rounds=None, first_row_rounds=None, until_settled=True),
    "ssd, staged": lambda: ssd(rounds=5, rows_per_block=2, staged_rounds=1, until_settled=True),
    "ssd, waves": lambda: Decoder(Wave(3, 1, threshold=0.5), HeadDrafter(sweeps=3), Strict()),
    "ssd, waves, until settled": lambda: Decoder(
        Wave(None, 1, first_row_rounds=None, until_settled=True), HeadDrafter(sweeps=3), Strict()
    ),
    "window": lambda: Decoder(window(), HeadDrafter(sweeps=3), Strict()),
    "window, common noise": lambda: Decoder(window(), HeadDrafter(sweeps=3), common_noise=True),
    "window, copied drafts": lambda: Decoder(window(reach=None), Copy(), Strict()),
    "window, csd": lambda: Decoder(JacobiWindow(1.5), Random(), EntropyRelaxed(0.5, 0.65)),
    "window, amplify": lambda: Decoder(window(), HeadDrafter(sweeps=3), Amplify(2.0)),
    "speculative, self-draft": lambda: Decoder(Prefix(length=3, source="left"), EarlyExit(1), Strict()),
    "eagle": lambda: Decoder(chain(), HeadDrafter(chain=True), Strict()),
    "lantern": lambda: Decoder(chain(), HeadDrafter(chain=True), LatentNeighbourhood(k=1, delta=0.5)),
    "zipar": lambda: Decoder(ZipAR(lead=2), Copy(), Strict()),
}


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED.keys())
def test_a_sample_is_the_same_alone_and_in_a_batch(backbone, heads, make):
    """Identical tokens and passes in float64, prompts of unequal lengths, samples that settle at different times."""
    decoder = make().bind(backbone, heads)
    prompts, seeds = micro.prompts(5, unequal=True), [11, 12, 13, 14, 15]
    together = decoder(backbone, prompts, seeds, SAMPLING)
    assert not decoder.schedule.adaptive or len(set(together.trace.passes)) > 1
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


@pytest.mark.parametrize("schedule", [Rows, Wave], ids=["rows", "merged"])
def test_settling_changes_nothing_but_the_passes(backbone, heads, schedule):
    """Leaving a row after a round without re-draws gives the very tokens of running all rounds."""
    prompts, seeds = micro.prompts(6), range(6)
    full, settled = (
        Decoder(schedule(rounds=6, first_row_rounds=5, until_settled=stop), HeadDrafter(), Strict()).bind(
            backbone, heads
        )(backbone, prompts, seeds, SAMPLING)
        for stop in (False, True)
    )
    assert torch.equal(full.tokens, settled.tokens)
    assert max(settled.trace.passes) < full.trace.passes[0]


@pytest.mark.parametrize("drafter", [HeadDrafter(), HeadDrafter(sweeps=3)], ids=["drafts", "revised drafts"])
@pytest.mark.parametrize(
    "schedule",
    [
        window(),
        window(coupled=False),
        Rows(rounds=None, first_row_rounds=None, until_settled=True),
        Rows(rounds=5, first_row_rounds=5),
        Wave(rounds=None, stagger=1, first_row_rounds=None, until_settled=True),
        Wave(rounds=None, stagger=2, threshold=0.3, first_row_rounds=None, until_settled=True),
    ],
    ids=["window", "fresh window", "until settled", "all rounds", "wave", "adaptive wave"],
)
def test_common_noise_gives_the_image_of_ar(backbone, heads, schedule, drafter):
    """Bit for bit: the fixed point of the re-draws is what token by token gives with the same noise."""
    prompts, seeds = micro.prompts(6, unequal=True), range(6)
    expected = Decoder(Autoregressive(), common_noise=True)(backbone, prompts, seeds, SAMPLING).tokens
    decoder = Decoder(schedule, drafter, common_noise=True).bind(backbone, heads)
    assert decoder.exact(backbone)
    decoded = decoder(backbone, prompts, seeds, SAMPLING)
    assert torch.equal(decoded.tokens, expected)
    assert len(expected.flatten(1).unique(dim=0)) == 6
    assert decoded.trace.accepted.any()


def test_a_sweep_revises_what_sees_another_neighbour_from_the_backbones_state(backbone, heads, monkeypatch):
    """And each position only when one stands otherwise than at its last revision, until nothing moves."""
    passes, seen, sweeps, feed = [], {}, [], State.feed

    def watched(state, positions):
        feed(state, positions)
        passes.append(state.hidden.clone())
        sweeps.append(0)
        seen.clear()

    class Spy(HeadDrafter):
        def revision(self, state, judged, hidden, left, fed):
            near = self.context[judged.position]
            assert torch.equal(hidden, passes[-1][:, judged.sample, judged.position])
            assert torch.equal(left, passes[-1][:, judged.sample, near[:, 0]])
            assert torch.equal(fed, state.fed[judged.sample[:, None], near])

            def revised(index, now):
                sample, position = judged.sample[index], judged.position[index]
                assert torch.equal(now, state.tokens[sample[:, None], near[index]])
                rows = (x.tolist() for x in (sample, position, fed[index], now))
                for b, p, was, stands in zip(*rows, strict=True):
                    assert seen.get((b, p), was) != stands
                    seen[b, p] = stands
                sweeps[-1] += 1
                return hidden[:, index] + hidden.std() * (now - fed[index])[:, :1]  # far, so that much is re-drawn

            return revised

    monkeypatch.setattr(State, "feed", watched)
    Decoder(window(), Spy(sweeps=4), Strict()).bind(backbone, heads)(backbone, micro.prompts(4), range(4), SAMPLING)
    assert {0, 4} < set(sweeps) <= {0, 1, 2, 3, 4}


def test_a_perfect_revision_saves_the_right_neighbour(backbone, heads):
    """If what is right of a re-drawn position moves to its true p, the next pass accepts it for certain."""

    class Clairvoyant(HeadDrafter):
        def revision(self, state, judged, hidden, left, fed):
            def revised(index, now):
                truth = backbone.teacher_force(state.prompts, state.tokens[:, :-1].clamp_min(0))
                return truth[:, judged.sample[index], judged.position[index]]

            return revised

    def neighbours(drafter):
        """Whether a position was accepted, for all that follow one which was re-drawn, and settled, a pass earlier."""
        decoder = Decoder(window(), drafter, Strict()).bind(backbone, heads)
        trace = decoder(backbone, micro.prompts(8), range(8), SAMPLING).trace
        verdicts = {}
        for pass_index, sample, position, accepted in zip(
            *(x.tolist() for x in (trace.pass_index, trace.sample, trace.position, trace.accepted)), strict=True
        ):
            verdicts.setdefault((pass_index, sample), {})[position] = accepted
        found = []
        for (pass_index, sample), judged in verdicts.items():
            redrawn = next((position for position, accepted in judged.items() if not accepted), None)
            right = verdicts.get((pass_index + 1, sample), {})
            if redrawn is not None and redrawn + 1 in judged and (redrawn + 1) % backbone.grid.width:
                found.append(right[redrawn + 1])
        return found

    saved = neighbours(Clairvoyant(sweeps=1))
    assert len(saved) > 10
    assert all(saved)
    assert not all(neighbours(HeadDrafter()))


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

    class Oracle(Drafter):
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
    with pytest.raises(ValueError, match="Autoregressive never drafts; expected drafter=null and rule=null"):
        Decoder(Autoregressive(), Random(), Amplify(2.0)).bind(backbone)
    with pytest.raises(ValueError, match=r"no head drafts 1 rows down and -. columns right; one of them must be 0"):
        Decoder(JacobiWindow(), HeadDrafter(), Strict()).bind(backbone, heads)
    with pytest.raises(ValueError, match=r"there are none: run stages=.cache,train,export. first, or set decode.heads"):
        ssd().bind(backbone)
    with pytest.raises(ValueError, match=r"no vertical head for offset 3; there are .*'vertical_2'"):
        ssd(rounds=0, rows_per_block=3).bind(backbone, heads)
    with pytest.raises(ValueError, match="2 prompts but 1 seeds"):
        Decoder(Autoregressive())(backbone, micro.prompts(2), [0], SAMPLING)
    with pytest.raises(ValueError, match="rounds is null, no limit; that needs until_settled=true"):
        Rows(rounds=None)
    with pytest.raises(ValueError, match="chunk is 0; expected at least 1"):
        Rows(chunk=0)
    with pytest.raises(ValueError, match="reach is 0; expected at least 1, or null"):
        JacobiWindow(reach=0)
    with pytest.raises(ValueError, match="Amplify would not be asked; expected rule=null"):
        Decoder(window(), HeadDrafter(), Amplify(2.0), common_noise=True).bind(backbone, heads)
    with pytest.raises(ValueError, match=r"sweeps is 1, but these heads were trained without a corrector"):
        Decoder(window(), HeadDrafter(sweeps=1), Strict()).bind(
            backbone, Heads(HeadSpec(backbone.width, backbone.vocabulary))
        )


def test_wide_heads_see_in_decoding_what_they_saw_in_training(backbone):
    """A vertical head with three neighbours: the drafter's z equals the training grid's, edges included."""
    from ssd_train.heads.predictors import Direction, pairs, widen

    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=1, k_vertical=1, context=3)).double()
    seen = {}

    class Spy(HeadDrafter):
        def _inputs(self, state, sample, position, context):
            z = super()._inputs(state, sample, position, context)
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


@pytest.mark.parametrize(
    "decoder",
    [
        lambda: Decoder(Autoregressive()),
        lambda: ssd(rounds=1),
        lambda: Decoder(chain(), HeadDrafter(chain=True), Strict()),
        lambda: Decoder(chain(), EarlyExit(1), Strict()),
        lambda: Decoder(window(), HeadDrafter(sweeps=3), Strict()),
    ],
)
def test_without_guidance_there_is_one_stream(backbone, heads, decoder):
    """The unconditional one is not fed, and what stands is what both streams give just beside a guidance of 1."""
    decoded = decoder().bind(backbone, heads)(backbone, micro.prompts(3), range(3), Sampling(guidance=1.0))
    assert decoded.hidden.shape[0] == 1
    both = decoder().bind(backbone, heads)(backbone, micro.prompts(3), range(3), Sampling(guidance=1 + 1e-12))
    assert both.hidden.shape[0] == 2
    assert torch.equal(decoded.tokens, both.tokens)
    assert decoded.trace.passes == both.trace.passes
