"""Several processes on one machine, and signals: what they make together is what one makes alone."""

import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ssd_train.processes import signals
from ssd_train.processes.world import World
from ssd_train.stages import cache

ROOT = Path(__file__).parents[2]


# -- who am I -----------------------------------------------------------------------------------------------------


def test_alone():
    assert World.of({}) == World(0, 1, 0, 1)


def test_under_torchrun():
    names = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    world = World.of(names | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert world == World(5, 8, 1, 4)
    assert world.nodes == 2


@pytest.mark.parametrize(("per_node", "local_size"), [("4(x2)", 4), ("8", 8), ("1(x8)", 1)])
def test_under_srun(per_node, local_size):
    names = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}
    assert World.of(names | {"SLURM_STEP_TASKS_PER_NODE": per_node}) == World(5, 8, 1, local_size)


def test_a_batch_script_s_own_process_is_alone():
    assert World.of({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) == World()


@pytest.mark.parametrize("per_node", ["4,3", "4(x2),1", "3"])
def test_uneven_nodes_are_refused(per_node):
    names = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "7"}
    with pytest.raises(ValueError, match="use --ntasks-per-node"):
        World.of(names | {"SLURM_STEP_TASKS_PER_NODE": per_node})


# -- real processes -----------------------------------------------------------------------------------------------


def command(arguments, rank=0, size=1, port=0):
    """(argv, environment) of one process of several."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if size > 1:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        environment |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [sys.executable, "-m", "ssd_train", *arguments], environment


@pytest.fixture
def launch(tmp_path):
    """(arguments, number of processes) -> the processes, which are gone after the test."""
    started = []

    def start(arguments, size=1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(size):
            argv, environment = command(arguments, rank, size, port)
            processes.append(
                subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        started.extend(processes)
        return processes

    yield start
    for process in started:
        process.kill()
        process.wait()


def finish(processes, status=0):
    """What each printed. They must end with this status."""
    printed = [process.communicate(timeout=300)[0].decode() for process in processes]
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == status, text[-4000:]
    return printed


def shards(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.suffix in (".tar", ".json")}


def losses(output):
    """{step: loss} of every version of the csv log; of a step that was logged twice, the last."""
    found = {}
    for path in sorted(Path(output).glob("csv/version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        for row in csv.DictReader(path.read_text().splitlines()):
            if row.get("train/loss"):
                found[int(row["step"])] = float(row["train/loss"])
    return found


def test_two_processes_run_every_stage(settings, launch, tmp_path):
    """Shards and images are those that one process makes; heads are trained together and exported once."""
    (tmp_path / "bright.py").write_text("def score(images, captions):\n    return images.mean((1, 2, 3)) > 128\n")
    decoders = ["decoder=[ar,ssd]", "decode.prompts=6", "decode.batch_size=2", "train.epochs=1"]
    decoders.append("++model.scorer={_target_: bright.score, _partial_: true}")
    finish(launch(settings(tmp_path / "alone", *decoders)))
    together = tmp_path / "together"
    first, second = finish(launch(settings(together, *decoders), size=2))
    assert "report in" in first
    assert "report in" not in second
    assert shards(together / "cache") == shards(tmp_path / "alone" / "cache")
    read = safetensors.torch.load_file
    images = [read(tmp_path / where / "run/decode/tokens/ar.safetensors")["tokens"] for where in ("alone", "together")]
    assert torch.equal(*images)
    training = [json.loads((tmp_path / where / "run/training.json").read_text()) for where in ("alone", "together")]
    assert training[0]["steps"] == 14  # 54 samples, 4 a batch
    assert training[1]["steps"] == 7  # 8 a step
    # With the heads of the one, both measure the same.
    decode = ["stages=[decode]", f"decode.heads={tmp_path}/alone/run/heads", *decoders]
    finish(launch(settings(together, f"output={together}/again", *decode), size=2))
    outputs = tmp_path / "alone/run", together / "again"
    reports = [json.loads((path / "decode/report.json").read_text()) for path in outputs]
    for name in "ar", "ssd":
        one, other = (report["decoders"][name] for report in reports)
        for figure in "passes", "nll", "acceptance", "code_entropy", "texture", "scene_score":
            assert one[figure] == other[figure] is not None


def test_decoding_goes_on_where_it_was_cut_off(settings, launch, tmp_path):
    arguments = settings(tmp_path, "stages=[decode]", "decode.prompts=60", "decode.batch_size=2")
    (process,) = launch(arguments)
    parts = tmp_path / "run/parts"
    wait_for(lambda: len(list(parts.glob("*/*.safetensors"))) >= 3, process)
    process.send_signal(signal.SIGTERM)
    finish([process], signals.AGAIN)
    before = {path: path.stat().st_mtime_ns for path in parts.glob("*/*.safetensors")}
    assert 3 <= len(before) < 30
    finish(launch(arguments))
    after = {path: path.stat().st_mtime_ns for path in parts.glob("*/*.safetensors")}
    assert len(after) == 30
    assert before.items() <= after.items()


def test_an_error_in_training_ends_the_process_and_its_loader_s_worker(settings, cached, launch, tmp_path):
    """The worker must not outlive it, nor be waited for in vain."""
    arguments = settings(tmp_path, "stages=[train]", "train.epochs=400", "train.workers=1", f"cache.dir={cached}/cache")
    processes = launch(arguments)
    logs = tmp_path / "run/csv"
    wait_for(lambda: any(path.stat().st_size for path in logs.glob("*/metrics.csv")), *processes)
    shutil.rmtree(logs)
    (printed,) = finish(processes, 1)
    assert "FileNotFoundError: " in printed


def wait_for(condition, *processes):
    deadline = time.monotonic() + 240
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[0].decode()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_stops_training_and_the_same_command_goes_on(settings, cached, launch, tmp_path, number, size):
    """In the middle of an epoch, and only one of the processes gets it. The losses are the uninterrupted run's."""
    long = ["train.epochs=40", "head.lr=1e-3", "stages=[train]", "train.checkpoint_every=100000"]
    long += [f"cache.dir={cached}/cache", "++train.trainer.log_every_n_steps=1", "train.workers=1"]
    whole, cut = ([*settings(tmp_path / name, *long, f"output={tmp_path}/{name}")] for name in ("whole", "cut"))
    if number == signal.SIGUSR1:
        finish(launch(whole, size))
    processes = launch(cut, size)
    wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "cut").glob("csv/*/metrics.csv")), *processes)
    processes[-1].send_signal(number)
    printed = finish(processes, signals.AGAIN)
    assert "run the same command to go on" in printed[0]
    steps = 40 * 54 // 4 // size
    stopped = max(losses(tmp_path / "cut"))
    assert 0 < stopped < steps - 1
    if number == signal.SIGUSR1:
        finish(launch(cut, size))
        assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
        assert sorted(losses(tmp_path / "whole")) == list(range(steps))


@pytest.mark.slow
def test_a_cache_survives_sigkill(settings, make_run, launch, tmp_path):
    """By 1, 2 and 3 processes, killed twice with some shards made and some half-made: the same bytes as one that is
    left alone makes."""
    size = ["stages=[cache]", "cache.samples=600", "cache.shard_size=20", "cache.batch_size=20"]
    cache.run(make_run(tmp_path / "alone", *size))
    expected = shards(tmp_path / "alone/cache")
    assert sum(len(json.loads(content)["samples"]) for name, content in expected.items() if name[:5].isdigit()
               and name.endswith("json")) == 600  # fmt: skip
    moment = random.Random(0)
    for processes in 1, 2, 3:
        directory = tmp_path / f"{processes}"
        for _ in range(2):
            running = launch(settings(directory, *size), processes)
            there = len(list(directory.glob("cache/*.tar")))
            aim = there + moment.randint(2, 6)
            wait_for(lambda: len(list(directory.glob("cache/*.tar"))) >= aim, *running)  # noqa: B023
            time.sleep(moment.uniform(0, 0.1))
            for process in running:
                process.kill()
                process.wait()
        assert len(list(directory.glob("cache/*.tar"))) < 30
        finish(launch(settings(directory, *size), processes))
        assert shards(directory / "cache") == expected
