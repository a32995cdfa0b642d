"""Sweeps: a failed job does not end the others, and what is known of all of them ends up in one summary."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from PIL import Image

from ssd_train import config
from ssd_train.runs import sweep

config.register()
ROOT = Path(__file__).parents[2]


# -- the summary --------------------------------------------------------------------------------------------------


@pytest.fixture
def make_job(tmp_path):
    """Writes a job's folder: its record, and what its stages would leave."""

    def make(name, overrides, status="completed", acceptance=None, decoders=None, drafted_by="f", **record):
        directory = tmp_path / name
        (directory / "decode").mkdir(parents=True)
        job = {"sweep": 1.0, "overrides": overrides, "status": status, "error": None} | record
        (directory / "job.json").write_text(json.dumps(job))
        if acceptance is not None:
            metrics = {"validation/acceptance": acceptance, "validation/acceptance/vertical_1": acceptance + 0.1,
                       "validation/top1/vertical_1": 0.9}  # fmt: skip
            (directory / "training.json").write_text(json.dumps({"fingerprint": "f", "validation": metrics}))
        if decoders is not None:
            report = {"heads": {"training": {"fingerprint": drafted_by}}, "decoders": decoders}
            (directory / "decode" / "report.json").write_text(json.dumps(report))

    return make


def entry(**changed):
    """A decoder in report.json."""
    score = {"value": 0.25, "low": 0.2, "high": 0.3}
    figures = {"passes": 52.0, "step_speedup": 4.92, "scene_score": score, "nll": 3.3, "wall_seconds": 1.0}
    return figures | changed


def test_the_best_job_comes_first_and_a_failed_one_says_why(make_job, tmp_path):
    common = {"model": "tiny"}
    make_job("low", common | {"head.lr": "1e-4"}, acceptance=0.3)
    decoders = {"ar": entry(scene_score=None), "ssd": entry()}
    make_job("high", common | {"head.lr": "1e-3"}, acceptance=0.4, decoders=decoders)
    make_job("bad", common | {"head.lr": "1"}, status="failed", error="ValueError: lr | is 1", acceptance=0.9)
    make_job("cut", common | {"head.lr": "2"}, status="unfinished", decoders={"ar": entry()})
    jobs = sweep.write_summary(tmp_path)
    assert jobs == json.loads((tmp_path / "sweep.json").read_text())
    assert [job["job"] for job in jobs] == ["high", "low", "bad", "cut"]
    assert [job["acceptance"] for job in jobs] == [0.4, 0.3, None, None]
    assert jobs[0]["by_offset"] == {"vertical_1": 0.5}
    scored = {"passes": 52.0, "step_speedup": 4.92, "scene_score": 0.25, "nll": 3.3}
    assert jobs[0]["decoders"] == {"ar": scored | {"scene_score": None}, "ssd": scored}
    assert jobs[2]["decoders"] == jobs[3]["decoders"] == {}
    text = (tmp_path / "sweep.md").read_text()
    assert text.splitlines()[2:] == [
        "In every job: `model=tiny`",
        "",
        "| head.lr | status | acceptance | vertical +1 |",
        "| --: | --: | --: | --: |",
        "| 1e-3 | completed | 0.400 | 0.50 |",
        "| 1e-4 | completed | 0.300 | 0.40 |",
        "| 1 | failed | - | - |",
        "| 2 | unfinished | - | - |",
        "",
        "| head.lr | decoder | passes | step_speedup | scene_score | nll |",
        "| --: | --: | --: | --: | --: | --: |",
        "| 1e-3 | ar | 52.0 | 4.92x | - | 3.300 |",
        "| 1e-3 | ssd | 52.0 | 4.92x | 0.250 | 3.300 |",
        "",
        "- bad: ValueError: lr | is 1",
        "",
        "![acceptance by setting](sweep.png)",
    ]


def test_a_report_on_other_heads_is_not_shown(make_job, tmp_path):
    make_job("a", {}, acceptance=0.3, decoders={"ar": entry()}, drafted_by="before")
    make_job("b", {}, decoders={"ar": entry()}, drafted_by="decode.heads")
    assert [bool(job["decoders"]) for job in sweep.write_summary(tmp_path)] == [False, True]


def test_settings_that_only_some_jobs_have_are_varied():
    jobs = [{"overrides": overrides} for overrides in ({"a": "1", "b": "2"}, {"a": "1"}, {"a": "1", "b": "2"})]
    assert sweep.varied(jobs) == ["b"]
    assert sweep.varied(jobs[:1]) == ["a", "b"]
    assert sweep.varied([]) == []


def test_the_plot_has_a_panel_a_setting(make_job, tmp_path):
    """Numbers stand on an axis, a logarithmic one if need be, other values side by side."""
    for i, (lr, space) in enumerate([("1e-5", "latent"), ("1e-3", "latent"), ("1e-3", "token")]):
        make_job(str(i), {"head.lr": lr, "head.space": space, "seed": "0"}, acceptance=i / 10)
    sweep.write_summary(tmp_path)
    width, height = Image.open(tmp_path / "sweep.png").size
    assert width == pytest.approx(2 * 3.2 * 150 + 150, abs=2)
    assert height == pytest.approx(3.6 * 150, abs=2)


def test_nothing_is_plotted_of_a_single_job(make_job, tmp_path):
    make_job("a", {"head.lr": "1"}, acceptance=0.3)
    make_job("b", {"head.lr": "2"}, status="failed", error="x")
    sweep.write_summary(tmp_path)
    assert not (tmp_path / "sweep.png").exists()
    assert "sweep.png" not in (tmp_path / "sweep.md").read_text()


# -- under Hydra --------------------------------------------------------------------------------------------------


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """(task, command line) -> what a program that calls the task with each configuration exits with."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def call(task, *arguments):
        monkeypatch.setattr(sys, "argv", ["ssd_train", *arguments, "+model=tiny", f"output={tmp_path}/run"])
        try:
            hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(task)()
        except SystemExit as exit:
            return exit.code
        return None

    yield call
    root.handlers[:], root.level = handlers, level


def train(cfg):
    """A task that fails for some settings, and is best at a learning rate of 1e-3."""
    if cfg.head.lr > 0.5:
        raise sweep.JobError(f"ValueError: head.lr is {cfg.head.lr}")
    if cfg.head.lr > 0.1:
        raise KeyError("a mistake in the program")
    acceptance = 1 / (1 + abs(cfg.head.lr - 1e-3))
    summary = {"fingerprint": "f", "validation": {"validation/acceptance": acceptance}}
    (Path(HydraConfig.get().runtime.output_dir) / "training.json").write_text(json.dumps(summary))
    return acceptance


def test_a_failed_job_leaves_the_others_alone_and_is_named_at_the_end(launch, tmp_path, capsys):
    """An error of ours without a traceback, a mistake with one. Settings that say how jobs are run are not listed."""
    message = launch(train, "-m", "head.lr=1,0.2,1e-3,1e-2", "threads=1")
    assert message.splitlines() == [
        "2 of 4 jobs failed, all others are done:",
        "  +model=tiny,head.lr=0.2: KeyError: 'a mistake in the program'",
        "  +model=tiny,head.lr=1: ValueError: head.lr is 1.0",
    ]
    jobs = json.loads((tmp_path / "run-sweep/sweep.json").read_text())
    assert [(job["overrides"], job["status"]) for job in jobs] == [
        ({"model": "tiny", "head.lr": lr}, status)
        for lr, status in {"0.001": "completed", "0.01": "completed", "0.2": "failed", "1": "failed"}.items()
    ]
    shown = capsys.readouterr().out
    assert shown.count("Traceback") == 1
    assert "| 0.001 | completed | 1.000 |" in shown
    assert launch(train, "-m", "head.lr=1e-3") is None  # the earlier failures were not this command's
    assert len(json.loads((tmp_path / "run-sweep/sweep.json").read_text())) == 4


def test_the_summary_is_there_while_a_sweep_runs(launch, tmp_path):
    """And after one that was cut off, with the job that was ended from outside."""

    def task(cfg):
        if cfg.head.lr > 0.5:
            raise KeyboardInterrupt
        return train(cfg)

    with pytest.raises(KeyboardInterrupt):
        launch(task, "-m", "head.lr=1e-3,1,1e-2")
    jobs = json.loads((tmp_path / "run-sweep/sweep.json").read_text())
    assert [job["status"] for job in jobs] == ["completed"]
    assert [job["status"] for job in sweep.write_summary(tmp_path / "run-sweep")] == ["completed", "unfinished"]


def test_a_run_that_is_no_sweep_is_left_as_it_is(launch, tmp_path, capsys):
    assert launch(train, "head.lr=1e-3") is None
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".hydra", "ssd_train.log", "training.json"}
    assert launch(train, "head.lr=0.2") == 1
    assert "KeyError: 'a mistake in the program'" in capsys.readouterr().err


def test_only_one_process_of_several_keeps_the_record(launch, tmp_path, monkeypatch):
    """torchrun -m ssd_train -m: all sweep together."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert launch(train, "-m", "head.lr=1e-3,1") is None
    assert not list(tmp_path.rglob("job.json"))


def test_optuna_looks_for_the_highest_acceptance_and_proposes_the_same_again(launch, tmp_path):
    """A failed trial ends nothing. So a sweep that was cut off goes on when it is run again."""
    search = ["-m", "hydra/sweeper=optuna", "head.lr=tag(log,interval(1e-5,10))", "hydra.sweeper.n_trials=6"]
    folders = []
    for _ in range(2):
        message = launch(train, *search)
        jobs = json.loads((tmp_path / "run-sweep/sweep.json").read_text())
        failed = [job for job in jobs if job["status"] == "failed"]
        assert 0 < len(failed) < 6
        assert message.startswith(f"{len(failed)} of 6 jobs failed, all others are done:")
        best = OmegaConf.load(tmp_path / "run-sweep/optimization_results.yaml")
        assert best.best_value == jobs[0]["acceptance"] == max(j["acceptance"] for j in jobs if j["acceptance"])
        folders.append({job["job"] for job in jobs})
    assert len(folders[0]) == 6
    assert folders[0] == folders[1]


@pytest.mark.slow
def test_jobs_of_a_launcher_share_one_cache(settings, tmp_path):
    """Hydra's submitit launcher runs them in processes of their own, at the same time: the cache is made once, and one
    job's error is known outside."""
    lines = [line.lstrip("+") for line in settings(tmp_path) if line not in ("+model=tiny", "decoder=ar", "logger=csv")]
    experiment = tmp_path / "own" / "experiment" / "micro.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.from_dotlist(lines)))
    command = [
        *("-m", "ssd_train", "-m", "--config-dir", str(tmp_path / "own"), "+model=tiny", "+experiment=micro"),
        *("stages=[cache,train]", "train.epochs=1", "head.lr=1e-3,1e-6,2e-3", "hydra/launcher=submitit_local"),
    ]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"1 of 3 jobs failed.*\n.*head.lr=1e-06.*: ValueError: head.min_lr=1e-05, head.lr=1e-06; expected",
                     done.stderr), done.stderr  # fmt: skip
    jobs = json.loads((tmp_path / "run-sweep/sweep.json").read_text())
    assert [job["status"] for job in jobs] == ["completed", "completed", "failed"]
    for job in jobs[:2]:
        assert set(job["by_offset"]) == {"horizontal_1", "horizontal_2", "vertical_1", "vertical_2"}
    logs = "".join(path.read_text() for path in tmp_path.rglob("ssd_train.log"))
    assert sum(map(int, re.findall(r"in 3 shards, (\d) of them made now", logs))) == 3
