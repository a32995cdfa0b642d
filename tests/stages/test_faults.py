"""What can go wrong around a run: each fault ends in one clear error or is recovered from, and nothing valid is lost.

Those of a single module are tried where that module is tested:

    disk full while writing a shard           test_shards.py, test_cache_stage.py
    shard cut short, bit flipped, or gone     test_shards.py, test_cache_stage.py, test_datamodule.py
    cache or shard of another backbone        test_cache_stage.py, test_shards.py
    transfer of a shard that breaks off       test_shards.py
    NaN in a state, NaN loss                  test_shards.py, test_cache_stage.py, test_train_stage.py
    checkpoint damaged                        test_train_stage.py
    any bit of any file                       test_damage.py
    process killed                            test_files.py, test_cache_stage.py, test_train_stage.py, test_world.py
    two jobs writing one cache                test_cache_stage.py
    typo, bad value, CUDA absent              test_config.py
    export damaged                            test_export.py

Here is what takes several of them.
"""

import errno
import multiprocessing
import os
import shutil
import signal
import tarfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from disk import full_for

from ssd_train.cache.shards import CacheError, ShardCache
from ssd_train.heads import export as heads_export
from ssd_train.heads.export import load_heads
from ssd_train.processes.files import read_json
from ssd_train.prompts import Split
from ssd_train.stages import export, train
from ssd_train.training.datamodule import Shards, TrainingStream
from ssd_train.training.module import HeadModule

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{noise}")
    for noise in ("exists and is not empty", "does not have many workers", "LeafSpec", "Cannot dispatch to fused")
]


class Killed(BaseException):
    """Not caught by anything that handles errors."""


@pytest.fixture
def trainable(make_run, cached, tmp_path):
    """overrides -> a Run on the shared cache, with an output of its own."""

    def build(*overrides, output="run"):
        places = [f"cache.dir={cached}/cache", f"output={tmp_path}/{output}"]
        return make_run(tmp_path, *places, "train.epochs=2", "train.checkpoint_every=5", *overrides)

    return build


@pytest.fixture
def steps(monkeypatch):
    """Records the number of every training step from now on."""
    seen, original = [], HeadModule.training_step

    def recording(self, batch, batch_idx):
        seen.append(self.global_step)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(HeadModule, "training_step", recording)
    return seen


def weights(run):
    return torch.load(run.checkpoint, weights_only=True)["state_dict"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# -- while training -----------------------------------------------------------------------------------------------


def test_a_loader_worker_that_is_killed_ends_training_and_the_next_run_goes_on(trainable, steps, monkeypatch):
    """By SIGKILL, as the kernel does when memory runs out."""
    whole = trainable("train.workers=1", output="whole")
    train.run(whole)
    count = len(steps)
    steps.clear()
    others = set(multiprocessing.active_children())  # the death of these would be reported too, at any time

    def kill_at_12(self, *_):
        if self.global_step == 12:
            for worker in set(multiprocessing.active_children()) - others:
                os.kill(worker.pid, signal.SIGKILL)

    run = trainable("train.workers=1")
    with monkeypatch.context() as patch:
        patch.setattr(HeadModule, "on_train_batch_start", kill_at_12)
        with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited)") as caught:
            train.run(run)
    assert "train.workers" in str(caught.value)
    assert "run the same command to go on" in str(caught.value)
    assert read_json(run.output / "training.json") is None
    steps.clear()
    train.run(trainable("train.workers=1"))
    assert steps[0] in (10, 15)
    assert steps[-1] == count - 1
    assert same(weights(run), weights(whole))


@pytest.mark.parametrize("error, message", [
    (ConnectionResetError("reset"), "A DataLoader worker exited unexpectedly .reset.. .*train.workers=1; run"),
    (EOFError(), "A DataLoader worker exited unexpectedly .*run the same command"),
    (ConnectionError("Caught ConnectionError in DataLoader worker process 0"), "^Caught"),
    (RuntimeError("Caught RuntimeError in DataLoader worker process 0"), "^Caught"),
    (RuntimeError("another"), "^another$"),
])  # fmt: skip
def test_only_a_dead_loader_worker_is_said_to_be_one(error, message):
    """However its death shows: torch sees it, or the connection to it breaks in the middle of a batch."""
    fit = Mock(side_effect=error)
    with pytest.raises(Exception, match=message):
        train._fit(SimpleNamespace(fit=fit), None, SimpleNamespace(workers=1), None)


@pytest.mark.parametrize("fault", ["killed", "full"])
def test_a_checkpoint_is_replaced_by_a_whole_one_or_not_at_all(trainable, steps, monkeypatch, fault):
    """The process dies, or the disk fills up, with half of the third checkpoint written: the second is still there."""
    whole = trainable(output="whole")
    train.run(whole)
    steps.clear()
    save, calls = torch.save, iter(range(100))

    def failing(content, file, *args, **kwargs):
        if next(calls) < 2:
            return save(content, file, *args, **kwargs)
        assert Path(file.name).parent == run.checkpoint.parent, "or it could not just be renamed"
        assert Path(file.name) != run.checkpoint
        file.write(b"half a checkpoint")
        raise Killed if fault == "killed" else OSError(errno.ENOSPC, "No space left on device")

    run = trainable()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", failing)
        with pytest.raises(Killed if fault == "killed" else OSError) as caught:
            train.run(run)
    if fault == "full":
        assert str(run.checkpoint) in str(caught.value)
    assert [path.name for path in run.checkpoint.parent.iterdir()] == [run.checkpoint.name]
    steps.clear()
    train.run(trainable())
    assert steps[0] == 10
    assert same(weights(run), weights(whole))


def copied(cached, tmp_path):
    shutil.copytree(cached / "cache", tmp_path / "cache")
    return ShardCache(tmp_path / "cache")


def test_a_shard_cut_between_two_samples_is_refused_in_training(cached, make_run, tmp_path):
    """It looks like a whole, shorter tar; a cache stage without cache.verify would see its size, but has not run."""
    cache = copied(cached, tmp_path)
    with tarfile.open(cache.path(1)) as tar:
        offset = tar.getmembers()[10].offset
    cache.path(1).write_bytes(cache.path(1).read_bytes()[:offset])
    with tarfile.open(cache.path(1)) as tar:
        assert len(tar.getmembers()) == 10
    run = make_run(tmp_path)
    with pytest.raises(CacheError, match=r"00001.tar ends after 5 samples, and should hold 20; re-run the cache stage"):
        train.run(run)
    assert read_json(run.output / "training.json") is None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size, what", [(0, "empty file"), (1500, "unexpected end of data"), (None, "No such file")])
def test_a_shard_that_cannot_be_read_is_named_in_one_line(cached, tmp_path, size, what, workers):
    """Also if a worker of the loader finds it, where torch makes a traceback of the message."""
    cache = copied(cached, tmp_path)
    data = train.HeadDataModule(cache.directory, 60, 4, 0, workers, 0, 1)
    if size is None:
        cache.path(2).unlink()
    else:
        os.truncate(cache.path(2), size)

    def fit(*_, **__):
        loader = torch.utils.data.DataLoader(TrainingStream(data.shards, 4, 0, 0), batch_size=None, num_workers=workers)
        for _ in islice(loader, 20):
            pass

    with pytest.raises(CacheError) as caught:
        train._fit(SimpleNamespace(fit=fit), None, data, None)
    message = str(caught.value)
    assert message.startswith("a shard cannot be read (")
    assert message.endswith("); re-run the cache stage to mend it")
    assert what in message
    assert "00002.tar" in message
    assert "\n" not in message


def test_a_shard_of_another_backbone_is_refused_in_training(cached, make_run, tmp_path):
    """Whole, of the same prompts, and copied here after the cache stage."""
    cache = copied(cached, tmp_path)
    run = make_run(tmp_path)
    samples = [stored.load() for split in Split for stored in Shards([cache.path(1)], 10**6).read(split)]
    cache.write(1, [replace(sample, backbone="0123456789abcdef") for sample in samples])
    with pytest.raises(CacheError, match=r"00001.tar holds states of backbone 0123456789abcdef; expected \w{16}"):
        train.run(run)


# -- while exporting ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(make_run, cached, tmp_path_factory):
    """A finished training and its export."""
    output = tmp_path_factory.mktemp("trained") / "run"
    run = make_run(cached, f"output={output}", "train.epochs=1")
    train.run(run)
    export.run(run)
    return output


@pytest.fixture
def unexported(trained, make_run, cached, tmp_path):
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("heads"))
    return make_run(cached, f"output={tmp_path}/run", "train.epochs=1")


@pytest.mark.parametrize("write", range(3))
def test_an_export_interrupted_anywhere_is_made_good_by_the_next_run(trained, unexported, monkeypatch, write):
    """Before its first, second or third file. Until then there are no heads, rather than half of them."""
    run = unexported
    original, calls = os.replace, iter(range(100))

    def dying(*names):
        if next(calls) == write:
            raise Killed
        original(*names)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Killed):
            export.run(run)
    assert not (run.heads_dir / "config.json").exists()
    export.run(run)
    for name in heads_export.FILES:
        assert (run.heads_dir / name).read_bytes() == (trained / "heads" / name).read_bytes()
    load_heads(run.heads_dir, run.backbone)


@pytest.mark.parametrize("name", heads_export.FILES)
def test_a_disk_that_fills_up_during_an_export_is_named_and_the_next_run_goes_on(unexported, name):
    run = unexported
    with full_for(name), pytest.raises(OSError, match=rf"No space left on device; free some space .*{name}"):
        export.run(run)
    assert not (run.heads_dir / "config.json").exists()
    export.run(run)
    load_heads(run.heads_dir, run.backbone)
