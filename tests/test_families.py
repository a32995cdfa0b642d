"""The whole pipeline, by its command, on a small random instance of each family and on the README's example."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import example_backbone
import pytest
import yaml
from safetensors.torch import load_file
from test_plan import composed

from ssd_train.backbones.sketches import byte_tokenizer, random_model

ROOT = Path(__file__).parents[1]


def command(directory, *overrides, offline=True):
    """``python -m ssd_train`` in a directory of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    return subprocess.run(
        [sys.executable, "-m", "ssd_train", "device=cpu", "threads=1", *overrides],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


GRIDS = {"janus": (6, 8), "lumina": (6, 8), "emu3": (6, 11)}


@pytest.mark.parametrize("family", GRIDS)
def test_the_whole_pipeline(family, tmp_path):
    start = time.perf_counter()
    done = command(tmp_path, f"+experiment=smoke_{family}")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 60
    run = tmp_path / "runs" / f"smoke_{family}-smoke"
    report = json.loads((run / "decode" / "report.json").read_text())
    assert report["model"] == f"smoke_{family}"
    assert tuple(report["grid"]) == GRIDS[family]
    assert "mean nothing" in report["note"]
    assert "mean nothing" in (run / "decode" / "report.md").read_text()
    ar, ssd = (report["decoders"][name] for name in ("ar", "ssd"))
    height, width = GRIDS[family]
    assert ar["passes"] == height * width  # end-of-line tokens ride along
    assert ssd["passes"] == 1 + -(-(width - 1) // 5) * 2 + (height - 1) * 3  # no more with end-of-line tokens
    assert ssd["acceptance"]["rate"] > 0
    for name in "ar", "ssd":
        tokens = load_file(run / "decode" / "tokens" / f"{name}.safetensors")["tokens"]
        assert tuple(tokens.shape[1:]) == GRIDS[family]
        assert len(tokens.unique()) > 8
    assert (run / "decode" / "images.png").exists() == (family != "lumina")
    assert ("no pictures" in done.stdout + done.stderr) == (family == "lumina")
    manifest = json.loads(next((tmp_path / "runs" / "cache").glob("*/manifest.json")).read_text())
    assert manifest["readout_error"] < 1e-4
    assert manifest["end_of_line"] == (family != "janus")


@pytest.mark.parametrize("family", GRIDS)
def test_logits_of_the_smoke_models_are_far_from_flat(family):
    """Or any decoder would look right."""
    from ssd_train.backbones.sketches import sketch
    from ssd_train.decoding.engine import Decoder
    from ssd_train.decoding.schedules.ar import Autoregressive
    from ssd_train.distributions import Sampling
    from ssd_train.metrics import negative_log_likelihood

    cfg = composed(f"+experiment=smoke_{family}")
    backbone, sampling = sketch(cfg.model, "cpu"), Sampling(**cfg.model.sampling)
    prompts = backbone.encode_prompts(["a dog", "a cat"])
    tokens = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, [0, 1], sampling).tokens
    assert negative_log_likelihood(backbone, prompts, tokens, sampling).max() < 3  # nats; ln 64 is 4.2


# -- without a network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["janus_pro_1b", "lumina", "emu3"])
def test_a_checkpoint_that_is_not_there_says_what_to_do(model, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {i}" for i in range(99)))
    done = command(
        tmp_path, f"+model={model}", "model.prompts.path=prompts.txt", "model.prompts.column=text", "stages=[cache]",
        "cache.samples=60", "cache.batch_size=1", "model.backbone.dtype=bfloat16", "model.architecture=null",
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"the checkpoint \S+/\S+ is no directory here.*HF_HUB_OFFLINE is set", done.stderr)
    assert re.search(r"run `hf download \S+/\S+`.*HF_HOME.*model.backbone.checkpoint=DIRECTORY", done.stderr)


# -- the README's example -----------------------------------------------------------------------------------------


def test_the_example_is_short():
    assert len(Path(example_backbone.__file__).read_text().splitlines()) < 150


def readme_yaml():
    return yaml.safe_load(re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])


def test_the_readme_s_example_runs(tmp_path):
    """Its yaml as it stands there, but for the checkpoint, which is made here, and its size."""
    codec = dict(embed_dim=4, base_channels=32, channel_multiplier=[1, 1], latent_channels=32, num_res_blocks=0)
    config = example_backbone.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        vq=codec | {"num_embeddings": 64},
    )  # fmt: skip
    model = random_model(example_backbone.DrawingLlama, config, dtype="float32", device="cpu", scale=8.0)
    model.save_pretrained(tmp_path / "checkpoint")
    byte_tokenizer({"<s>": 0}).save_pretrained(tmp_path / "checkpoint")
    node = readme_yaml()
    node["backbone"] |= {"checkpoint": "checkpoint", "grid": [6, 7]}
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / f"{node['name']}.yaml").write_text(yaml.safe_dump(node))
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {i}" for i in range(200)))
    done = command(
        tmp_path, "--config-dir", "mine", "+model=llamagen", "+experiment=smoke", "model.backbone.dtype=float32",
        "stages=[plan,cache,train,export,decode]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "llamagen-smoke"
    report = json.loads((run / "decode" / "report.json").read_text())
    assert report["grid"] == [6, 7]
    assert report["decoders"]["ssd"]["passes"] < report["decoders"]["ar"]["passes"] == 42
    assert (run / "decode" / "images.png").exists()
    assert json.loads((run / "plan.json").read_text())["parameters"] == sum(p.numel() for p in model.parameters())
