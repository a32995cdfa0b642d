"""Training: what heads learn from and are measured by; and a run cut off anywhere ends as if it had not been."""

import csv
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from memory import Peak
from omegaconf import OmegaConf

from ssd_train.cache.shards import CacheError, StoredSample
from ssd_train.config import HeadConfig
from ssd_train.distributions import guided_probabilities
from ssd_train.heads.export import HeadsError, load_heads
from ssd_train.heads.predictors import Direction, Heads, HeadSpec, name
from ssd_train.processes.files import read_json
from ssd_train.prompts import Split
from ssd_train.stages import cache, decode, export
from ssd_train.stages import train as stage
from ssd_train.training.checkpoints import Checkpoints
from ssd_train.training.datamodule import Batches
from ssd_train.training.module import HeadModule, Pairs, learning_rate

STEPS = 27  # 54 training samples, 2 epochs, 4 a batch

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{noise}")
    for noise in ("exists and is not empty", "does not have many workers", "LeafSpec", "Cannot dispatch to fused")
]


@pytest.fixture
def trainable(make_run, cached, tmp_path):
    """overrides -> a Run on the shared cache, with an output of its own."""

    def build(*overrides, output="run"):
        places = [f"cache.dir={cached}/cache", f"output={tmp_path}/{output}"]
        return make_run(tmp_path, *places, "train.epochs=2", *overrides)

    return build


@pytest.fixture
def steps(monkeypatch):
    """Records (step, samples, loss, learning rate) of every training step from now on."""
    seen, original = [], HeadModule.training_step

    def recording(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        rate = self.optimizers().param_groups[0]["lr"]
        seen.append((self.global_step, tuple(batch["index"].tolist()), loss.item(), rate))
        return loss

    monkeypatch.setattr(HeadModule, "training_step", recording)
    return seen


class Killed(BaseException):
    """Not caught by anything that handles errors."""


def kill_at(monkeypatch, step):
    """The process dies in the middle of this training step."""
    original = HeadModule.training_step

    def dying(self, batch, batch_idx):
        if self.global_step == step:
            raise Killed
        return original(self, batch, batch_idx)

    monkeypatch.setattr(HeadModule, "training_step", dying)


def final_weights(run):
    return torch.load(run.checkpoint, weights_only=True)["state_dict"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# -- the learning rate --------------------------------------------------------------------------------------------


def test_warm_up_and_cosine_by_hand():
    """Linear to the peak at the last warm-up step, half-way down in the middle, the floor at the last step."""
    factor = [learning_rate(step, steps=101, warmup=20, floor=0.1) for step in range(101)]
    assert factor[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert factor[20] == pytest.approx(1)
    assert factor[60] == pytest.approx(0.1 + 0.9 / 2)
    assert factor[40] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert factor[100] == pytest.approx(0.1)
    assert factor[20:] == sorted(factor[20:], reverse=True)
    assert learning_rate(500, steps=101, warmup=20, floor=0.1) == pytest.approx(0.1)
    assert learning_rate(0, steps=1, warmup=0, floor=0.1) == 1


def test_the_optimiser_follows_the_schedule(trainable, steps):
    stage.run(trainable("head.lr=1e-3", "head.min_lr=1e-4", "head.warmup_steps=5"))
    expected = [1e-3 * learning_rate(i, STEPS, 5, 0.1) for i in range(STEPS)]
    assert [rate for *_, rate in steps] == pytest.approx(expected)
    assert steps[0][-1] == pytest.approx(2e-4)
    assert steps[-1][-1] == pytest.approx(1e-4)


# -- losses -------------------------------------------------------------------------------------------------------


def test_a_corrector_is_trained_measured_and_exported_with_the_heads(trainable, caplog):
    """Both kinds of neighbours are told apart, and the heads are what they are without it but for the clipping."""
    run = trainable("head.corrector.width=8", "head.corrector.pairs=32", "head.lr=1e-2")
    with caplog.at_level(logging.INFO):
        stage.run(run)
    validation = read_json(run.output / "training.json")["validation"]
    figures = {k.rpartition("/")[2]: value for k, value in validation.items() if k.startswith("validation/corrector/")}
    groups = "", "_left_differs", "_left_is_the_same"
    assert set(figures) == {f"{kind}{group}" for kind in ("stale", "corrected") for group in groups}
    for group in groups:
        assert 0 < figures[f"stale{group}"] < 1
        assert figures[f"corrected{group}"] != figures[f"stale{group}"]
    assert f"{figures['stale']:.3f} as they are, {figures['corrected']:.3f} corrected" in caplog.text
    export.run(run)
    assert load_heads(run.output / "heads", run.backbone).corrector is not None
    assert f"{figures['corrected']:.3f} corrected" in (run.output / "heads/README.md").read_text()


def make_module(run, samples=8, **settings):
    """A module with heads that are not at their start, and a batch."""
    config = OmegaConf.merge(OmegaConf.structured(HeadConfig), {"k_horizontal": 2, "k_vertical": 2} | settings)
    data = stage.HeadDataModule(run.cache_dir, 60, samples, 0, 0, 0, 4)
    spec = HeadSpec(
        run.backbone.width, run.backbone.vocabulary, config.k_horizontal, config.k_vertical, space=config.space.name,
        context=config.context, state_scale=3.7, embedding_scale=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    heads = Heads(spec)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module = HeadModule(heads, run.backbone.output, run.backbone.grid, run.sampling, config, 10, seed=0)
    every = [s for split in (Split.TRAIN, Split.VALIDATION) for s in data.shards.read(split)]
    return module, Batches().make(every[:samples])


LOSSES = {
    "smooth_l1": {},
    "kl": {"loss": {"smooth_l1": 0, "kl": 1.0}},
    "total_variation": {"loss": {"smooth_l1": 0, "total_variation": 1.0}},
    "everything": {"loss": {"smooth_l1": 1.0, "kl": 0.1, "total_variation": 0.5}},
    "token": {"space": "token"},
    "wide": {"context": 3},
    "all at once": {"context": 5, "loss": {"smooth_l1": 1.0, "kl": 0.1, "total_variation": 0.5}},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("which", LOSSES)
def test_every_loss_reaches_every_head_and_nothing_else(make_run, cached, which):
    run = make_run(cached)
    module, batch = make_module(run, **LOSSES[which])
    module.training_step(batch, 0).backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key
    frozen = [*module.output.parameters(), *module.output.buffers(), *run.backbone.parameters()]
    assert all(not p.requires_grad and p.grad is None for p in frozen)
    assert all(key.startswith("heads.") for key in module.state_dict())


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_the_loss_is_the_mean_over_heads_of_the_weighted_terms(make_run, cached):
    """Position by position: Smooth L1 between unit-scale states, and KL and total variation between the guided
    distributions of target and draft."""
    run = make_run(cached, "model.sampling.temperature=0.7")
    module, batch = make_module(run, condition_drop=0.0, **LOSSES["everything"])
    output, heads, scale = module.output, module.heads, 3.7
    terms = {"smooth_l1": [], "kl": [], "total_variation": []}
    for direction, offset in heads.spec.offsets():
        dy, dx = (0, offset) if direction is Direction.HORIZONTAL else (offset, 0)
        sums = dict.fromkeys(terms, 0.0)
        places = [(y, x) for y in range(4 - dy) for x in range(4 - dx)]
        for y, x in places:
            source, target = batch["hidden"][:, :, y, x], batch["hidden"][:, :, y + dy, x + dx]
            z = heads.inputs(source, output.embed(batch["tokens"][:, None, y, x].expand(-1, 2)))
            guess = heads(direction, offset, z)
            difference = (guess - target / scale)[:, 0].abs()
            sums["smooth_l1"] += torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
            logits = [output.readout(state).unbind(1) for state in (target, guess * scale)]
            p, q = (((u + 2.0 * (c - u)) / 0.7).softmax(-1) for c, u in logits)
            sums["kl"] += (p * (p / q).log()).sum(-1).mean()
            sums["total_variation"] += (p - q).abs().sum(-1).mean() / 2
        for term in terms:
            terms[term].append(sums[term] / len(places))
    mean = {term: torch.stack(values).mean() for term, values in terms.items()}
    expected = 1.0 * mean["smooth_l1"] + 0.1 * mean["kl"] + 0.5 * mean["total_variation"]
    assert module.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-4)


def whole_grid(module, batch, direction, offset):
    """What a head sees of both streams."""
    return Pairs.of(batch["hidden"].transpose(0, 1), batch["tokens"], module.grid, direction, offset)


def test_token_space_is_trained_on_the_sampled_tokens(make_run, cached):
    module, batch = make_module(make_run(cached), space="token")
    at = whole_grid(module, batch, Direction.VERTICAL, 1)
    loss = module.losses(at, torch.zeros(8), Direction.VERTICAL, 1)["cross_entropy"]
    z = module.heads.inputs(batch["hidden"][:, 0, :3], module.output.embed(batch["tokens"][:, :3]))
    predicted = module.heads(Direction.VERTICAL, 1, z)
    q = module.heads.logits(Direction.VERTICAL, 1, predicted, None).softmax(-1)
    expected = -q.gather(-1, batch["tokens"][:, 1:, :, None]).log().mean()
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_condition_drop_takes_its_share(make_run, cached, monkeypatch, share):
    """Over 20,000 draws, 5 standard deviations: a false alarm has probability 6e-7. A function of sample and step."""
    module, _ = make_module(make_run(cached), condition_drop=share)
    count = 20_000
    batch = {"index": torch.arange(count)}
    dropped = module._stream(batch)
    assert abs(dropped.double().mean().item() - share) <= 5 * (share * (1 - share) / count) ** 0.5
    assert torch.equal(dropped, module._stream(batch))
    assert torch.equal(module._stream({"index": torch.arange(100, 300)}), dropped[100:300])
    monkeypatch.setattr(HeadModule, "global_step", 1)
    assert torch.equal(dropped, module._stream(batch)) == (share in (0, 1))


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("guided", [False, True])
def test_a_dropped_condition_is_the_unconditional_stream(make_run, cached, monkeypatch, guided):
    """Smooth L1 of each sample on its own stream, whether or not both are predicted for another loss."""
    loss = {"smooth_l1": 1.0, "kl": 1e-12 * guided}
    module, batch = make_module(make_run(cached), k_horizontal=0, k_vertical=1, loss=loss)
    stream = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    monkeypatch.setattr(module, "_stream", lambda batch: stream)
    hidden = batch["hidden"][torch.arange(8), stream]
    z = module.heads.inputs(hidden[:, :-1], module.output.embed(batch["tokens"][:, :-1]))
    guess = module.heads(Direction.VERTICAL, 1, z)
    expected = torch.nn.functional.smooth_l1_loss(guess, hidden[:, 1:] / 3.7)
    assert module.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-5)


# -- one head's graph at a time -----------------------------------------------------------------------------------


def at_once(function, *args, **kwargs):
    """In place of checkpoint: every graph stays until the backward pass."""
    return function(*args)


def gradients(module, batch):
    module.zero_grad()
    loss = module.training_step(batch, 0)
    loss.backward()
    return loss.item(), {key: parameter.grad.clone() for key, parameter in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("which", LOSSES)
def test_gradients_are_those_of_all_heads_at_once(make_run, cached, monkeypatch, which):
    module, batch = make_module(make_run(cached), **LOSSES[which])
    loss, mine = gradients(module, batch)
    monkeypatch.setattr("ssd_train.training.module.checkpoint", at_once)
    expected, theirs = gradients(module, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    for key, gradient in theirs.items():
        assert torch.allclose(mine[key], gradient, rtol=1e-5, atol=1e-7), key


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("several", [{}, {"loss": {"kl": 0.1}}], ids=["smooth L1", "KL"])  # fmt: skip
def test_memory_is_that_of_one_head(make_run, cached, monkeypatch, several):
    """Beyond the gradients, four heads take hardly more than one."""
    run = make_run(cached)

    def peak(**settings):
        module, batch = make_module(run, samples=54, **settings)
        with Peak() as memory:
            loss = module.training_step(batch, 0)
            loss.backward()
        return memory.bytes - 4 * sum(p.numel() for p in module.parameters())

    one = peak(**(several | {"k_horizontal": 1, "k_vertical": 0}))
    assert peak(**several) < 1.25 * one
    monkeypatch.setattr("ssd_train.training.module.checkpoint", at_once)
    assert peak(**several) > 1.5 * one


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", LOSSES)
def test_the_loss_goes_down(trainable, steps, which):
    overrides = [f"head.loss.{k}={v}" for k, v in LOSSES[which].get("loss", {}).items()]
    overrides += [f"head.{k}={v}" for k, v in LOSSES[which].items() if k != "loss"]
    run = trainable("head.lr=3e-3", "train.epochs=6", *overrides)
    acceptance = stage.run(run)
    losses = [loss for _, _, loss, _ in steps]
    assert len(losses) == 3 * STEPS
    assert sum(losses[-14:]) < 0.95 * sum(losses[:14])
    assert 0 < acceptance <= 1
    assert read_json(run.output / "training.json")["validation"]["validation/acceptance"] == acceptance


def test_no_validation_prompt_is_trained_on(trainable, steps):
    run = trainable()
    stage.run(run)
    prompts = {p.index: p.text for p in run.prompts([Split.TRAIN, Split.VALIDATION], 60)}
    trained = {prompts[index] for _, samples, _, _ in steps for index in samples}
    data = stage.HeadDataModule(run.cache_dir, 60, 4, 0, 0, 0, 64)
    held_out = {prompts[index] for batch in data.val_dataloader() for index in batch["index"].tolist()}
    assert held_out
    assert trained
    assert not trained & held_out
    assert trained | held_out == set(prompts.values())


@pytest.mark.parametrize("head", ["latent", "token"])
def test_validation_acceptance_is_what_a_loop_over_the_grid_finds(trainable, head):
    """The exported heads, one sample and position at a time: sum_v min(p, q), and agreement of the likeliest tokens."""
    run = trainable(f"head={head}", "head.lr=3e-3", "head.min_lr=1e-4", "model.sampling.guidance=2.0")
    stage.run(run)
    export.run(run)
    heads, backbone = load_heads(run.heads_dir, run.backbone), run.backbone
    validation = read_json(run.output / "training.json")["validation"]
    data = stage.HeadDataModule(run.cache_dir, 60, 4, 0, 0, 0, 64)
    output = backbone.output.float()
    means = []
    for direction, offset in heads.spec.offsets():
        dy, dx = (0, offset) if direction is Direction.HORIZONTAL else (offset, 0)
        accepted, agreed = [], []
        for sample in map(StoredSample.load, data.shards.read(Split.VALIDATION)):
            hidden = sample.hidden.view(2, 4, 4, -1)
            for y in range(4 - dy):
                for x in range(4 - dx):
                    embedded = output.embed(sample.tokens[y, x].long())
                    z = torch.stack([heads.inputs(hidden[stream, y, x], embedded) for stream in (0, 1)])
                    c, u = heads.logits(direction, offset, heads(direction, offset, z), output.readout)
                    q = (u + 2 * (c - u)).softmax(-1)
                    c, u = output.readout(hidden[:, y + dy, x + dx])
                    p = (u + 2 * (c - u)).softmax(-1)
                    accepted.append(torch.minimum(p, q).sum())
                    agreed.append(p.argmax() == q.argmax())
        key = name(direction, offset)
        means.append(torch.stack(accepted).mean().item())
        assert validation[f"validation/acceptance/{key}"] == pytest.approx(means[-1], rel=1e-4)
        assert validation[f"validation/top1/{key}"] == pytest.approx(sum(agreed).item() / len(agreed), abs=1e-6)
    assert validation["validation/acceptance"] == pytest.approx(sum(means) / len(means), rel=1e-4)
    loss = {"latent": "smooth_l1", "token": "cross_entropy"}[head]
    assert {key for key in validation if loss in key} == {f"validation/{loss}/{key}" for key in heads.predictors}


@pytest.mark.parametrize("decoder", ["eagle", "lantern"])
def test_chains_go_from_training_to_a_report(trainable, decoder):
    run = trainable("head.k_horizontal=1", "head.k_vertical=0", f"decoder=[ar,{decoder}]", "decode.prompts=2")
    for step in stage, export, decode:
        step.check(run)
        step.run(run)
    report = json.loads((run.output / "decode/report.json").read_text())
    assert report["decoders"][decoder]["passes"] < report["decoders"]["ar"]["passes"]


@pytest.mark.parametrize("value", [0, -1, "abc", 1.5])
def test_an_accumulation_of_no_number_of_batches_is_refused(trainable, value):
    with pytest.raises(ValueError, match=r"train.trainer.accumulate_grad_batches is .*; expected a whole number"):
        stage.check(trainable(f"+train.trainer.accumulate_grad_batches={value}"))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["head.context=3", "head.k_vertical=0"],
            "head.context=3 is for vertical heads, .* head.context=1 or head.k_vertical=1",
        ),
        (["head.space=token", "head.loss.kl=0.1"], "head.loss.kl=0.1, .* with head.space=token, whose only loss is"),
        (["head.space=token", "head.loss.total_variation=1"], "total_variation=1.0 with head.space=token"),
    ],
)
def test_settings_without_a_meaning_are_refused_with_the_reason(make_run, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_run(tmp_path, *overrides)


def test_validation_loss_is_that_of_the_conditional_stream(trainable):
    """Of untrained heads: Smooth L1 between neighbouring states at unit scale."""
    run = trainable("head.lr=1e-12", "head.min_lr=1e-12", "train.epochs=0.1")
    stage.run(run)
    data = stage.HeadDataModule(run.cache_dir, 60, 4, 0, 0, 0, 64)
    scale = read_json(run.output / "training.json")["heads"]["state_scale"]
    states = torch.stack([s.load().hidden[0].view(4, 4, -1) for s in data.shards.read(Split.VALIDATION)]) / scale
    expected = torch.nn.functional.smooth_l1_loss(states[:, :-1], states[:, 1:])
    measured = read_json(run.output / "training.json")["validation"]["validation/smooth_l1/vertical_1"]
    assert measured == pytest.approx(expected.item(), rel=1e-5)


def test_bf16_mixed_trains_float32_heads(trainable):
    run = trainable("train.precision=bf16-mixed")
    exact = trainable(output="exact")
    acceptance = stage.run(run)
    assert acceptance == pytest.approx(stage.run(exact), abs=0.05)
    assert {tensor.dtype for tensor in final_weights(run).values()} == {torch.float32}
    assert not same(final_weights(run), final_weights(exact))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_training_leaves_the_backbone_as_it_was(make_run, tmp_path, dtype):
    """One process caches, trains, exports and decodes, in the backbone's own dtype."""
    from ssd_train.stages import cache

    run = make_run(tmp_path, f"model.backbone.dtype={dtype}", "decoder=[ar,ssd]", "train.epochs=1")
    before = {key: tensor.clone() for key, tensor in run.backbone.state_dict().items()}
    for step in cache, stage, export, decode:
        step.check(run)
        step.run(run)
    assert run.backbone.dtype is getattr(torch, dtype)
    after = run.backbone.state_dict()
    assert {key: t.dtype for key, t in after.items()} == {key: t.dtype for key, t in before.items()}
    assert same(before, after)


def test_a_loss_that_is_nan_stops_with_its_samples_and_a_mend(trainable):
    run = trainable("head.lr=1e30", "head.warmup_steps=0")
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step \d+, samples \[\d+, .*lower head.lr, or"):
        stage.run(run)
    assert read_json(run.output / "training.json") is None


def test_heads_that_the_last_step_broke_are_not_taken_for_trained(trainable):
    """No loss was computed from them."""
    run = trainable("head.lr=1e38", "head.warmup_steps=0", "train.gradient_clip=0", "train.epochs=0.01")
    for _ in range(2):  # nor is their checkpoint
        with pytest.raises(ValueError, match=r"validation/.* of the trained heads is no finite number: .*lower he"):
            stage.run(run)
    assert read_json(run.output / "training.json") is None


def test_progress_has_a_total_a_rate_and_a_time_to_go(trainable, monkeypatch, capsys):
    """Also in a run that goes on from a checkpoint."""
    with monkeypatch.context() as patch:
        kill_at(patch, 17)
        with pytest.raises(Killed):
            stage.run(trainable("train.checkpoint_every=10"))
    assert f"17/{STEPS} [" in capsys.readouterr().out
    stage.run(trainable("train.checkpoint_every=10"))
    last = capsys.readouterr().out.rsplit(f"{STEPS}/{STEPS} [", 1)[1]
    assert "<00:00, " in last
    assert "it/s" in last


# -- the averaged weights -----------------------------------------------------------------------------------------


def test_the_averaged_weights_are_validated_and_exported(trainable, monkeypatch):
    """Against an average kept by hand."""
    history = []

    def note(self, *args):
        history.append({key: tensor.clone() for key, tensor in self.state_dict().items()})

    monkeypatch.setattr(HeadModule, "on_train_batch_end", note)
    run = trainable("head.ema=0.9", "head.lr=3e-3")
    stage.run(run)
    average = history[0]
    for weights in history[1:]:
        average = {key: 0.9 * average[key] + 0.1 * weights[key] for key in weights}
    final = final_weights(run)
    for key, tensor in final.items():
        assert torch.allclose(tensor, average[key], atol=1e-6), key
    assert any(not torch.allclose(tensor, history[-1][key], atol=1e-4) for key, tensor in final.items())

    export.run(run)
    heads = load_heads(run.heads_dir, run.backbone)
    assert same({f"heads.{key}": tensor for key, tensor in heads.state_dict().items()}, final)

    data = stage.HeadDataModule(run.cache_dir, 60, 4, 0, 0, 0, 64)
    batches = list(data.val_dataloader())
    module = HeadModule(heads, run.backbone.output, run.backbone.grid, run.sampling, run.cfg.head, STEPS, 0)
    rates = []
    for batch in batches:
        at = whole_grid(module, batch, Direction.VERTICAL, 1)
        p = guided_probabilities(module.output.readout(at.target), run.sampling)
        predicted = module.predict(at, Direction.VERTICAL, 1)
        q = guided_probabilities(heads.logits(Direction.VERTICAL, 1, predicted, module.output.readout), run.sampling)
        rates.append(torch.minimum(p, q).sum(-1).mean((1, 2)))
    measured = read_json(run.output / "training.json")["validation"]["validation/acceptance/vertical_1"]
    assert measured == pytest.approx(torch.cat(rates).mean().item(), rel=1e-5)


# -- cut off and resumed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.workers=2"],
        ["head.ema=0.9"],
        ["+train.trainer.accumulate_grad_batches=2", "train.epochs=4"],
        ["train.precision=bf16-mixed", "train.validate_every=5"],
        ["head.context=3", "head.loss.kl=0.1"],
        ["head.corrector.width=8", "head.corrector.pairs=32", "train.workers=2", "head.ema=0.9"],
    ],
    ids=["plain", "workers", "ema", "accumulate", "bf16", "guided", "corrector"],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(trainable, monkeypatch, steps, overrides):
    """Dies at step 17, when the last checkpoint is of step 10. Exactly the same batches, losses, learning rates, final
    weights and validation figures."""
    overrides = ["train.checkpoint_every=5", "head.lr=1e-3", *overrides]
    whole = trainable(*overrides, output="whole")
    stage.run(whole)
    expected = steps.copy()
    assert {step for step, *_ in expected} == set(range(STEPS))
    assert len(set(expected)) == len(expected)

    steps.clear()
    with monkeypatch.context() as patch:
        kill_at(patch, 17)
        with pytest.raises(Killed):
            stage.run(trainable(*overrides))
    assert steps == [step for step in expected if step[0] < 17]
    steps.clear()
    resumed = trainable(*overrides)
    stage.run(resumed)
    assert steps == [step for step in expected if step[0] >= 15]
    assert same(final_weights(resumed), final_weights(whole))
    assert read_json(resumed.output / "training.json") == read_json(whole.output / "training.json")


@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_dying_between_the_last_step_and_the_summary_costs_nothing(trainable, monkeypatch, steps, ema):
    overrides = [f"head.ema={ema}", "train.checkpoint_every=9"]
    whole = trainable(*overrides, output="whole")
    stage.run(whole)
    with monkeypatch.context() as patch:
        patch.setattr(stage.L.Trainer, "save_checkpoint", killing(stage.L.Trainer.save_checkpoint, at=3))
        with pytest.raises(Killed):
            stage.run(trainable(*overrides))
    steps.clear()
    resumed = trainable(*overrides)
    stage.run(resumed)
    assert steps == []
    assert same(final_weights(resumed), final_weights(whole))
    assert read_json(resumed.output / "training.json") == read_json(whole.output / "training.json")


def killing(original, at):
    """``original``, but the process dies before the call after the ``at``-th."""
    calls = iter(range(at))

    def call(*args, **kwargs):
        if next(calls, None) is None:
            raise Killed
        return original(*args, **kwargs)

    return call


@pytest.mark.slow
def test_sigkill_costs_at_most_the_steps_since_the_last_checkpoint(settings, trainable, cached, tmp_path):
    """A real process, killed when its first checkpoint is there; another one goes on to the same weights."""
    longer = ["train.epochs=20", "train.checkpoint_every=10"]
    whole = trainable(*longer, output="whole")
    stage.run(whole)
    run = trainable(*longer)
    places = [f"cache.dir={cached}/cache", f"output={run.output}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ssd_train", *settings(tmp_path, *places, *longer, "stages=[train]")],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not run.checkpoint.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert read_json(run.output / "training.json") is None
    reached = torch.load(run.checkpoint, weights_only=True)["global_step"]
    assert 10 <= reached < 10 * STEPS
    stage.run(run)
    assert same(final_weights(run), final_weights(whole))


def altered(change):
    """Writes the checkpoint again, as a whole zip, with something else in it."""

    def damage(path):
        content = torch.load(path, weights_only=True)
        torch.save(change(content), path)

    return damage


def flip(path):
    """A bit in the middle of a tensor's data."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        largest = max(file.infolist(), key=lambda info: info.file_size)
    content[largest.header_offset + largest.file_size // 2 + 200] ^= 16
    path.write_bytes(content)


CHECKPOINT_DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "bit": flip,
    "list": altered(list),
    "no processes": altered(lambda content: {k: v for k, v in content.items() if k != "processes"}),
    "other training": altered(lambda content: content | {"training": "0123456789abcdef"}),
}


@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGES.values(), ids=CHECKPOINT_DAMAGES.keys())
def test_a_damaged_checkpoint_is_neither_resumed_from_nor_exported(trainable, monkeypatch, steps, caplog, damage):
    run = trainable()
    stage.run(run)
    damage(run.checkpoint)
    with pytest.raises(HeadsError, match=r"\.ckpt is no whole checkpoint of this training .*run the train stage again"):
        export.run(run)
    steps.clear()
    stage.run(run)
    assert "ckpt is no whole checkpoint of this training" in caplog.text
    assert "training starts again, and replaces it" in caplog.text
    assert [step for step, *_ in steps] == list(range(STEPS))


def test_a_damaged_summary_is_made_again_from_the_checkpoint(trainable, steps, caplog):
    run = trainable()
    stage.run(run)
    good = (run.output / "training.json").read_text()
    steps.clear()
    for bad in "", "[]", good.replace("0.", "1."):
        (run.output / "training.json").write_text(bad)
        with pytest.raises(HeadsError, match=r"training.json .*; run the train stage again"):
            export.check(trainable("stages=[export]"))
        stage.run(run)
        assert read_json(run.output / "training.json")["steps"] == STEPS
        assert (run.output / "training.json").read_text() == good
    assert not steps, "nothing is trained again"
    assert "training.json is damaged" in caplog.text


def test_a_checkpoint_that_cannot_be_written_is_said(tmp_path):
    """Not torch's "unexpected pos 64 vs 0". The kernel refuses to write so many bytes, as on a full disk."""
    path, (soft, hard) = tmp_path / "0123.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    Checkpoints().save_checkpoint({"a": 1}, path)
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/0123.ckpt'"):
            Checkpoints().save_checkpoint({"a": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == ["0123.ckpt"]
    assert path.read_bytes() == before


def test_a_trainer_that_stops_early_has_not_finished(trainable):
    run = trainable("+train.trainer.max_time='00:00:00:00'")
    with pytest.raises(RuntimeError, match=rf"training stopped at step \d+ of {STEPS}; run the same command to go on"):
        stage.run(run)
    assert read_json(run.output / "training.json") is None


# -- done, and not done -------------------------------------------------------------------------------------------


def test_a_finished_training_is_not_repeated(trainable, steps, caplog):
    acceptance = stage.run(trainable())
    count, written = len(steps), trainable().checkpoint.stat().st_mtime_ns
    with caplog.at_level(logging.INFO):
        other = "train.checkpoint_every=3", "train.validate_every=9", "train.strategy=fsdp", "decode.prompts=2"
        again = stage.run(trainable(*other))
    assert again == acceptance
    assert "are trained already" in caplog.text
    assert len(steps) == count
    assert trainable().checkpoint.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "override", ["head.k_vertical=1", "head.lr=2e-4", "train.epochs=1", "cache.samples=55", "head.ema=0.5", "seed=1"]
)
def test_other_settings_are_another_training(trainable, override):
    assert trainable(override).train_fingerprint != trainable().train_fingerprint


def test_changed_heads_are_trained_anew(trainable, steps):
    stage.run(trainable())
    first = final_weights(trainable())
    steps.clear()
    run = trainable("head.k_vertical=1")
    stage.run(run)
    assert [step for step, *_ in steps] == list(range(STEPS))
    assert len(final_weights(run)) < len(first)
    assert read_json(run.output / "training.json")["heads"]["k_vertical"] == 1


def test_a_checkpoint_of_other_settings_is_not_resumed(trainable, monkeypatch, steps):
    with monkeypatch.context() as patch:
        kill_at(patch, 17)
        with pytest.raises(Killed):
            stage.run(trainable("train.checkpoint_every=5"))
    steps.clear()
    stage.run(trainable("head.lr=2e-4"))
    assert steps[0][0] == 0


def test_a_lost_checkpoint_is_trained_again(trainable, steps):
    """Else the export would ask for training, and training say that it is done."""
    stage.run(trainable())
    trainable().checkpoint.unlink()
    steps.clear()
    stage.run(trainable())
    assert len(steps) == STEPS


def test_another_backbones_cache_is_not_trained_on(trainable):
    with pytest.raises(CacheError, match=r"sampling: cache {'guidance': 2.0.* this run {'guidance': 3.0"):
        stage.run(trainable("model.sampling.guidance=3.0"))


def test_a_cache_that_is_not_there_is_asked_for(make_run, tmp_path):
    with pytest.raises(CacheError, match=r"there is no cache in .*; run the cache stage first"):
        stage.run(make_run(tmp_path))


def test_the_same_training_twice_gives_the_same_weights(trainable):
    for output in "a", "b":
        stage.run(trainable(output=output))
    assert same(final_weights(trainable(output="a")), final_weights(trainable(output="b")))


def test_metrics_are_logged_by_head(trainable, caplog):
    run = trainable("train.validate_every=10")
    with caplog.at_level(logging.INFO):
        acceptance = stage.run(run)
    assert f"acceptance on validation prompts {acceptance:.3f}: horizontal_1 0." in caplog.text
    lines = (run.output / "csv/version_0/metrics.csv").read_text().splitlines()
    columns = set(lines[0].split(","))
    assert {"train/loss", "train/smooth_l1", "validation/acceptance"} <= columns
    for head in "horizontal_1", "horizontal_2", "vertical_1", "vertical_2":
        assert {f"validation/{figure}/{head}" for figure in ("acceptance", "top1", "smooth_l1")} <= columns
    position = lines[0].split(",").index("validation/acceptance")
    assert sum(bool(line.split(",")[position]) for line in lines[1:]) == 3, "steps 10, 20, and the end"
    assert json.loads((run.output / "training.json").read_text())["steps"] == STEPS


def test_validation_comes_by_steps_whatever_a_step_accumulates(trainable):
    run = trainable("train.validate_every=5", "+train.trainer.accumulate_grad_batches=2")
    stage.run(run)
    header, *rows = csv.reader((run.output / "csv/version_0/metrics.csv").read_text().splitlines())
    at = [row[header.index("step")] for row in rows if row[header.index("validation/acceptance")]]
    assert at == ["4", "9", "14"], "of 14 steps; the last is after them"


@pytest.fixture(autouse=True)
def leave_no_outputs(tmp_path):
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_without_guidance_heads_train_on_one_stream(make_run, tmp_path):
    run = make_run(tmp_path, "model.sampling.guidance=1.0", "cache.samples=20", "train.epochs=1", "head.loss.kl=0.1")
    cache.run(run)
    assert 0 < stage.run(run) <= 1
