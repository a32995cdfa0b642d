"""Exported heads: whole, or refused by the name of what does not fit."""

import json
import re
import shutil

import micro
import pytest
import safetensors.torch
import torch

from ssd_train import export as module
from ssd_train.export import HeadsError, load_heads, read_config, save_heads, write_card
from ssd_train.heads import Direction, Heads, HeadSpec
from ssd_train.stages import export as stage
from ssd_train.stages import train

TRAINING = {"samples": 46, "validation": {"validation/acceptance/vertical_1": 0.5, "validation/top1/vertical_1": 0.25}}


@pytest.fixture(scope="module")
def backbone():
    return micro.janus((2, 3))


def make_heads(backbone, **settings):
    torch.manual_seed(0)
    heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, 2, 1, **settings))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


@pytest.fixture
def exported(backbone, tmp_path):
    save_heads(tmp_path / "heads", make_heads(backbone), backbone, TRAINING)
    return tmp_path / "heads"


@pytest.mark.parametrize("settings", [{}, {"hidden": 5}, {"space": "token"}, {"state_scale": 37.5}, {"context": 3}])
def test_a_round_trip_is_exact(backbone, tmp_path, settings):
    heads = make_heads(backbone, **settings)
    save_heads(tmp_path, heads, backbone, TRAINING)
    loaded = load_heads(tmp_path, backbone)
    assert loaded.spec == heads.spec
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in heads.state_dict().items())
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


def test_what_an_export_holds(exported, backbone):
    """Safetensors, JSON and a card; nothing that can run code."""
    assert {path.name for path in exported.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert set(safetensors.torch.load_file(exported / "model.safetensors")) == set(make_heads(backbone).state_dict())
    config = json.loads((exported / "config.json").read_text())
    assert config["fingerprint"] == backbone.fingerprint
    assert config["grid"] == [2, 3]
    assert config["heads"]["k_horizontal"] == 2
    assert config["heads"]["width"] == backbone.width
    assert config["backbone"] == "micro"
    assert config["training"] == TRAINING


def test_the_card_says_what_was_measured(exported, backbone):
    card = (exported / "README.md").read_text()
    assert "# Spatially Speculative Decoding heads for micro" in card
    assert "2 horizontal and 1 vertical heads" in card
    assert "2x3 token grid" in card
    assert backbone.fingerprint in card
    assert "| vertical +1 | 0.500 | 0.250 |" in card
    assert "Not measured yet." in card
    write_card(exported, read_config(exported), "| decoder | passes |")
    assert "| decoder | passes |" in (exported / "README.md").read_text()
    load_heads(exported, backbone)


# -- refusals -----------------------------------------------------------------------------------------------------


def refuses(exported, backbone, message):
    with pytest.raises(HeadsError, match=message):
        load_heads(exported, backbone)


def test_another_backbone_is_refused(exported, backbone):
    other = micro.janus((2, 3), seed=1)
    expected = f"trained for fingerprint {backbone.fingerprint} (backbone micro), but micro has {other.fingerprint}"
    refuses(exported, other, re.escape(expected))


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("grid", [2, 4], r"trained for grid \[2, 4\] \(backbone micro\), but micro has \[2, 3\]"),
        ("end_of_line", True, "trained for end_of_line True"),
        ("heads.width", 8, r"trained for width 8 \(backbone micro\), but micro has 16"),
        ("heads.vocabulary", 6, r"trained for vocabulary 6 \(backbone micro\), but micro has 5"),
        ("heads.k_vertical", 2, r"predictors.vertical_2.w0.weight: expected \(16, 32\), found nothing"),
        ("heads.k_horizontal", 1, r"predictors.horizontal_2.w0.weight: expected nothing, found \(16, 32\)"),
        ("heads.hidden", 7, r"predictors.horizontal_1.w1.weight: expected \(7, 16\), found \(32, 16\)"),
        ("heads.space", "pixel", r"config.json does not describe heads that this version knows.*'pixel'"),
        ("heads.colour", 3, r"config.json does not describe heads that this version knows.*'colour'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(exported, backbone, key, value, message):
    config = read_config(exported)
    node = config["heads"] if key.startswith("heads.") else config
    node[key.removeprefix("heads.")] = value
    (exported / "config.json").write_text(json.dumps(config))
    refuses(exported, backbone, message)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("predictors.vertical_1.w2.weight"), r"l_1.w2.weight: expected \(16, 32\), found nothing"),
        (lambda t: t.update(extra=torch.zeros(3)), r"extra: expected nothing, found \(3,\)"),
        (
            lambda t: t.update({"predictors.vertical_1.norm.weight": torch.zeros(4)}),
            r"vertical_1.norm.weight: expected \(16,\), found \(4,\)",
        ),
    ],
)
def test_a_tensor_missing_unexpected_or_misshapen_is_refused_by_name(exported, backbone, change, message):
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, exported / "model.safetensors")
    refuses(exported, backbone, rf"model.safetensors does not match its config.json:\n  .*{message}")


def test_broken_files_are_refused(exported, backbone):
    path = exported / "model.safetensors"
    good = path.read_bytes()
    for content in good[:-10], good[:40], b"":
        path.write_bytes(content)
        refuses(exported, backbone, r"model.safetensors cannot be read \(.*\); export the heads again")
    path.unlink()
    refuses(exported, backbone, r"model.safetensors cannot be read \(.*\); export the heads again")
    path.write_bytes(good)
    for text in '{"format": 1', "{}", "[]":
        (exported / "config.json").write_text(text)
        refuses(exported, backbone, "config.json does not describe heads that this version knows")
    (exported / "config.json").unlink()
    refuses(exported, backbone, r"holds no exported heads \(no config.json\); run the train and export stages first")


def test_an_interrupted_export_is_no_export(exported, backbone, monkeypatch):
    """It replaces an older one: between the two there is none, rather than new weights under an old config."""
    write = module.write_atomically

    def dying(path, content):
        if path.name == "config.json":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(module, "write_atomically", dying)
    with pytest.raises(KeyboardInterrupt):
        save_heads(exported, make_heads(backbone, hidden=3), backbone, TRAINING)
    refuses(exported, backbone, r"no config.json")


# -- the stage ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(make_run, cached, tmp_path_factory):
    """A finished training; copy it before changing it."""
    output = tmp_path_factory.mktemp("trained") / "run"
    train.run(make_run(cached, f"output={output}", "train.epochs=1", "head.lr=1e-2"))
    return output


@pytest.fixture
def run(trained, make_run, cached, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return make_run(cached, f"output={tmp_path}/run", "train.epochs=1", "head.lr=1e-2")


def test_the_stage_exports_the_trained_weights(run):
    stage.run(run)
    heads = load_heads(run.heads_dir, run.backbone)
    weights = torch.load(run.checkpoint, weights_only=True)["state_dict"]
    assert {f"heads.{key}" for key in heads.state_dict()} == set(weights)
    assert all(torch.equal(tensor, weights[f"heads.{key}"]) for key, tensor in heads.state_dict().items())
    moved = heads(Direction.VERTICAL, 1, torch.ones(32)) - torch.ones(16)
    assert moved.abs().max() > 1e-3, "untrained heads are the identity"
    training = read_config(run.heads_dir)["training"]
    assert training["samples"] == 56
    assert training["validation"] == run.read_json("training.json")["validation"]


def test_an_export_is_not_repeated_unless_it_is_broken(run):
    """So the table that decode writes into the card stays there."""
    stage.run(run)
    write_card(run.heads_dir, read_config(run.heads_dir), "measured")
    stage.run(run)
    assert "measured" in (run.heads_dir / "README.md").read_text()
    (run.heads_dir / "model.safetensors").write_bytes(b"")
    stage.run(run)
    load_heads(run.heads_dir, run.backbone)


def test_no_training_or_another_one_is_not_exported(run, make_run, cached, tmp_path):
    with pytest.raises(HeadsError, match=r"holds no finished training; run the train stage first"):
        stage.run(make_run(cached, f"output={tmp_path}/empty"))
    changed = make_run(cached, f"output={run.output}", "train.epochs=1", "head.lr=2e-2", "stages=[export]")
    for step in stage.check, stage.run:
        with pytest.raises(HeadsError, match=r"holds heads trained with other settings; run the train stage first"):
            step(changed)
