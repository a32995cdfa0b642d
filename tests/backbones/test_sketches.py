"""Sketches have the sizes and ids of the published checkpoints, and are told apart from what cannot be sketched."""

import json
import math

import micro_lumina
import pytest
import torch
from omegaconf import OmegaConf

from ssd_train import config
from ssd_train.backbones.sketches import UnknownSize, byte_tokenizer, chameleon_names, emu3_names, sketch

MODELS = config.conf_dir() / "model"


def node(stem, **backbone):
    config.register()
    model = OmegaConf.load(MODELS / f"{stem}.yaml")
    model.backbone.update(backbone)
    return model


@pytest.mark.parametrize("stem, backbone, grid, vocabulary", [
    ("janus_pro_1b", {}, (24, 24, False), 16384),
    ("janus_pro_7b", {}, (24, 24, False), 16384),
    ("lumina", {}, (48, 48, True), 8192),
    ("lumina", {"size": [576, 1024]}, (36, 64, True), 8192),
    ("lumina_512", {}, (32, 32, True), 8192),
    ("lumina_1024", {}, (64, 64, True), 8192),
    ("emu3", {}, (90, 90, True), 32768),
    ("emu3", {"ratio": "16:9"}, (68, 120, True), 32768),
    ("tiny", {}, (16, 16, False), 512),
])  # fmt: skip
def test_shipped_models_on_the_meta_device(stem, backbone, grid, vocabulary):
    made = sketch(node(stem, **backbone))
    assert (made.grid.height, made.grid.width, made.grid.end_of_line) == grid
    assert made.vocabulary == vocabulary
    assert made.name == stem
    assert all(tensor.is_meta for tensor in made.parameters())
    assert made.dtype is (torch.float32 if stem == "tiny" else torch.bfloat16)


def test_ids_are_the_published_ones():
    names = chameleon_names(8192)
    assert names["<reserved08706>"] == 8710
    assert names["<racm3:break>"] == 8197
    assert names["<reserved08799>"] == 8803
    assert names["<reserved08824>"] == 8828  # 24 patches of 32 pixels
    assert names["<reserved08928>"] <= 65535
    made = sketch(node("lumina"))
    assert made.encode_prompts(["x"]).ids[1, 0, -3:].tolist() == [8197, 8828, 8828]
    names = emu3_names(32768, 184622)
    assert names["<|visual token 000000|>"] == 151854
    assert names["<|visual token 032767|>"] == 184621
    ids = {"<|extra_200|>": 151846, "<|extra_203|>": 151849, "<|image token|>": 151851, "<|image start|>": 151852}
    assert ids.items() <= names.items()
    context = sketch(node("emu3")).encode_prompts(["x"]).ids[0, 0].tolist()
    context = context[context.index(151849) :]
    assert [i for i in context if i >= 151846] == [151849, 151852, 151851]


def test_a_local_checkpoint_s_own_architecture_counts(tmp_path):
    """Not the yaml's; and Lumina's older config.json is understood."""
    micro_lumina.save_as_published(micro_lumina.model(), tmp_path)
    made = sketch(node("lumina", checkpoint=str(tmp_path), resolution=64), "cpu")
    assert (made.width, made.vocabulary) == (16, 7)
    assert made.ids.tolist() == micro_lumina.lumina().ids.tolist()


def test_the_working_directory_is_no_checkpoint(tmp_path, monkeypatch):
    """Where a model names none."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert small().width == 32


def test_of_nothing_known_there_is_no_sketch():
    model = node("emu3")
    del model.architecture
    with pytest.raises(UnknownSize, match=r"the size of emu3 is not known .*it has no model.architecture"):
        sketch(model)
    with pytest.raises(UnknownSize, match=r"ssd_train.backbones.base has no sketch"):
        sketch(node("emu3", _target_="ssd_train.backbones.base.fingerprint"))


def small(**settings):
    model = OmegaConf.load(config.conf_dir() / "experiment" / "smoke_janus.yaml").model
    model.backbone.update(settings)
    return sketch(model, "cpu")


def entropy(backbone):
    tokens = torch.zeros(1, backbone.grid.size, dtype=torch.int64)
    logits = backbone.readout(backbone.teacher_force(backbone.encode_prompts(["a dog"]), tokens))
    return float(torch.special.entr(logits.softmax(-1)).sum(-1).mean())


def test_weights_are_those_of_the_seed():
    state = torch.random.get_rng_state()
    a, b, c = small(seed=0), small(seed=0), small(seed=1)
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert torch.equal(state, torch.random.get_rng_state())


def test_scaled_weights_draw_from_distributions_that_are_not_flat():
    flat = math.log(64)
    assert entropy(small(scale=1.0)) > 0.999 * flat
    assert entropy(small(scale=8.0)) < 0.95 * flat


def test_the_byte_tokenizer():
    words = byte_tokenizer({"<s>": 2}, reserved=[0, 3])
    ids = words("<s>né\n", add_special_tokens=False)["input_ids"]
    assert ids[0] == 2
    assert len(ids) == 1 + len("né\n".encode())  # two bytes in é
    assert sorted(words.get_vocab().values()) == [1, 2, *range(4, 4 + 255)]


def test_planning_reads_no_weights(tmp_path):
    micro_lumina.save_as_published(micro_lumina.model(), tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 16
    assert sketch(node("lumina", checkpoint=str(tmp_path), resolution=64)).width == 16
