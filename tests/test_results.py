"""What the README says of tiny is what the committed run measured, with the backbone and the heads that ship."""

import json
import re
from pathlib import Path

import pytest

from ssd_train import Painter, config
from ssd_train.backbones.janus import Janus
from ssd_train.distributions import Sampling
from ssd_train.evaluation.report import table_markdown, validate_report
from ssd_train.heads.export import load_heads, read_config
from ssd_train.prompts import Split, take
from ssd_train.tiny.prompts import GrammarPrompts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "data/results"
REPORT = json.loads((RESULTS / "tiny.json").read_text())
ROWS = {
    "ar", "sjd", "sjd_coupled", "gsd", "csd", "zipar", "pjd", "mtp",
    "eagle", "ssd", "ssd rounds=0", "ssd rounds=1", "ssd_coupled", "ssd_corrected", "ssd_corrected_narrow",
    "ssd_corrected_amplify",
}  # fmt: skip


@pytest.fixture(scope="module")
def shipped():
    return Janus.load(str(config.data_dir() / "tiny"), "tiny", dtype="float32")


def cells(markdown):
    """Rows of a markdown table whose first column is the decoder, as {decoder: {column: cell}}."""
    lines = [[cell.strip(" `*") for cell in line.strip().strip("|").split("|")] for line in markdown.splitlines()]
    header, _, *rows = lines
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_the_run_is_of_what_ships(shipped):
    validate_report(REPORT)
    assert REPORT["prompts"] == 512
    assert set(REPORT["decoders"]) == ROWS
    assert REPORT["fingerprint"] == shipped.fingerprint
    assert REPORT["heads"] == read_config(config.data_dir() / "tiny/heads")
    load_heads(config.data_dir() / "tiny/heads", shipped)


def test_they_decode_as_measured(shipped):
    """Without caching or training; the passes of 16 pictures stand within 4 of the mean of 512."""
    painter = Painter(shipped, config.data_dir() / "tiny/heads", sampling=Sampling(**REPORT["sampling"]))
    prompts = [prompt.text for prompt in take(GrammarPrompts(), [Split.TEST], 16)]
    passes = painter.decode(prompts, "ssd_corrected", range(16)).trace.passes
    assert sum(passes) / 16 == pytest.approx(REPORT["decoders"]["ssd_corrected"]["passes"], abs=4)


def test_all_rows_stand_beside_the_run():
    assert table_markdown(REPORT) in (RESULTS / "README.md").read_text()


def test_the_readmes_table_is_the_runs():
    (table,) = re.findall(r"(?:^\| decoder \| passes .*\n)(?:^\|.*\n)+", (ROOT / "README.md").read_text(), re.M)
    measured = cells(table_markdown(REPORT))
    found = cells(table.rstrip())
    assert len(found) >= 5
    for name, row in found.items():
        assert row == {column: measured[name][column] for column in row}


@pytest.mark.parametrize("path", ["README.md", "data/README.md"])
def test_every_figure_in_a_sentence_is_the_runs(path):
    """All passes, speed-ups and nats; the speed-up over the best training-free decoder too."""
    decoders = REPORT["decoders"]
    exact = {"passes": {f"{d['passes']:.1f}" for d in decoders.values()}}
    exact["x"] = {f"{d[key]:.2f}" for d in decoders.values() for key in ("step_speedup", "wall_speedup")}
    exact["x"].add(f"{decoders['sjd_coupled']['passes'] / decoders['ssd_corrected']['passes']:.2f}")
    exact["nats"] = {f"{d['nll'] - decoders['ar']['nll']:.2f}" for d in decoders.values()}
    exact["x"] = {f"{value}x" for value in exact["x"]}
    text = (ROOT / path).read_text().split("## Measured\n")[0]
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    for found in re.findall(r"(\d+(?:\.\d+)?)\s+passes", prose):
        assert found in exact["passes"] or found == "256"
    for found in re.findall(r"\d+\.\d+x", prose):
        assert found in exact["x"]
    for found in re.findall(r"\+(\d+\.\d+)\s+nats", prose):
        assert found in exact["nats"]
