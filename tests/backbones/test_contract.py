"""What every adapter must do, for a micro instance of each family; with controls that must fail."""

import inspect
from pathlib import Path

import example_backbone
import micro
import micro_emu3
import micro_lumina
import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf

from ssd_train.backbones.kv_cache import KVCache, Slots
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.distributions import Sampling
from ssd_train.heads.predictors import Heads, HeadSpec

TEXTS = ["a dog", "two very long cats", "sun"]
EXACT = 1e-12  # of the largest number compared; float64
WRONG = 1e-2


def janus(**kwargs):
    made = micro.janus(**kwargs)
    with torch.no_grad():
        for parameter in made.model.model.language_model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2)  # or a norm of normed states would change nothing
        made.output.norm.weight.uniform_(0.5, 2)
    return made


def example(**kwargs):
    codec = dict(embed_dim=4, base_channels=32, channel_multiplier=[1, 1], latent_channels=32, num_res_blocks=0)
    architecture = dict(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vq=codec | {"num_embeddings": 7},
    )
    return example_backbone.LlamaGen.sketch(architecture, grid=(3, 4), dtype="float64", device="cpu", **kwargs)


BUILD = {"janus": janus, "lumina": micro_lumina.lumina, "emu3": micro_emu3.emu3, "example": example}


def prompts_of(backbone):
    return backbone.encode_prompts(TEXTS) if backbone.tokenizer else micro.prompts(len(TEXTS), unequal=True)


@pytest.fixture(scope="module", params=BUILD)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def backbone(family):
    return BUILD[family](seed=1, scale=15.0)


@pytest.fixture(scope="module")
def prompts(backbone):
    made = prompts_of(backbone)
    assert not made.attend.all()  # or padding is not tested
    return made


@pytest.fixture(scope="module")
def tokens(backbone):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(backbone.vocabulary, (len(TEXTS), backbone.grid.size), generator=generator)


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max())


def feed(backbone, cache, tokens, positions, shift=0):
    """States after feeding ``positions`` of tokens [B, L] at their slots, or ``shift`` slots later: [R, n, d]."""
    index, position, _ = backbone.grid.feed_plan(positions)
    padded = torch.cat([tokens, tokens.new_full((len(tokens), 1), -1)], 1)
    start = cache.prompt_length + index[0] + shift
    slots = Slots.span(start, start + len(index))
    with torch.inference_mode():
        return backbone(backbone.embed(padded[:, position]).repeat(2, 1, 1), slots, cache)


def last_state(backbone, prompts, tokens):
    """After every token but the last, from scratch: [R, d]."""
    hidden = backbone.teacher_force(prompts, tokens)
    return hidden[:, :, -1].flatten(0, 1)


def test_readout_is_the_class_s_own(backbone, prompts, tokens):
    hidden = backbone.teacher_force(prompts, tokens)
    assert backbone.readout_error(prompts, tokens, hidden) < EXACT
    assert backbone.readout(hidden).dtype == torch.float64


def test_readout_error_of_the_beginning_of_an_image(backbone, prompts, tokens):
    first = backbone.grid.width + 1
    hidden = backbone.teacher_force(prompts, tokens)[:, :, :first]
    assert backbone.readout_error(prompts, tokens[:, :first], hidden) < EXACT


def test_readout_of_wrong_states_is_not(backbone, prompts, tokens):
    """Controls: states after the norm, states of the neighbour, streams swapped."""
    hidden = backbone.teacher_force(prompts, tokens)
    with torch.inference_mode():
        normed = backbone.output.norm(hidden)
    for wrong in (normed, hidden.roll(1, 2), hidden.flip(0)):
        assert backbone.readout_error(prompts, tokens, wrong) > WRONG


def test_logits_are_far_from_flat(backbone, prompts, tokens):
    """Or greedy decoding would compare rounding, and the tests above little."""
    p = backbone.readout(backbone.teacher_force(prompts, tokens)).softmax(-1)
    assert p.max(-1).values.mean() > 2 / backbone.vocabulary
    assert len(set(p.argmax(-1).flatten().tolist())) > 2


def test_a_sample_does_not_depend_on_its_batch(backbone, prompts, tokens):
    """Left padding has no part in attention and positions."""
    together = backbone.teacher_force(prompts, tokens)
    for b, text in enumerate(TEXTS):
        one = backbone.encode_prompts([text]) if backbone.tokenizer else micro.prompts(len(TEXTS), unequal=True)
        if backbone.tokenizer is None:
            keep = one.attend[:, b].any(0)
            one = type(one)(one.ids[:, b : b + 1, keep], one.attend[:, b : b + 1, keep])
        assert one.ids.shape[-1] <= prompts.ids.shape[-1]
        assert difference(backbone.teacher_force(one, tokens[b : b + 1])[:, 0], together[:, b]) < EXACT


def test_the_two_streams_differ(backbone, prompts, tokens):
    conditional, unconditional = backbone.readout(backbone.teacher_force(prompts, tokens))
    assert difference(conditional, unconditional) > WRONG


def rewound(backbone, prompts, tokens, *, forget=False):
    """The state after every token but the last, by way of a stale block that is then fed again with other tokens:
    over itself, in two parts; or, with ``forget``, behind itself."""
    grid, attend = backbone.grid, prompts.attend.flatten(0, 1)
    room = prompts.ids.shape[-1] + 2 * grid.sequence_length
    layers = backbone.decoder.config.num_hidden_layers
    cache = KVCache((~attend).sum(1), prompts.ids.shape[-1], room, layers)
    with torch.inference_mode():
        backbone.prefill(prompts, cache)
    feed(backbone, cache, tokens, range(2))
    first, middle, last = 2, grid.size // 2 + 1, grid.size - 1
    stale = (tokens + 1) % backbone.vocabulary
    width = feed(backbone, cache, stale, range(first, last)).shape[1]
    if forget:
        return feed(backbone, cache, tokens, range(first, last), shift=width)[:, -1]
    cache.roll_back(cache.prompt_length + grid.sequence_index(first))
    feed(backbone, cache, tokens, range(first, middle))
    return feed(backbone, cache, tokens, range(middle, last))[:, -1]


def test_a_repaired_block_is_as_if_it_had_been_so_from_the_start(backbone, prompts, tokens):
    assert difference(rewound(backbone, prompts, tokens), last_state(backbone, prompts, tokens)) < EXACT


def test_overwriting_needs_no_roll_back(backbone, prompts, tokens):
    """How the engine repairs: the same slots are fed again, the stale entries are replaced."""
    stale = (tokens + 1) % backbone.vocabulary
    cache = backbone.new_cache(prompts)
    with torch.inference_mode():
        backbone.prefill(prompts, cache)
    block = range(backbone.grid.size - 1)
    feed(backbone, cache, stale, block)
    repaired = feed(backbone, cache, tokens, block)
    assert difference(repaired[:, -1], last_state(backbone, prompts, tokens)) < EXACT


def test_a_forgotten_rewind_shows(backbone, prompts, tokens):
    """Control: the repaired block comes after the stale one instead of over it."""
    assert difference(rewound(backbone, prompts, tokens, forget=True), last_state(backbone, prompts, tokens)) > WRONG


@pytest.fixture(scope="module")
def eager(family):
    made = BUILD[family](seed=1, scale=15.0)
    made.model.set_attn_implementation("eager")
    assert made.decoder.config._attn_implementation == "eager"
    return made


def test_eager_attention_agrees(backbone, eager, prompts, tokens):
    """To the rounding of eager's softmax, which is in float32."""
    assert difference(eager.teacher_force(prompts, tokens), backbone.teacher_force(prompts, tokens)) < 1e-5


def test_a_bool_mask_in_eager_attention_shows(eager, prompts, tokens, monkeypatch):
    """Control: transformers adds the mask to the scores, so True and False would be 1 and 0."""
    right = eager.teacher_force(prompts, tokens)
    decoder = eager.decoder.forward

    def with_bool_mask(*args, attention_mask=None, **kwargs):
        return decoder(*args, attention_mask=attention_mask == 0, **kwargs)

    monkeypatch.setattr(eager.decoder, "forward", with_bool_mask)
    assert difference(eager.teacher_force(prompts, tokens), right) > WRONG


def test_greedy_decoding_is_what_the_states_say(backbone, prompts):
    """Each token of a greedy image is the argmax of its own teacher-forced, guided logits."""
    sampling = Sampling(guidance=3.0, temperature=0)
    decoded = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(len(TEXTS)), sampling)
    flat = decoded.tokens.flatten(1)
    c, u = backbone.readout(backbone.teacher_force(prompts, flat))
    assert torch.equal((u + 3 * (c - u)).argmax(-1), flat)
    assert decoded.tokens.shape == (len(TEXTS), backbone.grid.height, backbone.grid.width)


def test_rows_until_settled_are_greedy_decoding(backbone, prompts):
    """Drafted blocks, repaired in place across end-of-line tokens, end where token by token ends."""
    torch.manual_seed(0)
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=3, k_vertical=2))
    rows = Rows(rounds=None, rows_per_block=2, chunk=3, first_row_rounds=None, until_settled=True)
    sampling, seeds = Sampling(guidance=3.0, temperature=0), range(len(TEXTS))
    drafted = Decoder(rows, HeadDrafter(), Strict()).bind(backbone, heads.double())(backbone, prompts, seeds, sampling)
    stepwise = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, seeds, sampling)
    assert torch.equal(drafted.tokens, stepwise.tokens)
    assert not drafted.trace.accepted[drafted.trace.drafted].all()  # or nothing was repaired


def test_only_the_grid_s_tokens_are_fed(backbone, prompts):
    """End-of-line tokens are fed with the token before them: h*w passes, prompt included, whatever the grid."""
    decoded = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(len(TEXTS)), Sampling())
    assert decoded.trace.passes == [backbone.grid.size] * len(TEXTS)
    ends = backbone.grid.height - 1 if backbone.grid.end_of_line else 0
    assert sum(decoded.trace.fed[1:]) == backbone.grid.size - 1 + ends


def test_pixels_are_images(backbone, family, tmp_path):
    if family == "lumina":
        backbone = micro_lumina.lumina(vqgan=micro_lumina.save_vqgan(tmp_path))
    grid = backbone.grid
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocabulary, (2, grid.height, grid.width), generator=generator)
    images = backbone.decode_pixels(tokens)
    assert images.dtype == torch.uint8
    assert images.shape[0] == 2
    assert images.shape[3] == 3
    assert images.shape[1] * grid.width == images.shape[2] * grid.height
    assert not torch.equal(images[0], images[1])
    codes = backbone.encode_pixels(images)
    assert codes.shape == tokens.shape
    assert codes.dtype == torch.int64
    assert 0 <= codes.min() <= codes.max() < backbone.vocabulary


MODELS = Path(__file__).parents[2] / "conf" / "model"


@pytest.mark.parametrize("stem, guidance, top_k", [
    ("janus_pro_1b", 5, 0), ("janus_pro_7b", 5, 0), ("emu3", 3, 2048),
    ("lumina", 4, 2000), ("lumina_512", 4, 2000), ("lumina_1024", 4, 2000),
])  # fmt: skip
def test_shipped_settings_fit_their_adapter(stem, guidance, top_k):
    settings = OmegaConf.load(MODELS / f"{stem}.yaml")
    assert settings.name == stem
    assert Sampling(**settings.sampling) == Sampling(guidance=guidance, top_k=top_k)
    target, _, load = settings.backbone.pop("_target_").rpartition(".")
    adapter = get_class(target)
    known = {*inspect.signature(getattr(adapter, load)).parameters, *inspect.signature(adapter).parameters}
    assert {"name", "device", *settings.backbone} <= known


def test_shared_keys_are_never_copied(backbone, prompts, tokens, monkeypatch):
    """Attention sees as many key heads as the model has, in every pass; the model as it was loaded is left alone."""
    heads = []

    def attention(query, key, *args, **kwargs):
        heads.append(key.shape[1])
        return one_of_torch(query, key, *args, **kwargs)

    one_of_torch = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    backbone.teacher_force(prompts, tokens)
    assert set(heads) == {backbone.decoder.config.num_key_value_heads}
    with backbone.intact():
        assert backbone.decoder.config._attn_implementation == "sdpa"
