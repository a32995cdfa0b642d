"""Exported heads: whole, or refused by the name of what does not fit."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import huggingface_hub.constants
import micro
import pytest
import safetensors.torch
import torch
from hub import TOKEN, local_hub

from ssd_train.heads import export as module
from ssd_train.heads.corrector import CorrectorSpec
from ssd_train.heads.export import HeadsError, load_heads, push_heads, read_config, save_heads, write_card
from ssd_train.heads.predictors import Direction, Heads, HeadSpec
from ssd_train.processes.files import read_json, sha256, write_json
from ssd_train.prompts import Split, split_of
from ssd_train.stages import decode, train
from ssd_train.stages import export as stage

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


@pytest.mark.parametrize("settings", [
    {}, {"hidden": 5}, {"space": "token"}, {"state_scale": 37.5}, {"context": 3}, {"corrector": CorrectorSpec(4, 2, 3)},
])  # fmt: skip
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
    config = read_config(exported)
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
        ("heads.hidden", 10**6, r"horizontal_1.w1.weight: expected \(1000000, 16\), found \(32, 16\)"),
        ("heads.k_horizontal", 10**9, r"model.safetensors holds 15 tensors; expected those of HeadSpec\(.*=1000000000"),
        ("heads.k_horizontal", 2.0, r"config.json does not describe .*k_horizontal is 2.0; expected a int"),
        ("heads.hidden", -1, r"config.json does not describe .*; expected 1 or more; export the heads again"),
        ("heads.state_scale", -1.0, "config.json does not describe heads .*scales must be positive .*-1"),
        ("training", None, r"config.json: training is None; expected a dict; export the heads again"),
        ("weights", 5, r"config.json: weights is 5; expected a str"),
        ("heads.colour", 3, r"config.json does not describe heads that this version knows.*'colour'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(exported, backbone, key, value, message):
    config = read_config(exported)
    node = config["heads"] if key.startswith("heads.") else config
    node[key.removeprefix("heads.")] = value
    write_json(exported / "config.json", config)
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
    refuses(exported, backbone, rf"model.safetensors does not match its config.json; export .*:\n  .*{message}")


def test_other_weights_of_the_same_shapes_are_refused(exported, backbone):
    file = exported / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["predictors.vertical_1.w1.weight"][3, 5] += 1e-6
    safetensors.torch.save_file(tensors, file)
    refuses(exported, backbone, r"model.safetensors is damaged: it is not what config.json .*; export the heads again")


def test_broken_heads_are_not_loaded(exported, backbone):
    """Nor if they say of themselves that they are whole."""
    file = exported / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["predictors.vertical_1.w1.weight"][3, 5] = float("nan")
    safetensors.torch.save_file(tensors, file)
    write_json(exported / "config.json", read_config(exported) | {"weights": sha256(file)})
    refuses(exported, backbone, r"numbers in predictors.vertical_1.w1.weight: .*/model.safetensors drafts nothing; tra")


def test_broken_heads_are_not_exported(backbone, tmp_path):
    heads = make_heads(backbone)
    heads.predictors["vertical_1"].w0.weight.data[0] = float("inf")
    with pytest.raises(HeadsError, match=r"in predictors.vertical_1.w0.weight: training left them so; lower head.lr"):
        save_heads(tmp_path / "heads", heads, backbone, TRAINING)
    assert not (tmp_path / "heads").exists()


def test_broken_files_are_refused(exported, backbone):
    path = exported / "model.safetensors"
    good = path.read_bytes()
    for content in good[:-10], good[:40], b"":
        path.write_bytes(content)
        refuses(exported, backbone, r"model.safetensors cannot be read \(.*\); export the heads again")
    path.unlink()
    refuses(exported, backbone, r"model.safetensors cannot be read \(.*\); export the heads again")
    path.write_bytes(good)
    config = (exported / "config.json").read_text()
    for text in '{"format": 1', "{}", "[]", config.replace('"k_vertical": 1', '"k_vertical": 2'):
        (exported / "config.json").write_text(text)
        refuses(exported, backbone, "config.json (holds|is damaged).*; export the heads again")
    (exported / "config.json").unlink()
    refuses(exported, backbone, r"holds no exported heads \(no config.json\); run the train and export stages first")


@pytest.mark.parametrize("at", range(3))
def test_the_old_export_stays_until_the_new_one_is_whole(exported, backbone, monkeypatch, at):
    """The disk is full at each of the three files."""
    old, calls, sync = {path.name: path.read_bytes() for path in exported.iterdir()}, [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; free some space and run the same command.*/heads/"):
        save_heads(exported, make_heads(backbone, hidden=3), backbone, TRAINING)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == old


def test_an_export_killed_between_two_renames_is_refused(exported, backbone, monkeypatch):
    replace, calls = os.replace, []

    def dying(*names):
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        save_heads(exported, Heads(make_heads(backbone).spec), backbone, TRAINING)
    refuses(exported, backbone, r"model.safetensors is damaged: it is not what config.json")


# -- the hub ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path / "hub") as hub:
        yield hub


def test_heads_go_to_the_hub_and_come_back_as_they_were(hub, exported, backbone):
    """With the card and what was measured, and nothing else that lies in the folder."""
    write_card(exported, read_config(exported), "| decoder | passes |")
    (exported / ".hidden").write_text("private")
    (exported / "notes.txt").write_text("private")
    assert push_heads(exported, "me/heads").endswith(f"/me/heads/commit/{1:040x}")
    assert hub.visibility == {"me/heads": "private"}
    (files,) = hub.commits["me/heads"]
    assert files == {name: (exported / name).read_bytes() for name in module.FILES}
    assert b"| decoder | passes |" in files["README.md"]
    loaded, local = load_heads("me/heads", backbone), load_heads(exported, backbone)
    assert loaded.spec == local.spec
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in local.state_dict().items())


def test_a_revision_is_that_revision(hub, exported, backbone):
    push_heads(exported, "me/heads")
    save_heads(exported, make_heads(backbone, hidden=5), backbone, TRAINING)
    push_heads(exported, "me/heads", private=False)
    assert hub.visibility == {"me/heads": "private"}, "an existing repository stays what it is"
    for first in load_heads("me/heads", backbone, f"{1:040x}"), load_heads(f"me/heads@{1:040x}", backbone):
        assert first.spec.hidden == 32
    assert load_heads("me/heads", backbone).spec.hidden == 5
    with pytest.raises(HeadsError, match=r"me/heads@v9 is no directory here.*hf download me/heads --revision v9"):
        load_heads("me/heads@v9", backbone)


def test_heads_from_the_hub_are_checked_like_others(hub, exported, backbone):
    push_heads(exported, "me/heads")
    with pytest.raises(HeadsError, match=rf"trained for fingerprint {backbone.fingerprint}"):
        load_heads("me/heads", micro.janus((2, 3), seed=1))
    with pytest.raises(HeadsError, match=r"trained for grid \[2, 3\]"):
        load_heads("me/heads", micro.janus((2, 4)))
    del hub.commits["me/heads"][0]["model.safetensors"]
    hub.commits["me/other"] = hub.commits["me/heads"]
    with pytest.raises(HeadsError, match=r"model.safetensors cannot be read"):
        load_heads("me/other", backbone)


def test_offline_the_hubs_cache_has_to_do(hub, exported, backbone, monkeypatch):
    push_heads(exported, "me/heads")
    online = load_heads("me/heads", backbone)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert same(load_heads("me/heads", backbone), online)
    with pytest.raises(HeadsError, match=r"me/others is no directory.*HF_HUB_OFFLINE is set.*`hf download me/others`"):
        load_heads("me/others", backbone)
    with pytest.raises(HeadsError, match=r"was not pushed to me/heads; expected .* a network"):
        push_heads(exported, "me/heads")


def same(a, b):
    return all(torch.equal(tensor, b.state_dict()[key]) for key, tensor in a.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*[Rr]etry")
def test_a_hub_that_is_not_there_is_said(exported, backbone, monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path / "hub"):
        pass
    with pytest.raises(HeadsError, match=r"no heads of that name are to be had from the Hugging Face hub.*refused"):
        load_heads("me/heads", backbone)
    with pytest.raises(HeadsError, match=r"was not pushed to me/heads; expected .*refused"):
        push_heads(exported, "me/heads")


def test_only_who_may_write_pushes_and_no_token_is_kept(hub, exported, monkeypatch, tmp_path):
    push_heads(exported, "me/heads")
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert kept == []
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_stranger")
    with pytest.raises(HeadsError, match=r"was not pushed to me/heads.*logged in \(`hf auth login`\).*401"):
        push_heads(exported, "me/heads")
    assert len(hub.commits["me/heads"]) == 1


def test_what_is_no_whole_export_is_not_pushed(hub, exported):
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    del tensors["predictors.vertical_1.w2.weight"]
    safetensors.torch.save_file(tensors, exported / "model.safetensors")
    with pytest.raises(HeadsError, match=r"vertical_1.w2.weight: expected \(16, 32\), found nothing"):
        push_heads(exported, "me/heads")
    with pytest.raises(HeadsError, match=r"nowhere holds no exported heads"):
        push_heads(exported / "nowhere", "me/heads")
    assert hub.commits == {}


def test_a_directory_comes_before_the_hub_and_a_path_is_never_an_id(hub, exported, backbone, monkeypatch):
    """So that an output folder that is not there yet is not looked for on the hub."""
    push_heads(exported, "me/heads")
    monkeypatch.chdir(exported.parent)
    refuses(Path("me/heads"), backbone, r"me/heads holds no exported heads")
    shutil.copytree(exported, "me/heads")
    Path("me/heads/config.json").unlink()
    refuses("me/heads", backbone, r"me/heads holds no exported heads")


def test_a_run_decodes_with_heads_from_the_hub(hub, run, make_run, cached):
    stage.run(run)
    push_heads(run.heads_dir, "me/heads")
    other = make_run(cached, f"output={run.output}/other", "decode.heads=me/heads@" + f"{1:040x}", "decoder=[ar,ssd]")
    decode.check(other)
    decode.run(other)
    contents = json.loads((run.output / "other/decode/report.json").read_text())
    assert contents["heads"] == read_config(run.heads_dir)
    assert 0 < contents["decoders"]["ssd"]["acceptance"]["rate"] <= 1
    missing = make_run(cached, "decode.heads=me/nothing")
    with pytest.raises(HeadsError, match=r"me/nothing is no directory here"):
        decode.check(missing)


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
    prompts = run.prompts([Split.TRAIN, Split.VALIDATION], 60)
    assert training["samples"] == sum(split_of(prompt.text) is Split.TRAIN for prompt in prompts)
    assert training["validation"] == read_json(run.output / "training.json")["validation"]


def test_an_export_is_not_repeated_unless_it_is_broken(run):
    """So the table that decode writes into the card stays there."""
    stage.run(run)
    write_card(run.heads_dir, read_config(run.heads_dir), "measured")
    stage.run(run)
    assert "measured" in (run.heads_dir / "README.md").read_text()
    (run.heads_dir / "model.safetensors").write_bytes(b"")
    stage.run(run)
    load_heads(run.heads_dir, run.backbone)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_export_may_be_half_as_large(run, make_run, cached, dtype):
    """The same weights, rounded; asked for once more, they are exported anew."""
    stage.run(run)
    whole, size = load_heads(run.heads_dir, run.backbone), (run.heads_dir / "model.safetensors").stat().st_size
    stage.run(make_run(cached, f"output={run.output}", "train.epochs=1", "head.lr=1e-2", f"export.dtype={dtype}"))
    half = load_heads(run.heads_dir, run.backbone)
    rounded = {key: tensor.to(getattr(torch, dtype)).float() for key, tensor in whole.state_dict().items()}
    assert all(torch.equal(tensor, rounded[key]) for key, tensor in half.state_dict().items())
    assert (run.heads_dir / "model.safetensors").stat().st_size < 0.6 * size


def test_no_training_or_another_one_is_not_exported(run, make_run, cached, tmp_path):
    with pytest.raises(HeadsError, match=r"holds no finished training; run the train stage first"):
        stage.run(make_run(cached, f"output={tmp_path}/empty"))
    changed = make_run(cached, f"output={run.output}", "train.epochs=1", "head.lr=2e-2", "stages=[export]")
    for step in stage.check, stage.run:
        with pytest.raises(HeadsError, match=r"holds heads trained with other settings; run the train stage first"):
            step(changed)
