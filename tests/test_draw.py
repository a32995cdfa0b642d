"""Drawing one's own prompts, as a newcomer would: from the command line and from Python."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import micro
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from ssd_train import Painter, config, draw
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.draws import sample_seed
from ssd_train.heads.export import save_heads
from ssd_train.heads.predictors import Heads, HeadSpec
from ssd_train.prompts import Split
from ssd_train.stages import decode

TYPED = {  # what people type, and the words that tiny does not know
    "two red squares": [],
    "a blue circle": [],
    "A Green Triangle": [],
    "FOUR YELLOW CIRCLES": [],
    "a red circle left of a blue square": [],
    "a red circle, a blue square": [],
    "a circle and a triangle.": [],
    "red square": [],
    "squares": [],
    "  a yellow triangle above a green circle ": [],
    "three red circle": [],
    "a square: blue": [],
    "draw me a red circle": ["draw", "me"],
    "a purple square": ["purple"],
    "five squares": ["five"],
    "2 red squares": ["2"],
    "an orange circle": ["an", "orange"],
    "a red cirlce": ["cirlce"],
    "a cat": ["cat"],
    "ein roter Kreis": ["ein", "roter", "Kreis"],
}


@pytest.fixture(scope="module")
def painter():
    return Painter("tiny", settings=["threads=1"])


def call(capsys, *arguments):
    """(exit status, standard output, standard error)"""
    status = 0
    try:
        draw.main([str(a) for a in arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_what_people_type_is_drawn_or_refused_by_name(painter):
    known = [text for text, unknown in TYPED.items() if not unknown]
    images, trace = painter(known)
    assert [image.size for image in images] == [(64, 64)] * len(known)
    assert max(trace.passes) < 100
    for text, unknown in TYPED.items():
        if unknown:
            with pytest.raises(
                ValueError, match=r"tiny does not know .* in the prompt .*; it knows a, above"
            ) as caught:
                painter([text])
            assert re.findall(r"'(\w+)'(?=.* in the prompt)", str(caught.value)) == unknown
    with pytest.raises(ValueError, match=r"'cirlce' \(did you mean circle\?\)"):
        painter(["a red cirlce"])


def test_a_picture_is_the_same_alone_and_in_a_batch():
    """In float64: with fewer digits a batch's rounding may turn a token."""
    painter = Painter("tiny", settings=["threads=1", "model.backbone.dtype=float64"])
    texts = ["two red squares", "a blue circle", "a red circle left of a blue square"]
    together = painter.decode(texts, "ssd_corrected", [3, 4, 5]).tokens
    for text, seed, tokens in zip(texts, [3, 4, 5], together, strict=True):
        assert torch.equal(painter.decode([text], "ssd_corrected", seed).tokens[0], tokens)
    assert not torch.equal(painter.decode(texts[:1], "ssd_corrected", 9).tokens[0], together[0])


def test_decoders_by_name_by_file_and_as_objects(painter, tmp_path):
    """All of AR's own images."""
    (tmp_path / "mine.yaml").write_text((config.conf_dir() / "decoder/ar.yaml").read_text())
    decoders = "ar", tmp_path / "mine.yaml", Decoder(Autoregressive())
    first, *others = (painter.decode("a blue circle", decoder).tokens for decoder in decoders)
    assert all(torch.equal(first, other) for other in others)
    assert painter.best() == "ssd_corrected"
    assert painter.decoder() is painter.decoder("ssd_corrected")
    assert Painter(painter.backbone).best() == "sjd_coupled"
    (tmp_path / "broken.yaml").write_text("a: [")
    for wrong, message in {
        "sdd": "there is no decoder 'sdd'; expected one of addition, .* or a yaml's path",
        tmp_path / "none.yaml": "none.yaml cannot be read as a decoder's yaml: .*No such file",
        tmp_path / "broken.yaml": "broken.yaml cannot be read as a decoder's yaml",
    }.items():
        with pytest.raises(ValueError, match=message):
            painter.decoder(wrong)
    with pytest.raises(ValueError, match="decoder ssd: this decoder drafts with heads, but there are none"):
        Painter(painter.backbone).decoder("ssd")


@pytest.mark.parametrize("prompts, seed, message", [
    ([], 0, "0 prompts and 0 seeds"), (["a circle", " "], 0, "prompt 2 is empty"), (["a circle"], [1, 2], "1 prompts"),
    ("a circle", -1, "seeds are"), ("a circle", 2**63, "seeds are"),
])  # fmt: skip
def test_what_cannot_be_drawn(painter, prompts, seed, message):
    with pytest.raises(ValueError, match=message):
        painter(prompts, seed=seed)


def test_it_draws_what_the_decode_stage_does(make_run, tmp_path):
    run = make_run(tmp_path, "stages=[decode]", "decoder=[ar,sjd_coupled]")
    decode.run(run)
    prompts = run.prompts([Split.TEST], 4)
    tokens = load_file(run.output / "decode/tokens/sjd_coupled.safetensors")["tokens"]
    painter = Painter(run.backbone, sampling=run.sampling)
    seeds = [sample_seed(run.cfg.seed, prompt.index) for prompt in prompts]
    assert torch.equal(painter.decode([p.text for p in prompts], "sjd_coupled", seeds).tokens, tokens)


def test_the_command(capsys, tmp_path):
    """Names, text chunks, a sheet; nothing is overwritten unasked."""
    out = tmp_path / "new/drawn"
    arguments = "two red squares", "A Blue circle.", "--out", out, "--compare", "sjd_coupled", "--device", "cpu"
    status, said, errors = call(capsys, *arguments)
    assert status == 0, errors
    names = {
        f"{n}-{d}.png" for n in ("001-two-red-squares", "002-a-blue-circle") for d in ("sjd_coupled", "ssd_corrected")
    }
    assert {path.name for path in out.iterdir()} == names | {"sheet.png"}
    assert len(re.findall(r"001-two-red-squares-ssd_corrected.png: \d+ passes, [\d.]+ s", said)) == 1
    about = Image.open(out / "002-a-blue-circle-ssd_corrected.png").text
    assert about["prompt"] == "A Blue circle."
    assert (about["seed"], about["decoder"], about["model"]) == ("0", "ssd_corrected", "tiny")
    assert int(about["passes"]) < 100
    assert json.loads(about["versions"])["torch"] == torch.__version__
    before = {path: path.read_bytes() for path in out.iterdir()}
    status, _, errors = call(capsys, *arguments)
    assert status == 2
    assert re.fullmatch(
        r"error: .*001.* is there already; expected another --out, or --force to overwrite it\n", errors
    )
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert (
        call(capsys, "two red squares", "--out", out, "--force", "--decoder", "ssd_corrected", "--count", "2")[0] == 0
    )
    seeds = [Image.open(out / f"001-two-red-squares-seed-{seed}.png") for seed in (0, 1)]
    assert np.array_equal(seeds[0], Image.open(out / "001-two-red-squares-ssd_corrected.png"))
    assert not np.array_equal(*seeds)


@pytest.mark.parametrize("arguments, message", [
    (["a circle", "--model", "huge"], "there is no model 'huge'; expected one of .*tiny"),
    (["a circle", "--model", "janus_pro_1b"], "the checkpoint .* is no directory here"),
    (["a circle", "--decoder", "sdd"], "there is no decoder 'sdd'"),
    (["a circle", "--heads", "/nowhere/heads"], "/nowhere/heads holds no exported heads"),
    (["a circle", "--dtype", "float8"], "model.backbone.dtype is 'float8'; expected one of"),
    (["a circle", "--grid", "3", "5"], r"tiny has no grid \[3, 5\]"),
    (["a circle", "--temperature", "-1"], "sampling.temperature is -1"),
    (["a circle", "--count", "0"], "--count is 0"),
    (["a circle", "--out", "/proc/drawn"], "/proc/drawn"),
    (["a circle", "--prompts", "none.txt"], "none.txt"),
    (["a hexagon"], "tiny does not know 'hexagon'"),
    ([" "], "prompt 1 is empty"),
    ([], "nothing to draw"),
])  # fmt: skip
def test_errors_are_one_line(capsys, tmp_path, arguments, message):
    where = [] if "--out" in arguments else ["--out", tmp_path / "drawn"]
    status, said, errors = call(capsys, *arguments, *where)
    assert (status, said) == (2, "")
    line = errors.splitlines()[-1]
    assert re.match(f"error: .*{message}", line)
    assert "Traceback" not in errors


def test_prompts_from_files_and_standard_input(capsys, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("a red circle\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a green circle\n\na blue circle\n"))
    where = "--out", tmp_path / "drawn", "--prompts", tmp_path / "p.txt"
    assert call(capsys, "a square", "-", *where)[0] == 0
    names = ["001-a-square", "002-a-green-circle", "003-a-blue-circle", "004-a-red-circle"]
    assert sorted(path.stem for path in (tmp_path / "drawn").iterdir()) == names


def test_heads_of_another_backbone_are_refused(capsys, tmp_path):
    backbone = micro.janus((16, 16))
    save_heads(tmp_path / "heads", Heads(HeadSpec(backbone.width, backbone.vocabulary)), backbone, {"samples": 1})
    status, _, errors = call(capsys, "a circle", "--heads", tmp_path / "heads", "--out", tmp_path / "drawn")
    assert status == 2
    assert "were trained for fingerprint" in errors


def test_without_pixels_tokens_are_saved(capsys, tmp_path, monkeypatch):
    def missing(self, tokens):
        raise FileNotFoundError("put vqgan.ckpt there")

    monkeypatch.setattr(Painter, "pictures", missing)
    status, _, errors = call(capsys, "a circle", "--out", tmp_path, "--compare", "sjd_coupled")
    assert status == 0
    assert "no pixels, so tokens are saved: put vqgan.ckpt there" in errors
    tokens = np.load(tmp_path / "001-a-circle-ssd_corrected.npy", allow_pickle=False)
    assert tokens.shape == (16, 16)
    status, _, errors = call(capsys, "a circle", "--out", tmp_path, "--compare", "sjd_coupled")
    assert status == 2
    assert ".npy is there already" in errors


def test_two_yamls_of_one_name_are_refused(capsys, tmp_path):
    yamls = [tmp_path / folder / "mine.yaml" for folder in "ab"]
    for path in yamls:
        path.parent.mkdir()
        path.write_text((config.conf_dir() / "decoder/ar.yaml").read_text())
    status, _, errors = call(capsys, "a circle", "--out", tmp_path, "--compare", yamls[0], "--decoder", yamls[1])
    assert status == 2
    assert "would name their pictures alike; rename a yaml" in errors


def test_what_was_finished_stays_when_it_is_stopped(capsys, tmp_path, monkeypatch):
    decoded, true = [], Painter.decode

    def stopped(*arguments):
        if decoded:
            raise KeyboardInterrupt
        decoded.append(1)
        return true(*arguments)

    monkeypatch.setattr(Painter, "decode", stopped)
    status, _, errors = call(capsys, *["a circle"] * 3, "--batch", "2", "--out", tmp_path)
    assert status == 130
    assert f"stopped; what was finished is in {tmp_path}" in errors
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_imported_that_drawing_does_not_need():
    code = "import sys, ssd_train.draw, ssd_train.runs.painter; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = "lightning", "wandb", "datasets", "matplotlib", "torchmetrics", "pyarrow"
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_readmes_five_lines(tmp_path, monkeypatch):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"(?:^    .*\n)*^    painter = .*\n(?:^    .*\n)*", text, re.M)
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec("\n".join(line[4:] for line in code.splitlines()), scope)
    assert (tmp_path / "squares.png").exists()
    assert scope["trace"].passes[0] < 100
