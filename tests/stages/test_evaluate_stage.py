"""The evaluate stage on each family at the smallest sizes: what it leaves is whole, resumable, shared, never mixed."""

import json
import os
import socket
from functools import cache

import numpy as np
import pytest
import torch
from composing import composed
from PIL import Image
from small_networks import Extractor, tiny_clip
from suite_files import FOREIGN, QUOTED, SUITES, written

from ssd_train import config
from ssd_train.decoding.engine import Decoder
from ssd_train.processes.world import World
from ssd_train.prompts import Split
from ssd_train.runs.run import Run
from ssd_train.stages import evaluate

FAMILIES = ["smoke_janus", "smoke_lumina", "smoke_emu3"]


@cache
def backbone(experiment):
    return Run(composed(f"+experiment={experiment}")).backbone


@pytest.fixture
def make_run(tmp_path):
    def build(suite="geneval", *overrides, experiment="smoke_janus", world=None):
        path = SUITES[suite](tmp_path)
        cfg = composed(
            f"+experiment={experiment}", f"+suite={suite}", f"suite.path={path}", "stages=[evaluate]", "decoder=[ar]",
            "threads=1", "cache.samples=6", "decode.batch_size=16", f"output={tmp_path}/run", *overrides,
        )  # fmt: skip
        config.check(cfg)
        run = Run(cfg, world or World())
        run.__dict__["backbone"] = backbone(experiment)
        return run

    return build


def evaluated(run):
    evaluate.check(run)
    evaluate.run(run)
    return json.loads((run.output / "evaluate" / run.cfg.suite.name / "report.json").read_text())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("experiment", FAMILIES)
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_with_every_family(make_run, suite, experiment):
    """Lumina's sketch has no weights for pixels: tokens only, and the report says so."""
    run = make_run(suite, "suite.limit=1", experiment=experiment)
    report = evaluated(run)
    directory = run.output / "evaluate" / suite
    images = 4 if suite in ("geneval", "dpg_bench") else 1
    assert (report["prompts"], report["images"], report["training_prompts"]) == (1, images, 0)
    assert report["decoders"]["ar"]["passes"] == run.backbone.grid.size
    pngs = list((directory / "ar").rglob("*.png")) if (directory / "ar").exists() else []
    text = (directory / "report.md").read_text()
    if experiment == "smoke_lumina":
        assert not pngs
        assert "Tokens only" in text
    else:
        assert len(pngs) == (1 if suite == "dpg_bench" else images)
        assert all(np.asarray(Image.open(png)).std() > 0 for png in pngs)
    assert ("Janus-Pro-7B, SSD" in text) == (suite in ("geneval", "dpg_bench"))
    assert "mean nothing" in text


def test_an_image_s_seed_does_not_depend_on_decoder_batch_or_limit(make_run, monkeypatch):
    """Duplicate prompts are two rows, with images of their own."""
    seen, original = {}, Decoder.__call__

    def recording(self, backbone, context, seeds, sampling, **kwargs):
        seen.setdefault(self, []).extend(seeds)
        return original(self, backbone, context, seeds, sampling, **kwargs)

    monkeypatch.setattr(Decoder, "__call__", recording)
    settings = "suite.images_per_prompt=2", "decoder=[ar,sjd_coupled]"
    run = make_run("geneval", *settings, "decode.batch_size=3")
    evaluated(run)
    first, second = (found[3:] for found in seen.values())  # after those of the clock
    assert first == second
    assert len(set(first)) == len(first) == 8
    run.output.rename(run.output.with_name("whole"))
    seen.clear()
    evaluated(make_run("geneval", *settings, "decode.batch_size=8", "suite.limit=3"))
    assert [found[3:] for found in seen.values()] == [first[:6]] * 2


def test_a_run_that_is_killed_goes_on_and_ends_the_same(make_run, monkeypatch):
    """In the middle of decoding, then in the middle of the pictures; then a picture is lost, and a limit raised."""
    whole = make_run("geneval", "suite.images_per_prompt=2", "decode.batch_size=2")
    evaluated(whole)
    expected = contents(whole.output / "evaluate/geneval/ar")
    whole.output.rename(whole.output.with_name("whole"))

    class Killed(BaseException):
        pass

    calls = []

    def dying(target, name, survives):
        original, left = getattr(target, name), iter(range(survives))

        def call(*args, **kwargs):
            if next(left, None) is None:
                raise Killed
            calls.append(name)
            return original(*args, **kwargs)

        return call

    for target, name, survives in (Decoder, "__call__", 5), (type(backbone("smoke_janus")), "decode_pixels", 3):
        run = make_run("geneval", "suite.images_per_prompt=2", "decode.batch_size=2")
        with monkeypatch.context() as patch:
            patch.setattr(target, name, dying(target, name, survives))
            with pytest.raises(Killed):
                evaluated(run)
    run = make_run("geneval", "suite.images_per_prompt=2", "decode.batch_size=2")
    parts = {path: path.stat().st_mtime_ns for path in run.output.glob("parts/*/*.safetensors")}
    assert len(parts) == 4
    evaluated(run)
    assert contents(run.output / "evaluate/geneval/ar") == expected
    (run.output / "evaluate/geneval/ar/00002/samples/0001.png").unlink()
    evaluated(make_run("geneval", "suite.images_per_prompt=2", "decode.batch_size=2", "suite.limit=3"))
    evaluated(make_run("geneval", "suite.images_per_prompt=2", "decode.batch_size=2"))
    assert contents(run.output / "evaluate/geneval/ar") == expected
    assert {path: path.stat().st_mtime_ns for path in parts} == parts


def test_pictures_of_other_settings_are_not_mixed_with(make_run):
    evaluated(make_run("prompts", "suite.limit=1"))
    with pytest.raises(ValueError, match=r"evaluate/prompts/ar holds pictures made with other settings.*move .* away"):
        evaluated(make_run("prompts", "suite.limit=1", "seed=1"))


def test_two_processes_make_what_one_makes(make_run, monkeypatch):
    alone = make_run("dpg_bench", "decode.batch_size=3")
    evaluated(alone)
    expected = contents(alone.output / "evaluate/dpg_bench/ar")
    alone.output.rename(alone.output.with_name("alone"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            status = 1
            try:
                evaluate.run(make_run("dpg_bench", "decode.batch_size=3", world=World(rank, 2, rank, 2)))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert contents(alone.output / "evaluate/dpg_bench/ar") == expected
    report = json.loads((alone.output / "evaluate/dpg_bench/report.json").read_text())
    assert report["images"] == 16


def test_networks_and_the_scorer_s_results_stand_in_the_table(make_run, tmp_path):
    """FID of a folder that holds AR's own pictures is 0, of other pictures it is not."""
    torch.jit.script(Extractor()).save(tmp_path / "extractor.pt")
    networks = f"suite.inception={tmp_path}/extractor.pt", f"suite.clip={tiny_clip(tmp_path / 'clip')}"
    run = make_run("geneval", *networks, "decoder=[ar,sjd_coupled]")
    first = evaluated(run)["decoders"]
    assert first["ar"].keys() & {"fid", "kid"} == set()  # it is the reference
    assert first["sjd_coupled"]["fid"] > 0
    assert all(0 <= entry["clip_score"] <= 100 for entry in first.values())
    folder = run.output / "evaluate/geneval"
    rows = [
        {
            "filename": str(png),
            "tag": json.loads((png.parents[1] / "metadata.jsonl").read_text())["tag"],
            "correct": True,
        }
        for png in (folder / "ar").rglob("*.png")
    ]
    written(folder / "results/ar.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(
        "geneval", *networks, "decoder=[ar,sjd_coupled]", "decode.batch_size=16", f"suite.reference={folder}/ar"
    )
    second = evaluated(run)["decoders"]
    assert second["ar"]["fid"] == pytest.approx(0, abs=1e-3)
    assert second["sjd_coupled"]["fid"] == pytest.approx(first["sjd_coupled"]["fid"], rel=1e-3)
    assert second["ar"]["scores"]["overall"]["value"] == 1
    assert second["sjd_coupled"]["scores"] is None
    text = (folder / "report.md").read_text()
    for cell in "| NLL | overall | ", " | CLIP score | FID | KID x 1000 |", "| counting |", "first 77 tokens":
        assert cell in text
    written(folder / "results/ar.jsonl", json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="is of 1 images, and there are 16"):
        evaluate.check(run)


@pytest.mark.parametrize("overrides, message", [
    (["suite.inception=none.pt"], "suite.inception=none.pt: there is no such file"),
    (["suite.inception={extractor}", "suite.reference=eagle"], "suite.reference=eagle is neither a decoder"),
    (["decoder=[spec]", "decoder.spec.schedule.source=up"], "decoder spec"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_decoded(make_run, tmp_path, overrides, message):
    torch.jit.script(Extractor()).save(tmp_path / "extractor.pt")
    overrides = [override.format(extractor=tmp_path / "extractor.pt") for override in overrides]
    with pytest.raises(ValueError, match=message):
        evaluate.check(make_run("geneval", *overrides))


@pytest.mark.parametrize("overrides, message", [
    ([], r"needs \+suite=<name>, one of coco, dpg_bench, geneval, parti, prompts, and suite.path"),
    (["+suite=geneval"], "and suite.path, where its official prompts are"),
    (["+suite=geneval", "suite.path=x", "suite.limit=0"], "suite.limit is 0; expected at least 1"),
    (["+suite=geneval", "suite.path=x", "suite.images_per_prompt=0"], "suite.images_per_prompt is 0"),
])  # fmt: skip
def test_a_suite_is_needed(overrides, message):
    with pytest.raises(ValueError, match=message):
        config.check(composed("+experiment=smoke_janus", "stages=[evaluate]", *overrides))


def test_prompts_that_were_trained_on_are_counted(make_run, tmp_path):
    run = make_run("prompts", "cache.samples=12")
    source = [prompt.text for prompt in run.prompts([Split.TRAIN, Split.VALIDATION], 12)]
    written(tmp_path / "mine.txt", "\n".join([*source, QUOTED, FOREIGN]))
    run.cfg.suite.path, run.cfg.suite.limit = str(tmp_path / "mine.txt"), None
    report = evaluated(run)
    assert 0 < report["training_prompts"] <= 12
    assert (
        f"{report['training_prompts']} of them are also training prompts"
        in (run.output / "evaluate/prompts/report.md").read_text()
    )
