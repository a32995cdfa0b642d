"""A sweep's summary, in the sweep's folder: sweep.md for people, sweep.png, and sweep.json for scripts.

All jobs that ever ran in the folder are in it. sweep.json is a list, the best job first; a job is an object with the
keys

    job         name of its folder
    overrides   {setting: value} as on the command line, without those that only say how a job is run
    status      "completed", "failed", or "unfinished": it runs, or was ended from outside
    error       what a failed job said, else null
    acceptance  validation acceptance rate, the mean over heads; null if it has no trained heads
    by_offset   {"vertical_1": validation acceptance rate}
    decoders    {name: {"passes", "step_speedup", "scene_score", "nll"}} of its report.json, see report.py
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ssd_train import config as schema
from ssd_train.processes.files import write_atomically

log = logging.getLogger(__name__)

schema.register()  # a job that a launcher starts elsewhere unpickles this module's callback, and never runs __main__

ACCEPTANCE = "validation/acceptance"
FIGURES = {"passes": "{:.1f}", "step_speedup": "{:.2f}x", "scene_score": "{:.3f}", "nll": "{:.3f}"}


class JobError(Exception):
    """What ended a job of a sweep. Its message says what to do; a traceback would bury that."""


class Summary(Callback):
    """Writes the summary as each job ends, wherever the launcher runs it, and exits naming the failed ones at the end.

    Hydra's sweepers give up on the first failed job, so to them every job succeeds; a failed one returns None.
    """

    def __init__(self) -> None:
        self.sweep: float | None = None  # when it started; None outside of sweeps

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.sweep = time.time()
        optuna = config.hydra.sweeper
        if "direction" in optuna:  # by default it would look for the lowest acceptance rate, every time elsewhere
            optuna.direction = "maximize"
            if "seed" in optuna.sampler and optuna.sampler.seed is None:
                optuna.sampler.seed = config.seed

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        self._note(config, "unfinished")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if self.sweep is None:
            return
        try:
            _ = job_return.return_value
        except Exception as error:
            job_return.status, job_return.return_value = JobStatus.COMPLETED, None
            message = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
            log.error("this job failed: %s", message, exc_info=not isinstance(error, JobError))
            self._note(config, "failed", message)
        else:
            self._note(config, "completed")
        write_summary(Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        directory = Path(config.hydra.sweep.dir)
        jobs = write_summary(directory)
        log.info("sweep in %s\n%s", directory / "sweep.md", markdown(jobs))
        mine = [job for job in jobs if _read(directory / job["job"] / "job.json").get("sweep") == self.sweep]
        bad = [f"  {job['job']}: {job['error'] or job['status']}" for job in mine if job["status"] != "completed"]
        if bad:
            raise SystemExit("\n".join([f"{len(bad)} of {len(mine)} jobs failed, all others are done:", *bad]))

    def _note(self, config: DictConfig, status: str, error: str | None = None) -> None:
        from ssd_train.processes.world import World  # not at every start of the program

        if self.sweep is None or World.of(os.environ).rank > 0:
            return
        directory = Path(config.hydra.runtime.output_dir)
        pairs = (override.lstrip("+").partition("=") for override in config.hydra.overrides.task)
        how_it_is_run = config.hydra.job.config.override_dirname.exclude_keys
        overrides = {key: value for key, _, value in pairs if key not in how_it_is_run}
        job = {"sweep": self.sweep, "overrides": overrides, "status": status, "error": error}
        write_atomically(directory / "job.json", json.dumps(job, indent=1).encode())


def write_summary(directory: Path) -> list[dict]:
    """Writes the three files; returns the contents of sweep.json."""
    jobs = sorted(
        (_job(path.parent) for path in directory.glob("*/job.json")), key=lambda j: (-(j["acceptance"] or 0), j["job"])
    )
    plot(jobs, directory / "sweep.png")
    text = f"# {directory.name}\n\n{markdown(jobs)}\n"
    if (directory / "sweep.png").exists():
        text += "\n![acceptance by setting](sweep.png)\n"
    write_atomically(directory / "sweep.md", text.encode())
    write_atomically(directory / "sweep.json", json.dumps(jobs, indent=1, allow_nan=False).encode())
    return jobs


def _job(directory: Path) -> dict:
    """An entry of sweep.json. What a job has not completed in this state of the code and settings is not in it."""
    job = _read(directory / "job.json")
    training, report = {}, {}
    if job["status"] == "completed":
        training, report = _read(directory / "training.json"), _read(directory / "decode" / "report.json")
        drafted_by = (report.get("heads") or {}).get("training", {})
        if training and drafted_by.get("fingerprint") != training["fingerprint"]:
            report = {}
    metrics = training.get("validation", {})
    decoders = {
        name: {key: entry[key] for key in FIGURES} | {"scene_score": (entry["scene_score"] or {}).get("value")}
        for name, entry in report.get("decoders", {}).items()
    }
    return {
        "job": directory.name,
        **{key: job[key] for key in ("overrides", "status", "error")},
        "acceptance": metrics.get(ACCEPTANCE),
        "by_offset": {k.split("/")[-1]: v for k, v in metrics.items() if k.startswith(f"{ACCEPTANCE}/")},
        "decoders": decoders,
    }


def varied(jobs: Sequence[dict]) -> list[str]:
    """The settings in which jobs differ; of a single job all."""
    keys = dict.fromkeys(key for job in jobs for key in job["overrides"])
    return [key for key in keys if len(jobs) == 1 or len({job["overrides"].get(key) for job in jobs}) > 1]


def markdown(jobs: Sequence[dict]) -> str:
    """What all jobs share, a table of validation acceptance, one of decoding, and the errors; each where there is
    any."""
    keys = varied(jobs)
    common = {key: value for job in jobs for key, value in job["overrides"].items() if key not in keys}
    offsets = sorted({name for job in jobs for name in job["by_offset"]})

    def settings(job: dict) -> dict[str, str]:
        return {key: job["overrides"].get(key, "-") for key in keys}

    trained = [
        settings(job) | {"status": job["status"], "acceptance": _format(job["acceptance"], "{:.3f}")}
        | {name.replace("_", " +"): _format(job["by_offset"].get(name), "{:.2f}") for name in offsets}
        for job in jobs
    ]  # fmt: skip
    decoded = [
        settings(job) | {"decoder": name} | {key: _format(entry[key], pattern) for key, pattern in FIGURES.items()}
        for job in jobs
        for name, entry in job["decoders"].items()
    ]
    parts = [
        "In every job: " + " ".join(f"`{key}={value}`" for key, value in common.items()) if common else "",
        _table(trained),
        _table(decoded),
        "\n".join(f"- {job['job']}: {job['error']}" for job in jobs if job["error"]),
    ]
    return "\n\n".join(part for part in parts if part)


def plot(jobs: Sequence[dict], path: Path) -> None:
    """Acceptance against each varied setting: a point a job, and the mean over the jobs of a value. Nothing is written
    if there is nothing to see."""
    jobs = [job for job in jobs if job["acceptance"] is not None]
    keys = varied(jobs) if len(jobs) > 1 else []
    if not keys:
        return
    from matplotlib.figure import Figure  # here, since every start of the program imports this module

    from ssd_train.evaluation.plots import COLOURS, DPI, GREY

    figure = Figure((3.2 * len(keys) + 1, 3.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for axes, key in zip(panels, keys, strict=True):
        values = [job["overrides"].get(key, "-") for job in jobs]
        numbers = _numbers(values)
        names = sorted(set(values))
        x = numbers or [names.index(value) for value in values]
        if numbers and 0 < (3 if max(x) < 1 else 20) * min(x) < max(x):
            axes.set_xscale("log")
        groups: dict[float, list[float]] = {}
        for at, job in zip(x, jobs, strict=True):
            groups.setdefault(at, []).append(job["acceptance"])
        axes.plot(x, [job["acceptance"] for job in jobs], "o", color=COLOURS[0], alpha=0.6)
        if numbers:
            axes.plot(sorted(groups), [mean(groups[at]) for at in sorted(groups)], color=GREY, linewidth=1)
        else:
            axes.plot(list(groups), list(map(mean, groups.values())), "_", color=GREY, markersize=24)
            axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axes.set_xlabel(key)
        axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    panels[0].set_ylabel("validation acceptance rate, and its mean")
    png = BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    write_atomically(path, png.getvalue())


def _numbers(values: Sequence[str]) -> list[float]:
    """Empty if any is no number."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return []


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return ""
    lines = [rows[0], ["--:"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format(x: float | None, pattern: str) -> str:
    return "-" if x is None else pattern.format(x)


def _read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}
