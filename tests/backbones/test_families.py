"""The whole pipeline, by its command, on a small random instance of each family and on the guide's example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import example_backbone
import micro
import micro_emu3
import micro_lumina
import pytest
import torch
import yaml
from composing import composed
from hydra.utils import instantiate
from safetensors.torch import load_file

from ssd_train import backbones
from ssd_train.backbones.emu3 import Emu3
from ssd_train.backbones.janus import Janus
from ssd_train.backbones.lumina import Lumina
from ssd_train.backbones.sketches import byte_tokenizer, random_model, sketch
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.distributions import Sampling
from ssd_train.evaluation.metrics import negative_log_likelihood
from ssd_train.runs.run import Run
from ssd_train.stages import STAGES
from ssd_train.training.module import HeadModule

ROOT = Path(__file__).parents[2]


def command(directory, *overrides):
    """``python -m ssd_train`` in a directory of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hub")}
    return subprocess.run(
        [sys.executable, "-m", "ssd_train", *overrides, "device=cpu", "threads=1"],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


GRIDS = {"janus": (6, 8), "lumina": (6, 8), "emu3": (6, 11)}


@pytest.mark.parametrize("family", GRIDS)
def test_the_whole_pipeline(family, tmp_path):
    done = command(tmp_path, f"+experiment=smoke_{family}")
    assert done.returncode == 0, done.stderr
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
    cfg = composed(f"+experiment=smoke_{family}")
    backbone, sampling = sketch(cfg.model, "cpu"), Sampling(**cfg.model.sampling)
    prompts = backbone.encode_prompts(["a dog", "a cat"])
    tokens = Decoder(Autoregressive()).bind(backbone)(backbone, prompts, [0, 1], sampling).tokens
    assert negative_log_likelihood(backbone, prompts, tokens, sampling).max() < 3  # nats; ln 64 is 4.2


# -- without a network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [Janus, Lumina, Emu3])
def test_a_checkpoint_that_is_not_there_says_what_to_do(adapter):
    with pytest.raises(FileNotFoundError) as error:
        adapter.load("somebody/nothing")
    assert re.search(r"the checkpoint somebody/nothing is no directory here.*HF_HUB_OFFLINE is set", str(error.value))
    assert re.search(r"run `hf download somebody/nothing`.*model.backbone.checkpoint=DIRECTORY", str(error.value))


def test_the_command_says_it_too(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {i}" for i in range(99)))
    done = command(
        tmp_path, "+model=janus_pro_1b", "model.prompts.path=prompts.txt",
        "stages=[cache]", "cache.samples=60",
        "model.architecture=null",  # or a machine of little memory would be refused for that
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "run `hf download deepseek-community/Janus-Pro-1B`" in done.stderr


def test_without_the_published_prompts_the_command_says_what_to_do(tmp_path):
    """Before the checkpoint is even looked for."""
    done = command(tmp_path, "+model=emu3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no prompts to be had from vivym/midjourney-prompts" in done.stderr
    assert "set model.prompts.path to a file of your own" in done.stderr
    assert "checkpoint" not in done.stderr


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache that holds a Lumina, as a download leaves it; no network."""
    repository = tmp_path / "hub" / "models--somebody--lumina"
    micro_lumina.save_as_published(micro_lumina.model(), repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository


def test_offline_a_cached_checkpoint_is_found(hub):
    made = Lumina.load("somebody/lumina", resolution=64, size=[32, 64], dtype="float64")
    assert made.fingerprint == Lumina.load(str(hub / "snapshots" / "0123abcd"), resolution=64).fingerprint


def test_a_revision_that_is_not_cached_is_named(hub):
    with pytest.raises(FileNotFoundError, match=r"`hf download somebody/lumina --revision 4567`"):
        Lumina.load("somebody/lumina", resolution=64, revision="4567")


def test_a_path_that_is_not_there_is_no_hub_id(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is no directory here"):
        Lumina.load(str(tmp_path / "nowhere"))


# -- the wrong folder ---------------------------------------------------------------------------------------------


ADAPTERS = {"janus": Janus, "chameleon": Lumina, "emu3": Emu3}


@pytest.mark.parametrize("family", ADAPTERS)
def test_a_folder_that_is_no_checkpoint_is_refused(family, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"has no config.json; expected a checkpoint of model_type {family}"):
        ADAPTERS[family].load(str(tmp_path))


@pytest.mark.parametrize("family", ADAPTERS)
@pytest.mark.parametrize("other", [*ADAPTERS, "llama"])
def test_a_checkpoint_of_another_family_is_refused(family, other, tmp_path):
    """By both that read a config.json."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": other}))
    stem = {"janus": "janus_pro_7b", "chameleon": "lumina", "emu3": "emu3"}[family]
    model = composed(f"+model={stem}", f"model.backbone.checkpoint={tmp_path}").model
    if other == family:
        assert sketch(model).name == stem
        return
    for read in (lambda: ADAPTERS[family].load(str(tmp_path)), lambda: sketch(model)):
        with pytest.raises(ValueError, match=f"config.json of .* says model_type {other}; expected {family}"):
            read()


def test_a_fork_s_own_name_for_a_family_passes(tmp_path):
    micro_lumina.save_as_published(micro_lumina.model(), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "chameleon_of_somebody"}))
    assert Lumina.load(str(tmp_path), resolution=64).width == 16


def test_a_lumina_without_a_tokenizer_is_told_where_one_is(tmp_path):
    micro_lumina.save_as_published(micro_lumina.model(), tmp_path, with_tokenizer=False)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json, .*set model.backbone.tokenizer=Alpha-VLLM/.*-768"):
        Lumina.load(str(tmp_path), resolution=64)


# -- the shipped yamls --------------------------------------------------------------------------------------------


def save_janus(folder):
    micro.janus_model(grid=(3, 3)).save_pretrained(folder)
    micro.generation_config().save_pretrained(folder)
    byte_tokenizer({"<pad>": 0}).save_pretrained(folder)


def save_emu3(folder):
    micro_emu3.model().save_pretrained(folder)
    micro_emu3.tokenizer().save_pretrained(folder)


SHIPPED = {
    "janus_pro_1b": (save_janus, []),
    "janus_pro_7b": (save_janus, []),
    "lumina": (lambda folder: micro_lumina.save_as_published(micro_lumina.model(), folder), ["resolution=64"]),
    "lumina_512": (lambda folder: micro_lumina.save_as_published(micro_lumina.model(), folder), ["resolution=64"]),
    "lumina_1024": (lambda folder: micro_lumina.save_as_published(micro_lumina.model(), folder), ["resolution=64"]),
    "emu3": (save_emu3, ["ratio='16:9'", "area=64"]),
}


@pytest.mark.parametrize("model", SHIPPED)
def test_a_shipped_yaml_loads_a_checkpoint(model, tmp_path):
    save, settings = SHIPPED[model]
    save(tmp_path / "checkpoint")
    tokenizer = [f"model.backbone.tokenizer={tmp_path}/checkpoint"] if "lumina_" in model else []
    run = Run(composed(
        f"+model={model}", f"model.backbone.checkpoint={tmp_path}/checkpoint", f"output={tmp_path}/run", *tokenizer,
        "head.k_horizontal=1", "head.k_vertical=1", *(f"++model.backbone.{setting}" for setting in settings),
    ))  # fmt: skip
    assert run.backbone.name == model
    assert run.backbone.width == 16
    assert run.backbone.dtype is torch.bfloat16
    assert str(run.backbone.device) == "cpu"
    assert run.backbone.encode_prompts(["a dog"]).ids.shape[:2] == (2, 1)


@pytest.mark.parametrize("model", SHIPPED)
def test_a_shipped_yaml_trains_in_mixed_precision(model):
    assert composed(f"+model={model}").train.precision == "bf16-mixed"
    assert composed(f"+model={model}", "train.precision=32-true").train.precision == "32-true"


def test_other_models_train_in_float32():
    assert composed("+model=tiny").train.precision == "32-true"


@pytest.mark.filterwarnings("ignore:.*(exists and is not empty|does not have many|LeafSpec|Cannot dispatch to fused)")
@pytest.mark.parametrize("family", GRIDS)
def test_the_recipe_s_numbers_train_and_resume(family, tmp_path, monkeypatch):
    """A bfloat16 backbone, heads in mixed precision: cut off at step 3, and on to the weights of an unbroken run."""

    def make(output):
        return Run(composed(
            f"+experiment=smoke_{family}", "model.backbone.dtype=bfloat16", "train.precision=bf16-mixed",
            "train.checkpoint_every=1", f"cache.dir={tmp_path}/cache", f"output={tmp_path}/{output}",
        ))  # fmt: skip

    whole, broken = make("whole"), make("broken")
    STAGES["cache"].run(whole)
    STAGES["train"].run(whole)
    step = HeadModule.training_step

    def failing(self, batch, batch_idx):
        if self.global_step == 3:
            raise KeyError
        return step(self, batch, batch_idx)

    monkeypatch.setattr(HeadModule, "training_step", failing)
    with pytest.raises(KeyError):
        STAGES["train"].run(broken)
    monkeypatch.setattr(HeadModule, "training_step", step)
    STAGES["train"].run(make("broken"))
    a, b = (torch.load(run.checkpoint, weights_only=True) for run in (whole, broken))
    assert a["global_step"] == b["global_step"] == 5
    assert all(torch.equal(b["state_dict"][key], tensor) for key, tensor in a["state_dict"].items())
    assert {tensor.dtype for tensor in a["state_dict"].values()} == {torch.float32}


@pytest.mark.parametrize("model", SHIPPED)
def test_a_shipped_yaml_names_its_prompts(model):
    prompts = instantiate(composed(f"+model={model}").model.prompts)
    assert (prompts.path, prompts.column) == ("vivym/midjourney-prompts", "prompt")


# -- the guide's example -----------------------------------------------------------------------------------------


def test_the_example_is_short():
    assert len(Path(example_backbone.__file__).read_text().splitlines()) < 150


def readme_yaml():
    return yaml.safe_load(re.search(r"```yaml\n(.*?)```", backbones.__doc__, re.DOTALL)[1])


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
