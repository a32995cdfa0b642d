"""Janus against transformers' own, and checkpoints in the published layout."""

import json

import micro
import micro_lumina
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from ssd_train.backbones.janus import Janus
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.distributions import Sampling

TEXTS = ["a dog", "two dogs", "sun"]
NAMES = ["<pad>", "<bos>", "<begin_of_image>", "<unk>", "<|User|>", "<|Assistant|>", *" :\nadgnostuw"]


def tokenizer():
    """One token a letter."""
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.add_special_tokens(NAMES[:6])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>")


def janus(grid=(3, 3), **kwargs):
    made = micro.janus_model(grid=grid, scale=15.0, **kwargs)
    return Janus(made, tokenizer(), micro.generation_config(), grid=grid)


# -- prompts ------------------------------------------------------------------------------------------------------


def test_the_prompt_is_the_published_one():
    """bos, the chat template, begin-of-image; the unconditional one has pads in between, and attends to them."""
    letters = [NAMES.index(x) for x in ("<|User|>", ":", " ", *"a dog", "\n", "\n", "<|Assistant|>", ":")]
    prompts = janus().encode_prompts(["a dog", "sun"])
    assert prompts.ids[0, 0].tolist() == [micro.BOS, *letters, micro.BEGIN_OF_IMAGE]
    assert prompts.ids[1, 0].tolist() == [micro.BOS, *[micro.PAD] * len(letters), micro.BEGIN_OF_IMAGE]
    assert prompts.attend.tolist() == [[[True] * 14, [False] * 2 + [True] * 12]] * 2


@pytest.mark.parametrize("key, name", [
    ("bos_token_id", "bos"), ("pad_token_id", "pad"), ("generation_kwargs", "begin-of-image"),
])  # fmt: skip
def test_a_generation_config_that_lacks_a_token_is_refused(key, name, checkpoint):
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != key}))
    with pytest.raises(ValueError, match=f"names no {name} token id"):
        Janus.load(str(checkpoint))


def test_the_begin_of_image_id_of_earlier_checkpoints_is_found(checkpoint):
    """Their generation_config.json has it among the others."""
    file = checkpoint / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | settings.pop("generation_kwargs")))
    assert "generation_kwargs" not in json.loads(file.read_text())
    assert Janus.load(str(checkpoint)).begin_of_image == micro.BEGIN_OF_IMAGE


# -- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [2.0, 5.0])
@pytest.mark.parametrize("grid", [(3, 3), (2, 3)])
def test_greedy_decoding_is_transformers_generate(guidance, grid):
    backbone = janus(grid)
    prompts = backbone.encode_prompts(TEXTS)
    sampling = Sampling(guidance=guidance, temperature=0)
    ours = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(len(TEXTS)), sampling).tokens
    generation = micro.generation_config()
    generation.guidance_scale = guidance
    backbone.model.model.vision_model.config.num_image_tokens = backbone.grid.size
    with backbone.intact() as model:
        theirs = model.generate(
            prompts.ids[0],
            attention_mask=prompts.attend[0].long(),
            generation_config=generation,
            generation_mode="image",
            do_sample=False,
        )
    assert torch.equal(theirs, ours.flatten(1))
    assert len(ours.unique()) > 2


# -- loading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    made = micro.janus_model(grid=(3, 3), scale=15.0)
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    micro.generation_config().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_checkpoint_loads_exactly(checkpoint):
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    loaded, backbone = Janus.load(str(checkpoint), dtype="float64"), janus()
    prompts = loaded.encode_prompts(TEXTS)
    assert torch.equal(prompts.ids, backbone.encode_prompts(TEXTS).ids)
    tokens = torch.randint(5, (3, 9), generator=torch.Generator().manual_seed(0))
    hidden = loaded.teacher_force(prompts, tokens)
    torch.testing.assert_close(hidden, backbone.teacher_force(prompts, tokens), rtol=1e-12, atol=1e-12)
    assert loaded.readout_error(prompts, tokens, hidden) < 1e-12
    assert loaded.fingerprint == backbone.fingerprint
    assert (loaded.grid.height, loaded.grid.width) == (3, 3)


@pytest.mark.parametrize("settings, message", [
    ({"grid": [3, 4]}, r"janus has no grid \[3, 4\] \(height, width\); expected \[3, 3\]"),
    ({"dtype": "bf16"}, "model.backbone.dtype is 'bf16'; expected one of bfloat16, float16, float32, float64"),
    ({"attention": "flex_attention"}, "model.backbone.attention is 'flex_attention'; expected one of sdpa, eager"),
])  # fmt: skip
def test_a_wrong_setting_is_refused_before_the_weights_are_read(settings, message, checkpoint):
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ValueError, match=message):
        Janus.load(str(checkpoint), **settings)
    with pytest.raises(OSError, match="safetensors"):
        Janus.load(str(checkpoint), grid=[3, 3])


def test_loading_in_another_dtype_and_attention(checkpoint):
    loaded = Janus.load(str(checkpoint), dtype="bfloat16", attention="eager")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.decoder.config._attn_implementation == "eager"
    assert loaded.decoder.rotary_emb.inv_freq.dtype == torch.float32


def test_the_tokenizer_keeps_its_spaces(checkpoint):
    """Janus's is a byte-level one that its files call a Llama tokenizer."""
    micro_lumina.tokenizer().save_pretrained(checkpoint)
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    words = Janus.load(str(checkpoint)).tokenizer
    assert words.decode(words("a dog\nruns", add_special_tokens=False)["input_ids"]) == "a dog\nruns"


def edit(checkpoint, change):
    for shard in checkpoint.glob("*.safetensors"):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})


KEY = "model.language_model.layers.1.mlp.up_proj.weight"
BREAK = {
    "missing": lambda t: t.pop(KEY, None),
    "unexpected": lambda t: t.update({f"extra.{KEY}": torch.ones(2)}),
    "shape": lambda t: t.update({k: torch.ones(3, 3) for k in t if k == KEY}),
}


@pytest.mark.parametrize("change", BREAK.values(), ids=BREAK.keys())
def test_an_incomplete_checkpoint_is_refused_by_name(checkpoint, change, caplog):
    edit(checkpoint, change)
    with pytest.raises((ValueError, RuntimeError)) as error:
        Janus.load(str(checkpoint))
    assert "mlp.up_proj.weight" in str(error.value) + caplog.text


# -- pixels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(3, 3), (2, 3)])
def test_pixels_are_the_class_s_own(grid):
    backbone = janus(grid)
    tokens = torch.randint(5, (2, *grid), generator=torch.Generator().manual_seed(0))
    ours = backbone.decode_pixels(tokens)
    assert ours.shape == (2, 2 * grid[0], 2 * grid[1], 3)
    theirs = backbone.model.decode_image_tokens(tokens.flatten(1))
    assert torch.equal(ours, ((theirs + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
    codes = backbone.encode_pixels(ours)
    assert codes.shape == tokens.shape


# -- full size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers, width, inner, heads, parameters", [
    (24, 2048, 5632, 16, 1.87e9), (30, 4096, 11008, 32, 6.99e9),
], ids=["1B", "7B"])  # fmt: skip
def test_full_size_on_the_meta_device(layers, width, inner, heads, parameters):
    """The configurations are pieced together from the published converter's."""
    config = JanusConfig(
        text_config=LlamaConfig(
            vocab_size=102400, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads,
        ),
        vision_config=JanusVisionConfig(projection_dim=width),
        vq_config=JanusVQVAEConfig(projection_dim=width, image_token_embed_dim=width),
    )  # fmt: skip
    with torch.device("meta"):
        model = JanusForConditionalGeneration._from_config(config)
    backbone = Janus(model, None, GenerationConfig(
        bos_token_id=1, pad_token_id=2, generation_kwargs={"boi_token_id": 3}
    ))  # fmt: skip
    assert (backbone.grid.height, backbone.grid.width, backbone.grid.end_of_line) == (24, 24, False)
    assert (backbone.vocabulary, backbone.width) == (16384, width)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=2e-3)
