"""Lumina-mGPT against transformers' Chameleon, and checkpoints in the published layout."""

import json

import micro_lumina
import oracle
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from ssd_train.backbones.lumina import Lumina, known_sizes
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.distributions import Sampling

NORM = "model.layers.1.self_attn.q_norm.weight"
TEXTS = ["a dog", "two very long cats", "sun"]


@pytest.fixture(scope="module")
def backbone():
    return micro_lumina.lumina(scale=15.0)


# -- prompts and sizes --------------------------------------------------------------------------------------------


def test_the_prompt_is_the_published_one(backbone):
    """[bos] text [separator] begin-of-image height width, the text naming width x height."""
    names = micro_lumina.vocabulary(7)
    text = "Generate an image of 64x32 according to the following prompt:\na dog"
    letters = [names[{" ": "Ġ", "\n": "Ċ"}.get(letter, letter)] for letter in text]
    begin = [names["<racm3:break>"], names["<reserved08801>"], names["<reserved08802>"]]
    prompts = backbone.encode_prompts(["a dog", "sun"])
    assert prompts.ids[0, 0].tolist() == [names["<s>"], *letters, names["<reserved08706>"], *begin]
    assert prompts.ids[1, 0][prompts.attend[1, 0]].tolist() == begin
    assert prompts.attend.sum(-1).tolist() == [[len(letters) + 5, len(letters) + 3], [3, 3]]


def test_image_ids_follow_the_codebook_not_the_vocabulary(backbone):
    names = micro_lumina.vocabulary(7)
    assert backbone.ids[:-1].tolist() == [names[f"IMGIMG{letter}Z"] for letter in "ABCDEFG"]
    assert backbone.ids[:-1].tolist() != sorted(backbone.ids[:-1].tolist())
    assert int(backbone.ids[-1]) == names["<reserved08799>"]


@pytest.mark.parametrize("resolution, count", [(512, 49), (768, 73), (1024, 97)])
def test_known_sizes(resolution, count):
    sizes = known_sizes(resolution)
    assert len(sizes) == len(set(sizes)) == count
    assert (resolution, resolution) in sizes
    assert (resolution // 2, resolution * 2) in sizes  # 4:1
    assert all(h * w <= resolution**2 and max(h, w) <= 4 * min(h, w) for h, w in sizes)
    assert all((w, h) in sizes for h, w in sizes)


def test_an_unknown_size_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no size 32x33 .*expected one of 32x64, .*64x32, 64x64, "):
        micro_lumina.lumina(size=(32, 33))


def test_the_default_size_is_the_square():
    grid = micro_lumina.lumina(size=None).grid
    assert (grid.height, grid.width, grid.end_of_line) == (4, 4, True)


def test_a_vocabulary_without_a_name_is_refused(backbone):
    made = micro_lumina.model()
    del made.config.vocabulary_map["<reserved08799>"]
    with pytest.raises(ValueError, match="no <reserved08799>"):
        Lumina(made, None, resolution=64)


def test_a_vocabulary_without_an_image_token_is_refused():
    made = micro_lumina.model()
    made.config.vocabulary_map.pop("IMGIMGCZ")
    with pytest.raises(ValueError, match="names 6 image tokens; expected one for each of the 7"):
        Lumina(made, None, resolution=64)


# -- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("size", [(32, 64), (64, 32)])
def test_greedy_decoding_is_transformers_generate(guidance, size):
    backbone = micro_lumina.lumina(size=size, scale=15.0)
    prompts = backbone.encode_prompts(TEXTS)
    sampling = Sampling(guidance=guidance, temperature=0)
    ours = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(len(TEXTS)), sampling).tokens
    # transformers masks image logits whatever is asked for; an empty list of image tokens lifts that.
    backbone.model.model.vocabulary_mapping.__dict__["image_tokens"] = []
    assert torch.equal(oracle.generate_greedily(backbone, prompts, guidance), ours)
    assert len(ours.unique()) > 2


# -- loading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    made = micro_lumina.model(scale=15.0)
    micro_lumina.save_as_published(made, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load(checkpoint, **kwargs):
    settings = {"dtype": "float64", "resolution": 64, "size": [32, 64], "name": "micro"}
    return Lumina.load(str(checkpoint), **settings | kwargs)


def test_a_published_checkpoint_loads_exactly(checkpoint, backbone):
    loaded = load(checkpoint)
    assert loaded.dtype == torch.float64
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert not hasattr(loaded.model.model, "vqmodel")
    prompts = loaded.encode_prompts(TEXTS)
    assert torch.equal(prompts.ids, backbone.encode_prompts(TEXTS).ids)
    tokens = torch.randint(7, (3, 8), generator=torch.Generator().manual_seed(0))
    hidden = loaded.teacher_force(prompts, tokens)
    torch.testing.assert_close(hidden, backbone.teacher_force(prompts, tokens), rtol=1e-12, atol=1e-12)
    assert loaded.readout_error(prompts, tokens, hidden) < 1e-12


def test_loading_in_another_dtype_and_attention(checkpoint):
    loaded = load(checkpoint, dtype="bfloat16", attention="eager")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.decoder.config._attn_implementation == "eager"
    # The rotary frequencies stay in float32: rounded, they would turn far positions the wrong way.
    assert loaded.decoder.rotary_emb.inv_freq.dtype == torch.float32


def test_transformers_alone_would_make_random_norms(checkpoint):
    """Control: why the norms are repeated before loading."""
    loaded, report = ChameleonForConditionalGeneration.from_pretrained(
        checkpoint, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert (NORM, (1, 8), (2, 8)) in {(k, tuple(a), tuple(b)) for k, a, b in report["mismatched_keys"]}
    assert not torch.equal(loaded.state_dict()[NORM], load(checkpoint).model.state_dict()[NORM].float())


def test_the_tokenizer_keeps_its_spaces(checkpoint):
    """The checkpoints call their byte-level tokenizer a Llama one."""
    assert json.loads((checkpoint / "tokenizer_config.json").read_text())["tokenizer_class"] == "LlamaTokenizer"
    words = load(checkpoint).tokenizer
    assert words.decode(words("a dog\nruns", add_special_tokens=False)["input_ids"]) == "a dog\nruns"


def test_a_tokenizer_from_another_checkpoint(checkpoint, tmp_path):
    micro_lumina.save_as_published(micro_lumina.model(scale=15.0), tmp_path / "bare", with_tokenizer=False)
    loaded = load(tmp_path / "bare", tokenizer=str(checkpoint))
    assert torch.equal(loaded.encode_prompts(TEXTS).ids, load(checkpoint).encode_prompts(TEXTS).ids)


def edit(checkpoint, change):
    """Applies ``change`` to the tensors of every shard."""
    for shard in checkpoint.glob("*.safetensors"):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})


BREAK = {
    "missing": (lambda t: t.pop("lm_head.weight", None), "(?s)Missing key.*lm_head.weight"),
    "missing norm": (lambda t: t.pop(NORM, None), f"(?s)Missing key.*{NORM}"),
    "unexpected": (lambda t: t.update({"extra.weight": torch.ones(2)}), "(?s)Unexpected key.*extra.weight"),
    "shape": (lambda t: t.update({k: torch.ones(3, 3) for k in t if "lm_head" in k}), "mismatch for lm_head.weight"),
    "norm's shape": (lambda t: t.update({k: torch.ones(1, 5) for k in t if k == NORM}), f"size mismatch for {NORM}"),
    "norm's heads": (lambda t: t.update({k: torch.ones(3, 8) for k in t if k == NORM}), f"size mismatch for {NORM}"),
}


@pytest.mark.parametrize("change, message", BREAK.values(), ids=BREAK.keys())
def test_an_incomplete_checkpoint_is_refused_by_name(checkpoint, change, message):
    edit(checkpoint, change)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_a_missing_shard_is_refused_by_name(checkpoint):
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.safetensors"):
        load(checkpoint)


def test_part_of_a_vq_encoder_is_refused(checkpoint):
    edit(checkpoint, lambda t: t.update({"model.vqmodel.quant_conv.bias": torch.zeros(4)}))
    with pytest.raises(ValueError, match=r"(?s)Missing key.*model.vqmodel.encoder"):
        load(checkpoint)


def test_a_checkpoint_with_a_vq_encoder_keeps_it(tmp_path):
    """As transformers itself would save it."""
    made = micro_lumina.model(scale=15.0)
    made.save_pretrained(tmp_path)
    micro_lumina.tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    images = torch.randint(256, (2, 8, 16, 3), dtype=torch.uint8)
    pixels = images.permute(0, 3, 1, 2).double() / 127.5 - 1
    codes = made.model.vqmodel.encode(pixels).image_tokens.view(2, 2, 4)
    assert torch.equal(loaded.encode_pixels(images), codes)
    # The class's own mapping of these codes to ids is ours.
    assert torch.equal(loaded.ids[codes].flatten(1), made.get_image_tokens(pixels).long())


@pytest.mark.parametrize("setting, message", [
    ({"size": [700, 700]}, "no size 700x700"), ({"dtype": "bf16"}, "dtype is 'bf16'"),
    ({"attention": "flex"}, "is 'flex'"),
])  # fmt: skip
def test_a_wrong_setting_is_refused_before_loading(setting, message):
    with pytest.raises(ValueError, match=message):
        Lumina.load("nobody/none", **setting)


def test_without_network_a_hub_id_is_an_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Exception, match=r"(?i)offline|cache|locate"):
        Lumina.load("nobody/none")


# -- pixels -------------------------------------------------------------------------------------------------------


def test_without_the_vqgan_pixels_are_an_error_that_says_what_to_do(checkpoint):
    loaded = load(checkpoint)
    with pytest.raises(FileNotFoundError, match=r"(?s)vqgan.ckpt.*model.backbone.vqgan=PATH.*tokens are saved"):
        loaded.decode_pixels(torch.zeros(1, 2, 4, dtype=torch.int64))
    with pytest.raises(FileNotFoundError, match=r"vqgan.ckpt"):
        loaded.encode_pixels(torch.zeros(1, 8, 16, 3, dtype=torch.uint8))


def test_a_vqgan_path_that_is_not_there_is_an_error_at_once(checkpoint):
    with pytest.raises(FileNotFoundError, match=r"no file nowhere.ckpt"):
        load(checkpoint, vqgan="nowhere.ckpt")


def taming_decoder(w, codes):
    """The decoder of a VQGAN (Taming Transformers, arXiv 2012.09841) on the names of its file: an independent one."""

    def conv(x, name):
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=w[f"{name}.weight"].shape[-1] // 2)

    def norm(x, name):
        return F.group_norm(x, 32, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    def block(x, name):
        y = conv(F.silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
        y = conv(F.silu(norm(y, f"{name}.norm2")), f"{name}.conv2")
        return y + (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in w else x)

    def attention(x, name):
        q, k, v = (conv(norm(x, f"{name}.norm"), f"{name}.{part}").flatten(2).mT for part in "qkv")
        y = F.scaled_dot_product_attention(q, k, v).mT.reshape(x.shape)
        return x + conv(y, f"{name}.proj_out")

    x = w["quantize.embedding.weight"][codes].permute(0, 3, 1, 2)
    x = conv(conv(x, "post_quant_conv"), "decoder.conv_in")
    x = block(x, "decoder.mid.block_1")
    x = block(attention(x, "decoder.mid.attn_1"), "decoder.mid.block_2")
    for level in (2, 1, 0):
        for i in range(2):
            x = block(x, f"decoder.up.{level}.block.{i}")
        if level:
            x = conv(F.interpolate(x, scale_factor=2.0, mode="nearest"), f"decoder.up.{level}.upsample.conv")
    return conv(F.silu(norm(x, "decoder.norm_out")), "decoder.conv_out")


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_pixels_are_those_of_the_original_decoder(tmp_path, suffix):
    path = micro_lumina.save_vqgan(tmp_path)
    weights = torch.load(path, weights_only=True)["state_dict"]
    if suffix == ".safetensors":
        path = tmp_path / "vqgan.safetensors"
        save_file({k: v.contiguous() for k, v in weights.items()}, path)
    backbone = micro_lumina.lumina(vqgan=path)
    codes = torch.randint(7, (2, 2, 4), generator=torch.Generator().manual_seed(0))
    expected = taming_decoder(weights, codes)
    assert expected.std() > 0.1
    torch.testing.assert_close(backbone.pixels.decode(codes), expected, rtol=1e-4, atol=1e-4)
    ours, theirs = backbone.decode_pixels(codes), ((expected + 1) * 127.5).round().clamp(0, 255).permute(0, 2, 3, 1)
    assert ours.shape == (2, 8, 16, 3)
    assert (ours - theirs).abs().max() <= 1  # at a rounding edge


def test_the_vqgan_s_encoder_is_used_where_the_checkpoint_has_none(checkpoint, tmp_path):
    loaded = load(checkpoint, vqgan=str(micro_lumina.save_vqgan(tmp_path)))
    images = torch.randint(256, (2, 8, 16, 3), dtype=torch.uint8)
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    assert torch.equal(loaded.encode_pixels(images), loaded.pixels.vq.encode(pixels).image_tokens.view(2, 2, 4))


def test_images_of_another_size_are_refused(checkpoint, tmp_path):
    loaded = load(checkpoint, vqgan=str(micro_lumina.save_vqgan(tmp_path)))
    with pytest.raises(ValueError, match=r"8x8 pixels.*needs 8x16"):
        loaded.encode_pixels(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))


def test_a_vqgan_that_does_not_fit_is_refused_by_name(checkpoint, tmp_path):
    path = micro_lumina.save_vqgan(tmp_path)
    state = torch.load(path, weights_only=True)["state_dict"]
    del state["decoder.mid.attn_1.q.weight"]
    torch.save({"state_dict": state}, path)
    with pytest.raises(ValueError, match=r"(?s)does not fit.*Missing key.*decoder.mid.attn_1.q.weight"):
        load(checkpoint, vqgan=str(path))


# -- full size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolution, size, grid", [
    (512, None, (32, 32)), (768, None, (48, 48)), (1024, None, (64, 64)), (768, (576, 1024), (36, 64)),
])  # fmt: skip
def test_full_size_on_the_meta_device(resolution, size, grid):
    names = {f"IMGIMG{str(code).translate(micro_lumina.DIGITS)}Z": code + 4 for code in range(8192)}
    names |= {"<s>": 0, "<eoss>": 8196, "<racm3:break>": 8197, "<reserved08706>": 8710}
    names |= {f"<reserved{8799 + n:05d}>": 8803 + n for n in range(70)}
    with torch.device("meta"):
        model = ChameleonForConditionalGeneration._from_config(ChameleonConfig(vocabulary_map=names))
    backbone = Lumina(model, None, resolution=resolution, size=size)
    assert (backbone.grid.height, backbone.grid.width) == grid
    assert (backbone.vocabulary, backbone.width) == (8192, 4096)
    decoder = sum(p.numel() for name, p in model.named_parameters() if "vqmodel" not in name)
    assert decoder == pytest.approx(7.01e9, rel=2e-3)
    assert backbone._begin == [8197, 8804 + grid[0] // 2, 8804 + grid[1] // 2]
