"""Whole-image distributions of decoders against exact enumeration on a micro model."""

import itertools
import math
from functools import cache

import micro
import pytest
import torch

from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding.drafters.draft_model import DraftModel
from ssd_train.decoding.drafters.early_exit import EarlyExit
from ssd_train.decoding.drafters.guess import Copy, Random
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.constant import Addition, Amplify
from ssd_train.decoding.rules.csd import EntropyRelaxed
from ssd_train.decoding.rules.grouped import Grouped
from ssd_train.decoding.rules.lantern import LatentNeighbourhood
from ssd_train.decoding.rules.phrases import JointPhrases
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.chunks import Chunks
from ssd_train.decoding.schedules.jacobi import JacobiWindow
from ssd_train.decoding.schedules.parallel_jacobi import ParallelJacobi
from ssd_train.decoding.schedules.prefix import Prefix
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.decoding.schedules.wave import Wave
from ssd_train.decoding.schedules.zipar import ZipAR
from ssd_train.distributions import Sampling, guided_probabilities
from ssd_train.heads.corrector import Corrector, CorrectorSpec
from ssd_train.heads.predictors import Heads, HeadSpec

VOCABULARY, GRID, SAMPLES = 3, (2, 3), 6_000
SAMPLING = Sampling(guidance=1.5)
LOSSY_SAMPLES = 20_000  # to tell a slightly lossy decoder from an exact one
FALSE_ALARM = 1e-4


@cache
def make_backbone(grid=GRID, vocabulary=VOCABULARY, dtype=torch.float32):
    return micro.janus(grid, vocabulary=vocabulary, dtype=dtype, scale=20.0, seed=1)


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


@cache
def enumerate_images(backbone, sampling=SAMPLING):
    """p of every image, [V ** L], in the order of itertools.product."""
    images = torch.tensor(list(itertools.product(range(backbone.vocabulary), repeat=backbone.grid.size)))
    one = micro.prompts(1)
    prompts = PromptBatch(one.ids.repeat(1, len(images), 1), one.attend.repeat(1, len(images), 1))
    hidden = backbone.teacher_force(prompts, images)
    p = guided_probabilities(backbone.readout(hidden), sampling)
    return p.gather(2, images[..., None]).squeeze(2).double().prod(1)


def bad_heads(backbone, seed=0, **settings):
    """Random heads: drafts are far from the target, so that a wrong repair shows."""
    torch.manual_seed(seed)
    spec = {"k_horizontal": 3, "k_vertical": 2, "corrector": CorrectorSpec(width=8)} | settings
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, **spec))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads


class WideHeads(HeadDrafter):
    """Heads that see three neighbours above."""

    def bind(self, backbone, heads):
        return super().bind(backbone, bad_heads(backbone, context=3))


def bad_model(name, device):
    """Another random backbone, smaller."""
    return micro.janus(GRID, vocabulary=VOCABULARY, width=8, layers=1, dtype=torch.float32, scale=20.0, seed=2)


def counts(backbone, decoder, sampling=SAMPLING, seed=0, heads=None, samples=SAMPLES):
    one = micro.prompts(1)
    prompts = PromptBatch(one.ids.repeat(1, samples, 1), one.attend.repeat(1, samples, 1))
    decoder = decoder.bind(backbone, heads or bad_heads(backbone))
    tokens = decoder(backbone, prompts, range(seed, seed + samples), sampling).tokens.flatten(1)
    weights = backbone.vocabulary ** torch.arange(backbone.grid.size - 1, -1, -1)
    return torch.bincount((tokens * weights).sum(1), minlength=backbone.vocabulary**backbone.grid.size).double()


def chi_square_p_value(observed, expected):
    """Upper tail of chi-square, after pooling cells that expect fewer than 10."""
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    few = int((expected < 10).sum())
    if few:
        observed = torch.cat([observed[:few].sum()[None], observed[few:]])
        expected = torch.cat([expected[:few].sum()[None], expected[few:]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def total_variation(observed, exact):
    return 0.5 * float((observed / observed.sum() - exact).abs().sum())


def head_window():
    """More than a row long, so that drafts enter below ones that still change."""
    return JacobiWindow(rows=5 / 3, coupled=True, source="above", reach=2)


EXACT = {
    "ar": lambda: Decoder(Autoregressive()),
    "ssd, as many rounds as positions": lambda: Decoder(
        Rows(rounds=2, chunk=2, first_row_rounds=2), HeadDrafter(), Strict()
    ),
    "ssd, until settled": lambda: Decoder(
        Rows(rounds=None, chunk=2, first_row_rounds=None, until_settled=True), HeadDrafter(), Strict()
    ),
    "mtp": lambda: Decoder(Prefix(length=2, within_row=True), HeadDrafter(), Strict()),
    "mtp, chunks repaired to the end": lambda: Decoder(Chunks(length=2, rounds=2), HeadDrafter(), Strict()),
    "eagle": lambda: Decoder(Prefix(length=2, source="left", within_row=True), HeadDrafter(chain=True), Strict()),
    "speculative, draft model": lambda: Decoder(Prefix(length=3, source="left"), DraftModel(bad_model), Strict()),
    "speculative, self-draft": lambda: Decoder(Prefix(length=3, source="left"), EarlyExit(1), Strict()),
    "sjd": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), Strict()),
    "sjd, copied drafts": lambda: Decoder(JacobiWindow(rows=4 / 3, source="above"), Copy(), Strict()),
    "sjd, coupled": lambda: Decoder(JacobiWindow(rows=4 / 3, coupled=True), Random(), Strict()),
    "ssd, coupled window": lambda: Decoder(head_window(), HeadDrafter(), Strict()),
    "ssd, coupled window, revised drafts": lambda: Decoder(head_window(), HeadDrafter(sweeps=3), Strict()),
    "ssd, coupled window, three neighbours above, revised drafts": lambda: Decoder(
        head_window(), WideHeads(sweeps=3), Strict()
    ),
    "ssd, until settled, revised drafts": lambda: Decoder(
        Rows(rounds=None, chunk=2, first_row_rounds=None, until_settled=True), HeadDrafter(sweeps=3), Strict()
    ),
    "ssd, wave until settled, revised drafts": lambda: Decoder(
        Wave(None, 1, chunk=2, first_row_rounds=None, until_settled=True), WideHeads(sweeps=3), Strict()
    ),
    "ar, common noise": lambda: Decoder(Autoregressive(), common_noise=True),
    "ssd, coupled window, revised drafts, common noise": lambda: Decoder(
        head_window(), HeadDrafter(sweeps=3), common_noise=True
    ),
}


# Grids with a row between two others, which is where blocks of rows and rows in flight differ from one row at a time.
EXACT_OF_THREE_ROWS = {
    "ssd, joint block, as many rounds as positions": lambda: Decoder(
        Rows(rounds=3, rows_per_block=2, chunk=1, first_row_rounds=1), HeadDrafter(), Strict()
    ),
    "ssd, joint block, until settled": lambda: Decoder(
        Rows(None, rows_per_block=2, chunk=1, first_row_rounds=None, until_settled=True), HeadDrafter(), Strict()
    ),
    "ssd merged, as many rounds as columns": lambda: Decoder(
        Wave(rounds=2, chunk=1, first_row_rounds=1), HeadDrafter(), Strict()
    ),
    "zipar, a row at a time": lambda: Decoder(ZipAR(lead=2), Copy(), Strict()),
    "pjd, a row at a time": lambda: Decoder(ParallelJacobi(length=3, lag=2), Copy(), Strict()),
}


def assert_exact(backbone, decoder, sampling=SAMPLING, heads=None):
    """False-alarm probability 1e-4 a decoder."""
    exact = enumerate_images(backbone, sampling)
    assert decoder.exact(backbone)
    observed = counts(backbone, decoder, sampling, heads=heads)
    print(f"total variation {total_variation(observed, exact):.4f}, sampling noise {noise(exact):.4f}")
    assert not observed[exact == 0].any()
    assert chi_square_p_value(observed, exact * SAMPLES) > FALSE_ALARM


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT.keys())
def test_exact_decoders_have_the_distribution_of_ar(backbone, make):
    assert_exact(backbone, make())


@pytest.mark.parametrize("make", EXACT_OF_THREE_ROWS.values(), ids=EXACT_OF_THREE_ROWS.keys())
def test_exact_decoders_have_the_distribution_of_ar_on_three_rows(make):
    assert_exact(make_backbone((3, 2)), make())


class Zero(Corrector):
    """Starts, and stays, where a trained one starts."""

    def add(self, hidden, x, fed, now):
        return hidden


class Shift(Corrector):
    """Sends every state, whatever was re-drawn, to where all drafts are wrong."""

    def add(self, hidden, x, fed, now):
        return hidden + 3 * hidden.std() * torch.linspace(-1, 1, hidden.shape[-1])


class Hostile(HeadDrafter):
    """With a corrector of this kind."""

    def __init__(self, kind=Corrector, sweeps=3, **settings):
        super().__init__(sweeps=sweeps)
        self.kind, self.settings = kind, settings

    def bind(self, backbone, heads):
        heads = bad_heads(backbone, **self.settings)
        heads.corrector.__class__ = self.kind
        heads.corrector.state_scale = 100.0  # so that sweeps re-draw a third of what they touch
        return super().bind(backbone, heads)


def corrected(rows, *kind, **settings):
    return Decoder(JacobiWindow(rows, coupled=True, source="above", reach=2), Hostile(*kind, **settings), Strict())


CORRECTED = {  # grid, decoder, sampling
    "random, one row": (GRID, lambda: corrected(1.0), SAMPLING),
    "random, everything in the window": (GRID, lambda: corrected(3.0), SAMPLING),
    "zero": (GRID, lambda: corrected(5 / 3, Zero), SAMPLING),
    "a constant shift": (GRID, lambda: corrected(2.0, Shift), SAMPLING),
    "a constant shift, without guidance, top 2": (GRID, lambda: corrected(2.0, Shift), Sampling(top_k=2)),
    "two vertical heads, deeper, a wider context": (
        (3, 2), lambda: corrected(3.0, corrector=CorrectorSpec(4, 2, 9)), Sampling(guidance=3.0)
    ),
    "one vertical head": ((3, 2), lambda: corrected(2.0, k_vertical=1), SAMPLING),
    "one row of the grid": ((1, 6), lambda: corrected(1.0, k_vertical=0), SAMPLING),
    "one column of the grid": ((6, 1), lambda: corrected(3.0, k_horizontal=0), SAMPLING),
}  # fmt: skip


@pytest.mark.parametrize("grid, make, sampling", CORRECTED.values(), ids=CORRECTED.keys())
def test_decoding_is_exact_whatever_the_corrector_says(grid, make, sampling):
    assert_exact(make_backbone(grid), make(), sampling)


@pytest.mark.parametrize(
    "name",
    [
        "ssd, as many rounds as positions",
        "mtp, chunks repaired to the end",
        "mtp",
        "ssd, coupled window, revised drafts",
    ],
)
def test_exact_decoders_have_the_distribution_of_ar_under_top_k(backbone, name):
    """A third of the tokens is ruled out everywhere, for drafts, p and residuals alike."""
    assert_exact(backbone, EXACT[name](), Sampling(guidance=1.5, top_k=2))


@pytest.mark.parametrize(
    "name, predictors, weight",
    [
        ("eagle", "", math.nan),
        ("mtp", "horizontal", 1e38),
        ("ssd, until settled", "vertical", math.inf),
        ("ssd, coupled window, revised drafts", "horizontal_1", 1e38),
    ],
)
def test_broken_heads_leave_an_exact_decoder_exact(backbone, name, predictors, weight):
    """Drafts that no distribution gave are uniform ones: never NaN that accepts."""
    heads = bad_heads(backbone)
    for key, parameter in heads.named_parameters():
        if predictors in key and "w2" in key:
            torch.nn.init.constant_(parameter[::2], weight)
    assert_exact(backbone, EXACT[name](), heads=heads)
    decoder = EXACT[name]().bind(backbone, heads)
    assert decoder(backbone, micro.prompts(2), range(2), SAMPLING).trace.unsound > 0


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}], ids=["temperature 0", "top 1"])
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT.keys())
def test_greedy_exact_decoders_give_the_image_of_greedy_ar(make, greedy):
    """Bit for bit, in float64, whatever the seeds."""
    backbone, sampling = make_backbone(dtype=torch.float64), Sampling(guidance=1.5, **greedy)
    prompts = micro.prompts(8, unequal=True)
    expected = Decoder(Autoregressive())(backbone, prompts, range(8), sampling).tokens
    assert len(expected.flatten(1).unique(dim=0)) > 4
    decoder = make().bind(backbone, bad_heads(backbone))
    assert torch.equal(decoder(backbone, prompts, range(8, 16), sampling).tokens, expected)


PHRASES = [[0, 1], [1, 1], [2, 0]]
LOSSY = {
    "ssd, r = 0": lambda: Decoder(Rows(rounds=0), HeadDrafter(), Strict()),
    "ssd, r = 1": lambda: Decoder(Rows(rounds=1), HeadDrafter(), Strict()),
    "ssd, first row one round short": lambda: Decoder(
        Rows(rounds=2, first_row_rounds=1, chunk=2), HeadDrafter(), Strict()
    ),
    "ssd, r = 1, common noise": lambda: Decoder(Rows(rounds=1), HeadDrafter(), common_noise=True),
    "ssd, r = 1, revised drafts": lambda: Decoder(Rows(rounds=1), HeadDrafter(sweeps=3), Strict()),
    "ssd, coupled window, csd": lambda: Decoder(head_window(), HeadDrafter(sweeps=3), EntropyRelaxed(0.5, 0.3)),
    "ssd, coupled window, amplify": lambda: Decoder(head_window(), HeadDrafter(sweeps=3), Amplify(2.0)),
    "ssd merged": lambda: Decoder(Wave(rounds=1), HeadDrafter(), Strict()),
    "mtp, lossy": lambda: Decoder(Chunks(length=2, rounds=1), HeadDrafter(), Strict()),
    "addition": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), Addition(0.3)),
    "amplify": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), Amplify(2.0)),
    "csd": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), EntropyRelaxed(0.5, 0.65)),
    "gsd": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), Grouped(size=2, gap=0.5, distance=1e6)),
    "lantern": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), LatentNeighbourhood(k=1, delta=0.5)),
    "lantern, chain": lambda: Decoder(
        Prefix(length=2, source="left", within_row=True),
        HeadDrafter(chain=True),
        LatentNeighbourhood(k=1, delta=0.5),
    ),
    "sjd-pv": lambda: Decoder(JacobiWindow(rows=4 / 3), Random(), JointPhrases(Strict(), PHRASES, tau=0.1)),
    "ssd, phrases": lambda: Decoder(
        Rows(rounds=2, chunk=2, first_row_rounds=2), HeadDrafter(), JointPhrases(Strict(), PHRASES, tau=0.1)
    ),
    "pjd": lambda: Decoder(ParallelJacobi(length=2, lag=1), Copy(), Strict()),
    "zipar": lambda: Decoder(ZipAR(lead=2), Copy(), Strict()),
}


LOSSY_OF_THREE_ROWS = {
    "ssd, joint block, r = 1": ((3, 2), lambda: Decoder(Rows(1, rows_per_block=2), HeadDrafter(), Strict())),
    # With rows of two tokens these happen to be exact: their last judgements come after all that stands before.
    "ssd, staged, r = 1": ((3, 3), lambda: Decoder(
        Rows(1, rows_per_block=2, staged_rounds=1), HeadDrafter(), Strict()
    )),
    "ssd, wave of two rows": ((3, 3), lambda: Decoder(Wave(2, stagger=1), HeadDrafter(), Strict())),
}  # fmt: skip


def assert_lossy(backbone, decoder):
    """Its total variation distance is beyond sampling noise, so that nobody calls it exact."""
    exact = enumerate_images(backbone)
    assert not decoder.exact(backbone)
    observed = counts(backbone, decoder, samples=LOSSY_SAMPLES)
    expected = noise(exact, LOSSY_SAMPLES)
    print(f"total variation {total_variation(observed, exact):.4f}, sampling noise {expected:.4f}")
    assert total_variation(observed, exact) > 1.3 * expected
    assert chi_square_p_value(observed, exact * LOSSY_SAMPLES) < FALSE_ALARM


@pytest.mark.parametrize("make", LOSSY.values(), ids=LOSSY.keys())
def test_lossy_decoders_are_measurably_lossy_and_say_so(backbone, make):
    assert_lossy(backbone, make())


@pytest.mark.parametrize("grid, make", LOSSY_OF_THREE_ROWS.values(), ids=LOSSY_OF_THREE_ROWS.keys())
def test_lossy_decoders_are_measurably_lossy_on_three_rows(grid, make):
    """Of nine tokens there are too many images to count unless they are bits."""
    assert_lossy(make_backbone(grid, vocabulary=3 if grid[1] == 2 else 2), make())


def noise(exact, samples=SAMPLES):
    """The total variation distance that a perfect sampler shows on average, to first order."""
    return 0.5 * float((2 * exact / math.pi / samples).sqrt().sum())
