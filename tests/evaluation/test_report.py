"""The contract of report.json: what is written satisfies it, and every breach is named."""

import json
import math
import re

import pytest
import torch

from ssd_train.evaluation import report as module
from ssd_train.evaluation.metrics import Acceptance, Tally
from ssd_train.evaluation.report import DecoderReport, Report, table_markdown, validate_report, write_report

GRID = (2, 3)
NO_DRAFTS = Acceptance(Tally(), {}, {}, torch.zeros(2, *GRID, dtype=torch.int64))
DRAFTS = Acceptance(
    Tally(15, 20),
    {1: Tally(6, 10), 2: Tally(9, 10)},
    {(0, 1): Tally(2, 4), (1, 0): Tally(4, 6)},
    torch.tensor([[[0, 1, 1], [0, 2, 2]], [[0, 2, 2], [0, 3, 3]]]),
)


def example(**changes) -> Report:
    ar = DecoderReport(
        passes=256.0, wall_seconds=2.0, draft_fraction=0.0, acceptance=NO_DRAFTS, nll=3.25, exact=True,
        scene_score=(0.9, 0.87, 0.92), texture={"laplacian_variance": 810.0, "luma_deviation": 30.0},
    )  # fmt: skip
    ssd = DecoderReport(
        passes=32.0, wall_seconds=0.4, draft_fraction=0.125, acceptance=DRAFTS, nll=3.125, exact=False,
        scene_score=(0.88, 0.85, 0.9), scene_score_by_category={"single": (1.0, 0.8, 1.0)},
        texture={"laplacian_variance": 605.4, "luma_deviation": 25.0}, code_entropy=4.5, extra={"rounds": 2},
    )  # fmt: skip
    return Report("micro", GRID, prompts=8, decoders={"ar": ar, "ssd": ssd}, device="cpu", **changes)


def test_the_written_contract(tmp_path):
    """Word for word the keys that scripts rely on."""
    write_report(example(), tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content.keys() >= {"model", "grid", "prompts", "decoders", "versions", "device"}
    assert content["grid"] == [2, 3]
    assert content["versions"].keys() >= {"python", "torch", "transformers", "ssd_train"}
    for decoder in content["decoders"].values():
        assert decoder.keys() >= {
            "passes", "step_speedup", "wall_speedup", "wall_seconds", "draft_fraction", "acceptance",
            "scene_score", "nll", "exact",
        }  # fmt: skip
    validate_report(content)
    ssd = content["decoders"]["ssd"]
    assert (ssd["step_speedup"], ssd["wall_speedup"]) == (8, pytest.approx(5))
    assert ssd["pass_ratio"] == pytest.approx(1.6)  # 0.4 / 32 seconds a pass against 2 / 256
    assert ssd["nll_distance"] == 0.125  # below AR's, yet a distance
    assert ssd["scene_score"] == {"value": 0.88, "low": 0.85, "high": 0.9}
    assert ssd["scene_score_by_category"] == {"single": {"value": 1.0, "low": 0.8, "high": 1.0}}
    assert ssd["acceptance"]["by_round"] == {"1": 0.6, "2": 0.9}
    assert ssd["acceptance"]["map"] == [[None, 0.5, 0.5], [None, 2 / 3, 2 / 3]]
    assert ssd["exact"] is False
    assert ssd["rounds"] == 2
    ar = content["decoders"]["ar"]
    assert (ar["step_speedup"], ar["wall_speedup"], ar["nll_distance"]) == (1, 1, 0)
    assert ar["acceptance"]["rate"] is None


def test_every_key_is_documented():
    content = example().to_dict()
    for key in [*content, *content["decoders"]["ar"], *content["decoders"]["ssd"]["acceptance"]]:
        assert re.search(rf"\b{key}\b", module.__doc__), key


def test_without_ar_there_is_no_speed_up(tmp_path):
    report = example()
    del report.decoders["ar"]
    entry = write_report(report, tmp_path)["decoders"]["ssd"]
    assert [entry[k] for k in ("step_speedup", "wall_speedup", "pass_ratio", "nll_distance")] == [None] * 4
    assert (
        "| ssd | no | 32.0 | 0.19 | - | - | 12.5% | 60.0% | 0.880 [0.850, 0.900] | 3.125 | 605 | - |"
        in (tmp_path / "report.md").read_text()
    )


def test_the_bare_contract_is_enough():
    """Reports of other makers, without our further keys."""
    decoder = {
        "passes": 10, "step_speedup": None, "wall_speedup": None, "wall_seconds": 0.5, "draft_fraction": 0,
        "acceptance": {"rate": 0.5, "by_round": {}, "by_offset": {}, "map": [[None]]},
        "scene_score": None, "nll": 3, "exact": False,
    }  # fmt: skip
    report = {"model": "m", "grid": [1, 1], "prompts": 1, "versions": {}, "device": "cpu"}
    report["decoders"] = {"ssd": decoder}
    validate_report(report)
    assert "| ssd | no | 10.0 | 0.10 | - | - | 0.0% | - | - | 3.000 | - |" in table_markdown(report)


DELETE = object()
REPORT_BREACHES = [
    (["model"], "", "model is ''; expected a string that is not empty"),
    (["grid"], [2, 3, 1], "grid is [2, 3, 1]; expected [height, width]"),
    (["grid", 1], 0, "grid[1] is 0; expected an integer above 0"),
    (["prompts"], True, "prompts is True; expected an integer above 0"),
    (["decoders"], {}, "decoders is {}; expected at least one decoder"),
    (["decoders", "ssd"], [], "decoders.ssd is []; expected an object"),
    (["versions"], "2.13", "versions is '2.13'; expected an object"),
    (["versions", "torch"], 2, "versions.torch is 2; expected a string that is not empty"),
    (["device"], DELETE, "device is missing; expected a string that is not empty"),
    (["note"], "", "note is ''; expected a string that is not empty, or null"),
]
DECODER_BREACHES = [
    (["passes"], 0, "passes is 0; expected a number above 0"),
    (["step_speedup"], 7.0, "step_speedup is 7.0; expected 8.0: AR's passes over its own"),
    (["wall_speedup"], None, "wall_speedup is None; expected 5.0: AR's wall_seconds over its own"),
    (["wall_seconds"], "0.4", "wall_seconds is '0.4'; expected a number above 0"),
    (["draft_fraction"], 1.5, "draft_fraction is 1.5; expected a number from 0 to 1"),
    (["nll"], math.nan, "nll is nan; expected a number of at least 0"),
    (["nll"], math.inf, "nll is inf; expected a number of at least 0"),
    (["exact"], 1, "exact is 1; expected true or false"),
    (["scene_score"], 0.9, "scene_score is 0.9; expected an object, or null"),
    (["scene_score"], DELETE, "scene_score is missing; expected an object, or null"),
    (["scene_score", "high"], DELETE, "scene_score.high is missing; expected a number from 0 to 1"),
    (["scene_score", "high"], 0.8, "'low': 0.85, 'high': 0.8}; expected low <= value <= high"),
    (["scene_score_by_category", "single", "value"], 2, "by_category.single.value is 2; expected a number"),
    (["texture"], {}, "texture.laplacian_variance is missing; expected a number of at least 0"),
    (["acceptance"], DELETE, "acceptance is missing; expected an object"),
    (["acceptance", "rate"], -0.1, "acceptance.rate is -0.1; expected a number from 0 to 1, or null"),
    (["acceptance", "by_round", "2"], 1.01, "acceptance.by_round.2 is 1.01; expected a number from 0 to 1"),
    (["acceptance", "map", 1, 2], 7, "acceptance.map[1][2] is 7; expected a number from 0 to 1, or null"),
    (["acceptance", "map", 1], [0.5], "acceptance.map has rows of [3, 1]; expected 2 rows of 3"),
]
BREACHES = [(keys, value, f"report.{message}") for keys, value, message in REPORT_BREACHES] + [
    (["decoders", "ssd", *keys], value, message) for keys, value, message in DECODER_BREACHES
]


@pytest.mark.parametrize("keys, value, message", BREACHES, ids=[message for *_, message in BREACHES])
def test_a_breach_is_named(keys, value, message):
    report = example().to_dict()
    *parents, last = keys
    place = report
    for key in parents:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        validate_report(report)
    place = "report.decoders.ssd" if keys[:2] == ["decoders", "ssd"] else "report."
    assert str(caught.value).startswith(place)


def test_a_speed_up_without_a_baseline_is_refused():
    report = example().to_dict()
    del report["decoders"]["ar"]
    with pytest.raises(ValueError, match=r"step_speedup is 8\.0; expected None: there is no AR"):
        validate_report(report)


def test_a_long_value_is_cut_short():
    with pytest.raises(ValueError, match=r"expected a string") as caught:
        validate_report(example().to_dict() | {"model": list(range(1000))})
    assert len(str(caught.value)) < 200


def test_nothing_is_written_if_the_contract_is_broken(tmp_path):
    report = example()
    report.decoders["ssd"].nll = math.nan
    with pytest.raises(ValueError, match=r"decoders\.ssd\.nll is nan"):
        write_report(report, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_table():
    lines = table_markdown(example().to_dict()).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {13}
    assert lines[2] == "| ar | yes | 256.0 | 0.02 | 1.00x | 1.00x | 0.0% | - | 0.900 [0.870, 0.920] | 3.250 | 810 | - |"
    assert lines[3] == (
        "| ssd | no | 32.0 | 0.19 | 8.00x | 5.00x | 12.5% | 60.0% | 0.880 [0.850, 0.900] | 3.125 (-0.125) | 605 | - |"
    )


def test_report_md_shows_the_pictures_that_exist_and_the_note(tmp_path):
    for name in "samples.png", "acceptance_map_ssd.png", ".half.png.1", ".hidden.png", "notes.txt":
        (tmp_path / name).touch()
    write_report(example(note="Smoke run: these figures mean nothing."), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert re.findall(r"!\[.*", text) == [
        "![acceptance map ssd](acceptance_map_ssd.png)",
        "![samples](samples.png)",
    ]
    assert "**Smoke run: these figures mean nothing.**" in text.split("| decoder")[0]
    assert "8 prompts, 2 x 3 tokens an image; cpu; python" in text
    assert json.loads((tmp_path / "report.json").read_text())["note"].startswith("Smoke run")
    write_report(example(), tmp_path)
    assert "**" not in (tmp_path / "report.md").read_text()


def test_device_name_says_what_times_were_measured_on():
    assert re.fullmatch(r"cpu \(.+, \d+ threads\)", module.device_name())
