"""Emu3 against transformers' own, and checkpoints in the published layout."""

import json

import micro_emu3
import oracle
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3Processor

from ssd_train import config
from ssd_train.backbones.emu3 import NEGATIVE, QUALITY, Emu3, image_grid
from ssd_train.backbones.sketches import sketch
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.distributions import Sampling
from ssd_train.grid import Grid

TEXTS = ["a dog", "two very long cats", "sun"]


@pytest.fixture(scope="module")
def backbone():
    return micro_emu3.emu3(scale=15.0)


# -- prompts and sizes --------------------------------------------------------------------------------------------


def test_the_prompt_is_the_published_one():
    """bos, text with its suffix, begin-of-image, size as text, begin-of-tokens; in both contexts."""
    backbone = Emu3(micro_emu3.model(), micro_emu3.tokenizer(), ratio="16:9", area=64)
    names = micro_emu3.vocabulary(7)
    tail = [names["<|image start|>"], *(names[c] for c in "3*5"), names["<|image token|>"]]
    prompts = backbone.encode_prompts(["a dog", "sun"])
    for stream, texts in enumerate([["a dog" + QUALITY, "sun" + QUALITY], [NEGATIVE, NEGATIVE]]):
        for b, text in enumerate(texts):
            letters = [names[{" ": "Ġ"}.get(letter, letter)] for letter in text]
            ids = prompts.ids[stream, b][prompts.attend[stream, b]]
            assert ids.tolist() == [names["<|extra_203|>"], *letters, *tail]
    assert (prompts.ids[~prompts.attend] == names["<|endoftext|>"]).all()
    assert QUALITY == " masterpiece, film grained, best quality."
    assert NEGATIVE.startswith("lowres, bad anatomy, bad hands, text, error, missing fingers")


def test_the_prompt_is_the_processor_s(backbone):
    """transformers' own, but for its image half, which wants another package."""
    processor = Emu3Processor.__new__(Emu3Processor)
    words = backbone.tokenizer
    size = processor.calculate_generate_size("16:9", micro_emu3.AREA, 2)
    assert size == (backbone.grid.height, backbone.grid.width)
    text = f"{words.bos_token}a dog best.{words.boi_token}{size[0]}*{size[1]}{words.image_wrapper_token}"
    prompts = backbone.encode_prompts(["a dog"])
    assert prompts.ids[0, 0][prompts.attend[0, 0]].tolist() == words(text)["input_ids"]


def test_ids(backbone):
    names = micro_emu3.vocabulary(7)
    assert backbone.ids.tolist() == [*(names[f"<|visual token {i:06d}|>"] for i in range(7)), names["<|extra_200|>"]]


@pytest.mark.parametrize("ratio, height, width", [
    ("1:1", 90, 90), ("16:9", 68, 120), ("9:16", 120, 68), ("4:3", 78, 104), ("3:4", 104, 78),
    ("3:2", 73, 110), ("2:3", 110, 73),
])  # fmt: skip
def test_aspect_ratios(ratio, height, width):
    assert image_grid(ratio) == Grid(height, width, end_of_line=True)
    processor = Emu3Processor.__new__(Emu3Processor)
    assert processor.calculate_generate_size(ratio, 720 * 720, 8) == (height, width)


def test_an_unknown_ratio_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no ratio '5:1' .*expected one of 1:1, 4:3, .*9:16"):
        micro_emu3.emu3(ratio="5:1")


@pytest.mark.parametrize("area, message", [
    (720 * 1280, r"no area of 921600 pixels: at 16:9 these are 14490 tokens, and it knows 9216 positions"),
    (0, "Emu3's area is 0 pixels"), (-5, "Emu3's area is -5 pixels"),
])  # fmt: skip
def test_an_area_that_the_model_has_no_positions_for_is_refused(area, message):
    model = OmegaConf.load(config.conf_dir() / "model" / "emu3.yaml")
    model.backbone.update(ratio="16:9", area=area)
    with pytest.raises(ValueError, match=message):
        sketch(model)


def test_another_tokenizer_is_refused():
    words = micro_emu3.tokenizer()
    words.bos_token = None
    with pytest.raises(ValueError, match="None is not one token of this tokenizer"):
        Emu3(micro_emu3.model(), words)


def test_a_vocabulary_without_an_image_token_is_refused():
    made = micro_emu3.model()
    made.config.vocabulary_map.pop("<|visual token 000003|>")
    with pytest.raises(ValueError, match="names 6 image tokens; expected one for each of the 7"):
        Emu3(made, micro_emu3.tokenizer())


# -- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("ratio", ["16:9", "2:3"])
def test_greedy_decoding_is_transformers_generate(guidance, ratio):
    backbone = micro_emu3.emu3(ratio=ratio, scale=15.0)
    prompts = backbone.encode_prompts(TEXTS)
    sampling = Sampling(guidance=guidance, temperature=0)
    ours = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(len(TEXTS)), sampling).tokens
    assert torch.equal(oracle.generate_greedily(backbone, prompts, guidance), ours)
    assert len(ours.unique()) > 2


def test_reference_logits_are_the_class_s_own_forward(backbone):
    prompts = backbone.encode_prompts(TEXTS)
    tokens = torch.randint(7, (3, 15), generator=torch.Generator().manual_seed(0))
    with backbone.intact() as model, torch.inference_mode():
        reference = backbone.reference_logits(prompts, tokens)
        rows = torch.cat([tokens.view(3, 3, 5), tokens.new_full((3, 3, 1), -1)], 2).flatten(1)
        ids = torch.cat([prompts.ids.flatten(0, 1), backbone.ids[rows].repeat(2, 1)], 1)
        attend = torch.cat([prompts.attend.flatten(0, 1), torch.ones(6, 18, dtype=torch.bool)], 1).long()
        positions = (attend.cumsum(1) - 1).clamp_min(0)
        logits = model(input_ids=ids, attention_mask=attend, position_ids=positions).logits
    length = prompts.ids.shape[-1]
    keep = [length - 1 + 6 * y + x for y in range(3) for x in range(5)]
    torch.testing.assert_close(reference, logits[:, keep][..., backbone.ids[:-1]], rtol=1e-12, atol=1e-12)


# -- loading ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["present layout", "published layout"])
def checkpoint(tmp_path, request):
    made = micro_emu3.model(scale=15.0)
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    micro_emu3.tokenizer().save_pretrained(tmp_path)
    if request.param == "published layout":
        index = tmp_path / "model.safetensors.index.json"
        table = json.loads(index.read_text())
        for shard in tmp_path.glob("*.safetensors"):
            tensors = {published(key): tensor for key, tensor in load_file(shard).items()}
            save_file(tensors, shard, metadata={"format": "pt"})
        table["weight_map"] = {published(key): file for key, file in table["weight_map"].items()}
        index.write_text(json.dumps(table))
    return tmp_path


def published(key):
    """The names of the checkpoints on the hub, which transformers renames while loading."""
    key = key.replace("model.text_model.", "text_model.model.").replace("model.vqmodel.", "vqmodel.")
    return "text_model." + key if key.startswith("lm_head") else key


def load(checkpoint, **kwargs):
    settings = {"ratio": "16:9", "area": 64, "quality": " best.", "negative": "bad, worst.", "dtype": "float64"}
    return Emu3.load(str(checkpoint), **settings | kwargs)


def test_a_checkpoint_loads_exactly(checkpoint, backbone):
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    loaded = load(checkpoint)
    prompts = loaded.encode_prompts(TEXTS)
    assert torch.equal(prompts.ids, backbone.encode_prompts(TEXTS).ids)
    tokens = torch.randint(7, (3, 15), generator=torch.Generator().manual_seed(0))
    hidden = loaded.teacher_force(prompts, tokens)
    torch.testing.assert_close(hidden, backbone.teacher_force(prompts, tokens), rtol=1e-12, atol=1e-12)
    assert loaded.readout_error(prompts, tokens, hidden) < 1e-12
    assert loaded.fingerprint == backbone.fingerprint


def test_loading_in_another_dtype_and_attention(checkpoint):
    loaded = load(checkpoint, dtype="bfloat16", attention="eager")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.decoder.config._attn_implementation == "eager"
    assert loaded.decoder.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("setting, message", [
    ({"ratio": "1:9"}, "no ratio '1:9'"), ({"dtype": "bf16"}, "dtype is 'bf16'"), ({"attention": "flex"}, "is 'flex'"),
])  # fmt: skip
def test_a_wrong_setting_is_refused_before_loading(setting, message):
    with pytest.raises(ValueError, match=message):
        Emu3.load("nobody/none", **setting)


def edit(checkpoint, change):
    for shard in checkpoint.glob("*.safetensors"):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})


def ones(tensors, end):
    return {key: torch.ones(3, 3) for key in tensors if key.endswith(end)}


BREAK = {
    "missing": (lambda t: [t.pop(k) for k in list(t) if k.endswith("layers.1.mlp.up_proj.weight")], "missing_keys"),
    "unexpected": (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2)}), "unexpected_keys"),
    "shape": (lambda t: t.update(ones(t, "layers.1.mlp.up_proj.weight")), "mismatched_keys"),
}


@pytest.mark.parametrize("change, message", BREAK.values(), ids=BREAK.keys())
def test_an_incomplete_checkpoint_is_refused_by_name(checkpoint, change, message):
    edit(checkpoint, change)
    with pytest.raises(ValueError, match=rf"{message}.*mlp.up_proj.weight"):
        load(checkpoint)


# -- pixels -------------------------------------------------------------------------------------------------------


def test_pixels_are_the_class_s_own(backbone):
    tokens = torch.randint(7, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([tokens, tokens.new_full((2, 3, 1), -1)], 2)
    # The class's decoder wants ids, with the three tokens that end an image.
    ids = torch.cat([backbone.ids[rows].flatten(1), torch.zeros(2, 3, dtype=torch.int64)], 1)
    theirs = backbone.model.decode_image_tokens(image_tokens=ids, height=3, width=5)
    theirs = ((theirs + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    ours = backbone.decode_pixels(tokens)
    assert ours.shape == (2, 6, 10, 3)
    assert ours.float().std() > 10
    assert torch.equal(ours, theirs)


def test_codes_are_the_class_s_own(backbone):
    images = torch.randint(256, (2, 6, 10, 3), dtype=torch.uint8)
    pixels = images.permute(0, 3, 1, 2).double() / 127.5 - 1
    theirs = backbone.model.model.get_image_tokens(pixels, [(6, 10), (6, 10)]).view(2, 3, 6)[..., :-1]
    assert torch.equal(backbone.ids[backbone.encode_pixels(images)], theirs.long())


def test_images_of_another_size_are_refused(backbone):
    with pytest.raises(ValueError, match=r"8x8 pixels.*needs 6x10"):
        backbone.encode_pixels(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))


# -- full size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio, grid", [("1:1", (90, 90)), ("16:9", (68, 120))])
def test_full_size_on_the_meta_device(ratio, grid):
    names = {f"<|visual token {code:06d}|>": 151854 + code for code in range(32768)} | {"<|extra_200|>": 151846}
    with torch.device("meta"):
        model = Emu3ForConditionalGeneration._from_config(Emu3Config(vocabulary_map=names))
    backbone = Emu3(model, micro_emu3.tokenizer(), ratio=ratio)
    assert (backbone.grid.height, backbone.grid.width) == grid
    assert (backbone.vocabulary, backbone.width) == (32768, 4096)
    assert backbone.grid.sequence_length == grid[0] * (grid[1] + 1)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(8.76e9, rel=2e-3)
