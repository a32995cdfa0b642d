"""train.strategy=fsdp by two processes: what DDP trains, though each process holds half of every head.

This file is also the program of the two processes. All trainings are in one pair: starting one takes longest.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ssd_train import config
from ssd_train.heads.export import load_heads
from ssd_train.processes import signals
from ssd_train.stages import export
from ssd_train.stages import train as stage

VARIANTS = {  # every kind of head and loss
    "latent": ["head.ema=0.9"],
    "token": ["head=token", "head.corrector=null"],
    "guided": ["head.context=3", "head.loss.kl=0.1", "head.corrector=null"],
}
CLIP = 0.01  # of the gradients' norm, which is always more
CORRECTOR = ["head.corrector.width=8", "head.corrector.pairs=16"]
SETTINGS = ["train.epochs=1", "head.lr=1e-3", f"train.gradient_clip={CLIP}", *CORRECTOR]
CUT = 3  # the step at which trainings are cut off

pytestmark = pytest.mark.slow


def work(settings: list[str], directory: Path) -> None:
    """One of the two processes: trains all there is to compare, and writes down each loss, and how much it held."""
    from hydra import compose, initialize_config_dir

    from ssd_train.processes.world import World
    from ssd_train.runs.run import Run
    from ssd_train.training.module import HeadModule

    config.register()
    world = World.of(os.environ)
    seen = {"losses": defaultdict(dict), "norms": defaultdict(list), "gathered": defaultdict(int), "held": {}}
    name, stop = "", False
    losses, step = HeadModule.losses, HeadModule.training_step

    def note_losses(self, *args):
        whole = sum(not isinstance(next(head.parameters()), DTensor) for head in self.heads.predictors.values())
        seen["gathered"][name] = max(seen["gathered"][name], whole)
        return losses(self, *args)

    def note_step(self, batch, batch_idx):
        if stop and self.global_step == CUT and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        parts = [getattr(parameter, "to_local", lambda p=parameter: p)().numel() for parameter in self.parameters()]
        seen["held"][name] = sum(parts)
        loss = step(self, batch, batch_idx)
        seen["losses"][name][self.global_step] = loss.item()
        return loss

    def note_norm(self, _):
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        whole = [getattr(gradient, "full_tensor", lambda g=gradient: g)() for gradient in gradients]
        seen["norms"][name] += [torch.cat([g.flatten() for g in whole]).norm().item()] if whole else []

    HeadModule.losses, HeadModule.training_step, HeadModule.on_before_zero_grad = note_losses, note_step, note_norm

    def train(strategy, *overrides):
        cfg = compose("config", [*settings, f"output={directory}/{name}", f"train.strategy={strategy}", *overrides])
        run = Run(cfg, world)
        run.meet()
        stage.run(run)

    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        for variant, overrides in VARIANTS.items():
            for strategy in "ddp", "fsdp":
                name = f"{variant}-{strategy}"
                train(strategy, *overrides)
        for before, after in ("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp"):
            name, stop = f"{before}-{after}", True
            try:
                train(before, *VARIANTS["latent"])
            except signals.Stopped:
                signals._received = stop = False
            train(after, *VARIANTS["latent"])
    (directory / f"{world.rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def trained(settings, cached, tmp_path_factory):
    """(folder of all outputs, what each process has seen)."""
    directory = tmp_path_factory.mktemp("fsdp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = [f"cache.dir={cached}/cache", "stages=[train]", *SETTINGS]
    environment = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(directory), *settings(directory, *places)], cwd=directory,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        for process in processes:
            printed = process.communicate(timeout=300)[0].decode()
            assert process.returncode == 0, printed[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return directory, [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_figures_are_those_of_ddp(trained, variant):
    directory, processes = trained
    for seen in processes:
        one, other = (seen["losses"][f"{variant}-{strategy}"] for strategy in ("ddp", "fsdp"))
        assert len(one) == 7
        assert other == pytest.approx(one, rel=1e-5)
    one, other = (
        json.loads((directory / f"{variant}-{strategy}/training.json").read_text()) for strategy in ("ddp", "fsdp")
    )
    assert other["validation"] == pytest.approx(one["validation"], rel=1e-4)
    assert {key: other[key] for key in other if key != "validation"} == {k: one[k] for k in one if k != "validation"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_norm_that_is_clipped_is_that_of_whole_gradients(trained, variant, strategy):
    for seen in trained[1]:
        assert seen["norms"][f"{variant}-{strategy}"] == pytest.approx([CLIP] * 6, rel=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_process_holds_half_of_every_head_and_gathers_one_at_a_time(trained, variant):
    """When a head's losses are computed, and again in the backward pass, no other head is whole; with DDP all four
    are."""
    held = [[seen["held"][f"{variant}-{strategy}"] for seen in trained[1]] for strategy in ("ddp", "fsdp")]
    assert held[0][0] == held[0][1] == sum(held[1])
    assert held[1][0] == pytest.approx(held[1][1], rel=0.01)
    for seen in trained[1]:
        assert seen["gathered"][f"{variant}-ddp"] == 4
        assert seen["gathered"][f"{variant}-fsdp"] == 0


@pytest.mark.parametrize("name", ["fsdp-fsdp", "ddp-fsdp", "fsdp-ddp"])
def test_a_training_that_is_cut_off_goes_on_to_the_same_losses_by_either(trained, name):
    """Stopped by SIGTERM, with averaged weights. A checkpoint of the one is one of the other."""
    directory, processes = trained
    for seen in processes:
        assert seen["losses"][name] == pytest.approx(seen["losses"]["latent-fsdp"], rel=1e-5)
    weights, whole = (
        torch.load(next((directory / which / "checkpoints").iterdir()), weights_only=True)
        for which in (name, "latent-fsdp")
    )
    for key in "state_dict", "current_model_state":
        assert weights[key].keys() == whole[key].keys()
        for tensor in weights[key]:
            assert torch.allclose(weights[key][tensor], whole[key][tensor], atol=1e-6), tensor


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_export_loads_and_is_that_of_ddp(trained, make_run, cached, variant):
    exported = []
    for strategy in "ddp", "fsdp":
        places = [f"cache.dir={cached}/cache", f"output={trained[0]}/{variant}-{strategy}"]
        run = make_run(cached, *places, *SETTINGS, *VARIANTS[variant])
        export.run(run)
        exported.append(load_heads(run.heads_dir, run.backbone).state_dict())
    assert exported[0].keys() == exported[1].keys()
    for key, tensor in exported[0].items():
        assert torch.allclose(exported[1][key], tensor, atol=1e-5), key
    assert any(tensor.abs().max() > 1e-4 for key, tensor in exported[0].items() if key.endswith("w2.weight"))


if __name__ == "__main__":
    work(sys.argv[2:], Path(sys.argv[1]))
