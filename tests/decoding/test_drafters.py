"""Drafters that go step by step: what they see while decoding, and what they draft it as."""

import json
from functools import partial

import micro
import micro_emu3
import pytest
import torch

from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding.drafters.draft_model import DraftModel
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.jacobi import JacobiWindow
from ssd_train.decoding.schedules.prefix import Prefix
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.distributions import Sampling, guided_probabilities
from ssd_train.heads.predictors import Direction, Heads, HeadSpec

SAMPLING = Sampling(guidance=2.0, top_k=4)


@pytest.fixture(scope="module")
def backbone():
    return micro.janus((4, 6), scale=20.0)


def make_heads(backbone, **settings):
    torch.manual_seed(0)
    spec = {"k_horizontal": 1, "k_vertical": 2, "state_scale": 3.0, "embedding_scale": 0.5} | settings
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, **spec))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.to(backbone.dtype)


class Watched(HeadDrafter):
    """Keeps q by (sample, position), and the tokens that stood left of a row's last draft by its row."""

    def propose(self, state, items, source, offset):
        if not self.drafted:
            self.rows = torch.zeros_like(state.tokens[:, :-1]).unflatten(1, (-1, state.grid.width))
        q = super().propose(state, items, source, offset)
        for b, position, mine in zip(items.host_sample.tolist(), items.host_position.tolist(), q, strict=True):
            self.drafted[b, position] = mine
            row = state.grid.row(position // state.grid.width)
            self.rows[b, position // state.grid.width] = state.tokens[b, row.start : row.stop].clamp_min(0)
        return q


def alone_and_together(backbone, decoder, sampling=SAMPLING):
    """Decodes five unequal prompts at once; each by itself must give the same. Returns the five."""
    prompts, seeds = micro.prompts(5, unequal=True), [11, 12, 13, 14, 15]
    together = decoder(backbone, prompts, seeds, sampling)
    for b in reversed(range(5)):
        keep = prompts.attend[0, b]
        one = PromptBatch(prompts.ids[:, b : b + 1, keep], prompts.attend[:, b : b + 1, keep])
        alone = decoder(backbone, one, seeds[b : b + 1], sampling)
        assert torch.equal(alone.tokens[0], together.tokens[b])
        assert alone.trace.passes == together.trace.passes[b : b + 1]
    return together


# -- the chain ----------------------------------------------------------------------------------------------------


CHAINED = {
    "prefix": lambda: Prefix(3, "left", within_row=True),
    "prefix, settled source": lambda: Prefix(3, within_row=True),
    "rows": lambda: Rows(rounds=0, chunk=3),
}


@pytest.mark.parametrize("make", CHAINED.values(), ids=CHAINED.keys())
def test_a_chain_goes_from_left_neighbour_to_right(backbone, make):
    """Whatever sources the schedule names, a run's q are the +1 head's along the run, fed with its own predictions."""
    heads = make_heads(backbone)
    lengths = []

    class Spy(HeadDrafter):
        passes = None

        def propose(self, state, items, source, offset):
            rows, left = offset[0][0], items.position - 1
            if self.passes != len(state._trace.fed):  # a run begins, from a state that the backbone gave
                self.passes = len(state._trace.fed)
                self.state = state.hidden[:, [0], left]
                lengths.append(0)
            q = super().propose(state, items, source, offset)
            if rows == 0:
                z = heads.inputs(self.state, backbone.embed(state.tokens[[0], left]).expand(2, -1, -1))
                self.state = heads(Direction.HORIZONTAL, 1, z) * heads.spec.state_scale
                assert torch.allclose(q, guided_probabilities(backbone.readout(self.state), SAMPLING), atol=1e-12)
                lengths[-1] += 1
            return q

    decoder = Decoder(make(), Spy(chain=True), Strict()).bind(backbone, heads)
    decoder(backbone, micro.prompts(1), [5], SAMPLING)
    assert max(lengths) == 3


@pytest.mark.parametrize(
    "chain, settings, message",
    [
        (True, {"space": "token"}, "a chain feeds predicted states back; token-space heads predict none"),
        (True, {"k_horizontal": 0}, "a chain is made of the horizontal .1 head, but there is none: train with"),
    ],
)
def test_a_chain_of_what_is_not_there_is_refused(backbone, chain, settings, message):
    with pytest.raises(ValueError, match=message):
        Decoder(Rows(), HeadDrafter(chain), Strict()).bind(backbone, make_heads(backbone, **settings))


# -- a draft model ------------------------------------------------------------------------------------------------


def small(grid=(4, 6), vocabulary=5, name="the draft model", device="cpu", tokenizer=None):
    made = micro.janus(grid, vocabulary=vocabulary, width=8, layers=1, scale=15.0, seed=7)
    made.name, made.tokenizer = name, tokenizer
    return made


def draft_q(draft, state, tokens):
    """The draft model's q of every position [B, L, V], from scratch."""
    hidden = draft.teacher_force(state.prompts, tokens.clamp_min(0))
    return guided_probabilities(draft.readout(hidden), state.sampling)


class Checked(DraftModel):
    """Compares every q with that of a cache made anew."""

    proposals = 0

    def propose(self, state, items, source, offset):
        q = super().propose(state, items, source, offset)
        expected = draft_q(self.backbone, state, state.tokens[:, :-1])[items.sample, items.position]
        assert torch.allclose(q, expected, atol=1e-10)
        self.proposals += len(q)
        return q


@pytest.mark.parametrize("schedule", [Prefix(3, "left"), JacobiWindow(5 / 6), JacobiWindow(5 / 6, coupled=True)],
                         ids=["prefix", "jacobi", "coupled"])  # fmt: skip
def test_a_draft_models_cache_is_that_of_the_tokens_that_stand(backbone, schedule, monkeypatch):
    """After rejections at any place, in prompts of unequal lengths, samples that part ways, whatever was re-drawn."""
    if isinstance(schedule, JacobiWindow):
        monkeypatch.setattr(schedule, "_source", lambda grid, position, front: position - 1)
    decoder = Decoder(schedule, Checked(small), Strict()).bind(backbone)
    decoded = decoder(backbone, micro.prompts(5, unequal=True), range(5), SAMPLING)
    trace = decoded.trace
    assert decoder.drafter.proposals > 5 * 12
    first = trace.drafted & (trace.round == 1)
    assert 5 < trace.accepted[first].sum() < first.sum() - 5
    alone_and_together(backbone, Decoder(schedule, DraftModel(small), Strict()).bind(backbone))


def test_a_draft_model_feeds_the_ends_of_lines():
    target = micro_emu3.emu3()

    def load(name, device):
        return micro_emu3.emu3(seed=3)

    decoder = Decoder(Prefix(4, "left"), Checked(load), Strict()).bind(target)
    prompts = target.encode_prompts(["a", "a blue dog"])
    decoder(target, prompts, [0, 1], SAMPLING)
    assert decoder.drafter.proposals > target.grid.size


def test_the_model_itself_as_its_draft_model_is_always_right(backbone):
    """All drafts are accepted: 1 + ceil(23 / 4) passes."""
    same = Decoder(Prefix(3, "left"), DraftModel(lambda name, device: backbone), Strict()).bind(backbone)
    decoded = same(backbone, micro.prompts(2), [1, 2], SAMPLING)
    assert decoded.trace.accepted[decoded.trace.drafted].all()
    assert decoded.trace.passes == [7, 7]


def test_greedy_drafting_gives_the_greedy_image(backbone):
    greedy = Sampling(guidance=2.0, temperature=0)
    decoder = Decoder(Prefix(3, "left"), DraftModel(small), Strict()).bind(backbone)
    expected = Decoder(Autoregressive())(backbone, micro.prompts(4), range(4), greedy).tokens
    assert torch.equal(decoder(backbone, micro.prompts(4), range(4), greedy).tokens, expected)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"vocabulary": 6}, r"the draft model's vocabulary is 6, but micro's is 5; .* as the decoder's drafter."),
        ({"grid": (6, 4)}, r"model's grid is Grid\(height=6, width=4.* but micro's is Grid\(height=4, width=6"),
    ],
)
def test_a_draft_model_of_other_images_is_refused_by_name(backbone, settings, message):
    with pytest.raises(ValueError, match=message):
        Decoder(Prefix(3, "left"), DraftModel(partial(small, **settings)), Strict()).bind(backbone)


def test_a_draft_model_needs_a_draft_before_each_draft(backbone):
    with pytest.raises(ValueError, match="to the next; use the Prefix schedule with source: left"):
        Decoder(Prefix(3), DraftModel(small), Strict()).bind(backbone)


def test_variations_of_a_decoder_share_one_draft_model(backbone):
    load = partial(small, grid=(4, 6))
    first, second = (DraftModel(load).bind(backbone, None) for _ in range(2))
    other = DraftModel(partial(small, grid=[4, 6])).bind(backbone, None)
    assert first.backbone is second.backbone
    assert other.backbone is not first.backbone


class Names:
    """A tokenizer, as far as a draft model asks."""

    def __init__(self, vocabulary):
        self.get_vocab = lambda: vocabulary


def test_a_draft_model_reads_the_prompt_in_ids_of_its_own(monkeypatch):
    """The same texts, special tokens by their names: as if the prompts had been written in its ids."""
    target = micro.janus((4, 6), scale=20.0)
    target.tokenizer = Names({f"word {i}": i for i in range(32)})
    theirs = torch.tensor([(5 * i + 3) % 32 for i in range(32)])
    draft = small(tokenizer=Names({f"word {i}": int(mine) for i, mine in enumerate(theirs)}))
    prompts = micro.prompts(2, unequal=True)
    decoder = Decoder(Prefix(3, "left"), DraftModel(lambda name, device: draft), Strict()).bind(target)
    translated = decoder(target, prompts, [1, 2], SAMPLING)
    monkeypatch.setattr(draft, "tokenizer", None)
    embedding = draft.model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight.copy_(embedding.weight[theirs])
    decoder = Decoder(Prefix(3, "left"), DraftModel(lambda name, device: draft), Strict()).bind(target)
    same = decoder(target, prompts, [1, 2], SAMPLING)
    assert torch.equal(translated.tokens, same.tokens)
    assert translated.trace.passes == same.trace.passes

    draft.tokenizer = Names({f"word {i}": i for i in range(2, 32)})
    decoder = Decoder(Prefix(3, "left"), DraftModel(lambda name, device: draft), Strict()).bind(target)
    with pytest.raises(ValueError, match=r"the draft model's tokenizer lacks what the prompts' ids \[0, 1\] stand for"):
        decoder(target, prompts, [1, 2], SAMPLING)


def test_a_draft_model_is_named_in_the_decoders_yaml(make_run, checkpoint, tmp_path):
    """Through the decode stage, with a variation; here the backbone's own checkpoint drafts, and is always right."""
    from ssd_train.stages import decode

    draft = "decoder.spec_model.drafter.backbone"
    run = make_run(
        tmp_path, "stages=[decode]", "decoder=[ar,spec_model]", f"{draft}.checkpoint={checkpoint}",
        f"{draft}.dtype=float64", "decode.prompts=2", "decode.vary=['spec_model.schedule.length=7']",
    )  # fmt: skip
    decode.check(run)
    decode.run(run)
    report = json.loads((run.output / "decode/report.json").read_text())["decoders"]
    assert {name: entry["passes"] for name, entry in report.items()} == {
        "ar": 16, "spec_model": 1 + 4, "spec_model length=7": 1 + 2
    }  # fmt: skip
    assert all(entry["exact"] for entry in report.values())
