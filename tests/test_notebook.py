"""The notebook runs from top to bottom on a run's folder, shows what is there, and is committed without output."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ssd_train.evaluation.report import table_markdown
from ssd_train.runs import sweep

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "run.ipynb"


def executed(run, monkeypatch):
    """{cell id: (its text, number of its pictures)}. Any error in a cell is one here."""
    monkeypatch.setenv("SSD_RUN", str(run))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = {}
    for cell in notebook.cells:
        shown = [output.get("data", {}) for output in cell.get("outputs", [])]
        text = "\n".join(data["text/markdown"] for data in shown if "text/markdown" in data)
        outputs[cell.id] = (text, sum("image/png" in data for data in shown))
    return outputs


def test_it_is_committed_without_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), cell.id
        assert cell.get("execution_count") is None, cell.id


def test_what_is_not_there_is_said_and_left_out(tmp_path, monkeypatch):
    outputs = executed(tmp_path / "nowhere", monkeypatch)
    assert "There is no `" in outputs["read"][0]
    assert outputs["images"] == ("*There are none: the decode stage has not run, or the backbone makes no pixels.*", 0)
    assert outputs["sweep"] == ("*There is none.*", 0)
    for cell in "summary", "places", "decoders", "categories":
        assert outputs[cell] == ("", 0), cell


@pytest.mark.slow
def test_it_shows_a_smoke_run_and_its_sweep(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "ssd_train", "+model=tiny", "+experiment=smoke", "threads=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny-smoke"
    for lr in "1e-3", "2e-3":
        job = tmp_path / "runs" / "tiny-smoke-sweep" / f"head.lr={lr}"
        job.mkdir(parents=True)
        shutil.copy(run / "training.json", job)
        how = {"sweep": 0.0, "overrides": {"head.lr": lr}, "status": "completed", "error": None}
        (job / "job.json").write_text(json.dumps(how))
    jobs = sweep.write_summary(job.parent)

    outputs = executed(run, monkeypatch)
    report = json.loads((run / "decode/report.json").read_text())
    training = json.loads((run / "training.json").read_text())
    assert f"| {training['steps']} steps on {training['samples']} images |" in outputs["summary"][0]
    assert f"**{report['note']}**" in outputs["summary"][0]
    assert table_markdown(report) in outputs["decoders"][0]
    assert sweep.markdown(jobs) in outputs["sweep"][0]
    assert "There is no `" not in outputs["read"][0]
    pictures = {cell: count for cell, (_, count) in outputs.items() if count}
    assert pictures == {
        "curves": 1, "offsets": 1, "places": 2, "decoders": 2, "categories": 1, "images": 1, "sweep": 2
    }  # fmt: skip
