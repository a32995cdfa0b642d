"""The benchmark of the loader: what it says of a loader whose slowness is known, and its command line."""

import re
import sys
import time

import pytest

from ssd_train import loader_benchmark as benchmark
from ssd_train.training import datamodule

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{noise}") for noise in ("does not have many workers", "LeafSpec", "srun")
]


def test_a_slow_loader_shows_as_waiting(make_run, cached, tmp_path, monkeypatch):
    """Each batch takes it at least 0.2 seconds: training waits for no less, and nothing is faster than that."""
    collate = datamodule.collate

    def slow(samples):
        time.sleep(0.2)
        return collate(samples)

    run = make_run(tmp_path)
    data = datamodule.HeadDataModule(cached / "cache", 60, 4, 8, 0, 0, 4)
    monkeypatch.setattr(datamodule, "collate", slow)
    rate, wait = benchmark.training(run, data, 3)
    seconds_a_batch = 4 / rate
    assert 0.2 <= wait * seconds_a_batch <= seconds_a_batch
    assert benchmark.loading(data, 3) <= 4 / 0.2


def test_the_command_line_says_what_was_measured(settings, cached, tmp_path, monkeypatch, capsys):
    command = settings(tmp_path, f"cache.dir={cached}/cache", "train.workers=1")
    monkeypatch.setattr(sys, "argv", ["loader_benchmark", *command, "--steps", "3"])
    benchmark.main()
    found = re.search(
        r"micro: train.batch_size=4 train.workers=1 train.shuffle_buffer=8, 3 steps: training takes ([\d.]+) samples/s "
        r"and waits for the loader ([\d.]+)% of the time; the loader alone gives ([\d.]+) samples/s",
        capsys.readouterr().out,
    )
    rate, wait, alone = map(float, found.groups())
    assert rate > 0
    assert 0 <= wait <= 100
    assert alone > 0
    assert not (tmp_path / "run").exists()
