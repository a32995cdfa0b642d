"""Every yaml composes and fits what it names; every mistake is answered with its name before any work is done."""

import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from ssd_train import config
from ssd_train.config import Space
from ssd_train.decoding.engine import Decoder
from ssd_train.runs.run import Run
from ssd_train.stages.decode import curves

config.register()
ROOT = Path(__file__).parents[1]
MODELS, EXPERIMENTS = config.choices("model"), config.choices("experiment")


def composed(*overrides):
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return compose("config", list(overrides), return_hydra_config=False)


def fits(node):
    """The target of a node can be imported, and takes the node's arguments."""
    target = get_object(node["_target_"])
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    bind = inspect.signature(target).bind_partial if node.get("_partial_") else inspect.signature(target).bind
    bind(**arguments)


# -- every yaml ---------------------------------------------------------------------------------------------------


def test_all_groups_are_looked_at():
    groups = {path.name for path in config.conf_dir().iterdir() if path.is_dir()}
    assert groups == {"model", "head", "decoder", "logger", "experiment", "suite"}
    assert {"tiny", "janus_pro_1b", "janus_pro_7b", "lumina", "emu3"} <= set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_yaml_fits_its_adapter(model):
    """Its checkpoint need not be here: only signatures are compared."""
    cfg = composed(f"+model={model}")
    config.check(cfg)
    run = Run(cfg)
    assert run.sampling.guidance >= 1
    node = OmegaConf.to_container(cfg.model, resolve=True)
    fits(node["backbone"] | {"name": node["name"], "device": "cpu"})
    fits(node["prompts"])
    for optional in "scorer", "category", "features":
        if node.get(optional):
            fits(node[optional])
    assert cfg.output == f"runs/{node['name']}"
    assert run.cache_dir.name.startswith(f"{node['name']}-")
    instantiate(cfg.model.prompts)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes(experiment):
    text = yaml.safe_load((config.conf_dir() / f"experiment/{experiment}.yaml").read_text())
    model = [] if "model" in text else ["+model=tiny"]
    cfg = composed(*model, f"+experiment={experiment}")
    config.check(cfg)
    node = OmegaConf.to_container(cfg.model, resolve=True)
    fits(node["backbone"] | {"name": node["name"], "device": "cpu"})
    assert "mean nothing" in cfg.note


@pytest.mark.parametrize("head", config.choices("head"))
def test_a_head_yaml_composes(head):
    cfg = composed("+model=tiny", f"head={head}")
    config.check(cfg)
    assert cfg.head.space is (Space.token if head == "token" else Space.latent)


def test_the_published_recipe_is_the_default():
    """arXiv 2606.20543: five heads a direction of width 2d, Smooth L1, 10 % condition drop, AdamW, three epochs."""
    cfg = composed("+model=janus_pro_7b")
    assert (cfg.head.k_horizontal, cfg.head.k_vertical, cfg.head.hidden) == (5, 5, None)
    assert dict(cfg.head.loss) == {"smooth_l1": 1.0, "total_variation": 0.0, "kl": 0.0}
    assert (cfg.head.condition_drop, cfg.head.weight_decay, list(cfg.head.betas)) == (0.1, 0.01, [0.9, 0.95])
    assert (cfg.head.lr, cfg.head.min_lr, cfg.head.warmup_steps, cfg.head.context) == (1e-4, 1e-5, 20, 1)


@pytest.mark.parametrize("decoder", config.choices("decoder"))
def test_a_decoder_yaml_builds(decoder):
    cfg = composed("+model=tiny", f"decoder=[{decoder}]")
    assert list(cfg.decoder) == [decoder]
    assert isinstance(instantiate(cfg.decoder[decoder]), Decoder)


def test_drafts_reach_as_far_as_there_are_heads():
    """So that a sweep over head.k_horizontal decodes as well."""
    cfg = composed("+model=tiny", "decoder=[ssd,mtp]", "head.k_horizontal=3")
    assert instantiate(cfg.decoder.ssd).schedule.chunk == 3
    assert instantiate(cfg.decoder.mtp).schedule.length == 3


@pytest.mark.parametrize("logger", config.choices("logger"))
def test_a_logger_yaml_builds(logger, tmp_path):
    cfg = composed("+model=tiny", f"logger={logger}", f"output={tmp_path}")
    fits(OmegaConf.to_container(cfg.logger, resolve=True))
    if logger == "tensorboard" and not importlib.util.find_spec("tensorboard"):
        # An optional extra: without it the refusal must say what to install.
        with pytest.raises(InstantiationException, match="tensorboard"):
            instantiate(cfg.logger)
    else:
        instantiate(cfg.logger)


def test_no_yaml_names_a_machines_path():
    for path in config.conf_dir().rglob("*.yaml"):
        assert not re.search(r"(^|[\s\"'=])/(home|work|root|tmp|mnt|data)/", path.read_text()), path


# -- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, message",
    [
        ("head.k_horizntal=3", r"head has no setting k_horizntal; did you mean k_horizontal\? There are k_horizontal"),
        ("+cache.sample=3", r"cache has no setting sample; did you mean samples\? There are dir, source, samples"),
        ("head.loss.l1=3", r"head.loss has no setting l1; .*There are smooth_l1, total_variation, kl"),
        ("sed=3", r"the configuration has no setting sed; did you mean seed\?"),
        ("trian.epochs=3", r"the configuration has no setting trian; did you mean train\?"),
    ],
)
def test_a_typo_is_answered_with_the_settings_there_are(override, message):
    with pytest.raises(ValueError, match=re.escape(override) + ": " + message):
        config.explain_typos(["+model=tiny", override])


def test_what_is_no_typo_passes():
    config.explain_typos(
        [
            *("-m", "--cfg", "job", "+model=tiny", "decoder=[ar,ssd]", "decoder.ssd.schedule.rounds=1,2", "head=token"),
            *("head.loss.kl=0.1", "+train.trainer.max_time=00:01:00:00", "~model.scorer", "hydra/launcher=basic"),
            *("hydra.verbose=true", "model.backbone.whatever=1", "output=x", "+experiment=smoke", "head.betas=[0,0]"),
        ]
    )


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Command line -> what ``python -m ssd_train`` exits with: None, or its error message."""
    from ssd_train import __main__ as module

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ssd_train", *arguments])
        try:
            module.main()
        except SystemExit as exit:
            return exit.code
        return None

    yield call
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def nothing_runs(monkeypatch):
    """Loading a backbone, or starting a stage, is a failure."""
    from ssd_train.stages import STAGES

    def too_late(*_):
        raise AssertionError("work has begun")

    monkeypatch.setattr(Run, "backbone", property(too_late))
    for stage in STAGES.values():
        monkeypatch.setattr(stage, "run", too_late)


def test_without_a_model_the_choices_are_listed(main, nothing_runs):
    assert main() == f"no model: add +model=<name>, one of {', '.join(MODELS)}"


@pytest.mark.parametrize(
    "override, message",
    [
        ("cache.samples=0", "cache.samples is 0; expected at least 1"),
        ("cache.samples=6", "none of the first 6 prompts is a validation one; raise cache.samples"),
        ("cache.batch_size=-1", "cache.batch_size is -1; expected at least 1"),
        ("cache.source=images model.prompts._target_=test_config.Captions", "model.prompts gives no images"),
        ("train.batch_size=0", "train.batch_size is 0; expected at least 1"),
        ("train.workers=-1", "train.workers is -1; expected at least 0"),
        ("train.epochs=0", "train.epochs is 0.* expected more than 0"),
        ("train.checkpoint_every=0", "train.checkpoint_every is 0; expected at least 1"),
        ("train.precision=fp8", "train.precision=fp8.*'bf16-mixed'"),
        ("+train.trainer.presicion=1", "train.trainer={'presicion': 1}: .*unexpected keyword argument 'presicion'"),
        ("head.k_horizontal=0 head.k_vertical=0 decoder=ar", "are both 0; expected at least one head"),
        ("head.k_vertical=-2", "head.k_vertical is -2; expected at least 0"),
        ("head.hidden=0", "head.hidden is 0; expected at least 1"),
        ("head.context=2", "head.context is 2; expected an odd number of neighbours, 1 or more"),
        ("head.condition_drop=1.5", "head.condition_drop is 1.5; expected a share between 0 and 1"),
        ("head.lr=1e-6", "head.min_lr=1e-05, head.lr=1e-06; expected 0 < min_lr <= lr"),
        ("head.betas=[0.9]", r"head.betas is \[0.9\]; expected two numbers in \[0, 1\)"),
        ("head.ema=1.0", "head.ema is 1.0; expected a decay between 0 and 1, or null for none"),
        ("head.loss.smooth_l1=0", "every weight in head.loss is 0; expected at least one above 0"),
        ("head.loss.kl=-1", "head.loss.kl is -1.0; expected at least 0"),
        ("model.sampling.temperature=-1", "sampling.temperature is -1; expected >= 0"),
        ("model.sampling.top_p=0", r"sampling.top_p is 0; expected in \(0, 1\]"),
        ("decode.timed_images=0", "decode.timed_images is 0; expected at least 1"),
        ("decode.heads=nowhere", r"nowhere holds no exported heads \(no config.json\)"),
        ("decode.prompts=5000 model.prompts._target_=test_config.Captions", "5000 test prompts wanted.*holds 1"),
        ("decoder.ssd.schedule.rounds=-1", "decoder ssd: .*rounds is -1; expected >= 0"),
        ("decoder.ssd.rule._target_=ssd_train.nowhere", "decoder ssd: .*ssd_train.nowhere"),
        (
            "decode.vary=['sd.schedule.rounds=1']",
            r"decode.vary holds 'sd.schedule.rounds=1'; .*\['ar', 'ssd', 'ssd_corrected'\]",
        ),
        ("decode.vary=['ssd.schedule.round=1']", "decode.vary: ssd has no setting schedule.round"),
        ("++model.scorer._target_=ssd_train.nowhere", "ssd_train.nowhere"),
        ("logger._target_=ssd_train.nowhere", "ssd_train.nowhere"),
        ("stages=[]", "stages is empty; expected some of .*'cache', 'train', 'export', 'decode'"),
        ("stages=[export]", "runs/tiny holds no finished training; run the train stage first"),
        ("device=gpu", "device is 'gpu'; expected auto, cpu, cuda or cuda:<number>"),
        ("threads=0", "threads is 0; expected at least 1"),
    ],
)
def test_a_bad_value_is_named_before_anything_is_done(main, nothing_runs, override, message):
    error = main("+model=tiny", *override.split(" "))
    assert re.search(message, error, re.DOTALL), error
    assert re.match(r"\w+(Error|Exception): ", error)


class Captions:
    def __iter__(self):
        from ssd_train.prompts import Prompt

        return (Prompt(i, f"prompt {i}") for i in range(10_000))


def test_cuda_asked_for_but_absent(main, nothing_runs, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = main("+model=tiny", "device=cuda")
    assert re.fullmatch(
        r"ValueError: device=cuda, but torch .* finds no CUDA device; use device=cpu or device=auto", error
    )


def test_a_value_of_the_wrong_kind_fails_when_composing_with_the_valid_ones(main, capsys):
    for override, valid in {
        "head.space=latnt": "expected one of [latent, token]",
        "cache.dtype=int4": "expected one of [float32, bfloat16, int8]",
        "stages=[cach]": f"expected one of [{', '.join(stage.name for stage in config.Stage)}]",
    }.items():
        assert main("+model=tiny", override) == 1
        assert valid in capsys.readouterr().err


def command_line(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "ssd_train", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_command_line_exits_with_one_and_one_message(tmp_path):
    done = command_line("+model=tiny", "head.k_verticl=3", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"head.k_verticl=3: head has no setting .*did you mean k_vertical\?.*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_heads_that_reach_over_the_grid_are_refused_before_anything_is_cached(make_run, tmp_path):
    from ssd_train.stages import cache, train

    for override in "head.k_horizontal=4", "head.k_vertical=4":
        for stage in cache, train:
            with pytest.raises(ValueError, match=r"expected less than the width and height of micro's 4x4 grid"):
                stage.run(make_run(tmp_path, override))
        assert list((tmp_path / "cache").glob("*.tar")) == []


# -- whole runs ---------------------------------------------------------------------------------------------------


CORRECTOR = "head.corrector.width=8", "head.corrector.pairs=16"


@pytest.fixture
def micro_experiment(settings, tmp_path):
    """The micro run as an experiment yaml of a user's own folder, found with --config-dir."""
    lines = [
        line.lstrip("+") for line in settings(tmp_path, *CORRECTOR) if line != "+model=tiny" and line != "decoder=ar"
    ]
    cfg = OmegaConf.from_dotlist([line for line in lines if line != "logger=csv"])
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "micro.yaml").write_text("# @package _global_\n" + OmegaConf.to_yaml(cfg))
    return ["--config-dir", str(tmp_path / "own"), "+model=tiny", "+experiment=micro", "train.epochs=1"]


def test_a_run_goes_from_prompts_to_a_report(main, micro_experiment, tmp_path):
    """And again: nothing is made twice. The note stands in the report."""
    arguments = [*micro_experiment, "decode.vary=['ssd.schedule.rounds=0']", "note='only a trial'"]
    assert main(*arguments) is None
    report = json.loads((tmp_path / "run/decode/report.json").read_text())
    assert set(report["decoders"]) == {"ar", "ssd", "ssd rounds=0", "ssd_corrected"}
    assert report["note"] == "only a trial"
    assert "only a trial" in (tmp_path / "run/decode/report.md").read_text()
    made = [*(tmp_path / "run/checkpoints").iterdir(), tmp_path / "run/heads/model.safetensors"]
    made += [tmp_path / f"cache/0000{i}.tar" for i in range(3)]
    before = [path.stat().st_mtime_ns for path in made]
    assert main(*arguments) is None
    assert [path.stat().st_mtime_ns for path in made] == before


def test_a_decoder_and_its_variations_are_one_curve():
    decoders = {"ar": {}, "ssd": {"schedule": {"rounds": 2}}, "csd": {"rule": {"threshold": 0.65, "strength": 0.5}}}
    vary = ["ssd.schedule.rounds=0,1", "csd.rule.threshold=0.2", "csd.rule.strength=1.5"]
    run = SimpleNamespace(cfg=OmegaConf.create({"decoder": decoders, "decode": {"vary": vary}}))
    csd = "csd (threshold, strength)"
    assert curves(run) == [
        ("ar", ""), ("ssd (rounds)", "2"), (csd, "0.65, 0.5"), ("ssd (rounds)", "0"), ("ssd (rounds)", "1"),
        (csd, "0.2, 0.5"), (csd, "0.65, 1.5"),
    ]  # fmt: skip


def test_a_sweep_has_a_folder_a_run_and_one_cache(main, micro_experiment, tmp_path):
    """Readable names that are the same the next time; each run keeps its own heads."""
    arguments = ["-m", *micro_experiment, "stages=[cache,train,export]", "head.lr=1e-3,2e-3", "head.k_horizontal=1,2"]
    assert main(*arguments) is None
    common = "+experiment=micro,+model=tiny,head.k_horizontal={},head.lr={},train.epochs=1"
    names = {common.format(k, lr) for k in (1, 2) for lr in ("0.001", "0.002")}
    sweep = tmp_path / "run-sweep"
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == names
    for name in names:
        heads = json.loads((sweep / name / "heads/config.json").read_text())["heads"]
        assert f"head.k_horizontal={heads['k_horizontal']}," in name
        assert (sweep / name / "csv/version_0/metrics.csv").exists()
    assert len({(sweep / name / "heads/model.safetensors").read_bytes() for name in names}) == 4
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 3
    assert not (tmp_path / "run").exists()
    written = {path: path.stat().st_mtime_ns for path in sweep.rglob("*.ckpt")}
    assert main(*arguments) is None
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*.ckpt")} == written


def test_a_sweep_folder_is_one_short_enough_name():
    folder = OmegaConf.create({"name": "${folder:${overrides}}", "overrides": "a=1,b=/x/y"})
    assert folder.name == "a=1,b=_x_y"
    long = [OmegaConf.create({"name": "${folder:${o}}", "o": "key=" + "v" * 300 + end}).name for end in "ab"]
    assert all(len(name) < 255 and "/" not in name for name in long)
    assert long[0] != long[1]


@pytest.mark.parametrize("arguments", [["--help"], ["-h", "+model=tiny"], []])
def test_help_names_everything_on_a_line_each(tmp_path, arguments):
    done = command_line(*arguments, cwd=tmp_path)
    assert done.returncode == (0 if arguments else 1)
    assert ("no model: add +model=<name>" in done.stderr) is not bool(arguments)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    names = [stage.name for stage in config.Stage] + config.choices("model") + config.choices("decoder")
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if re.match(r"  \w+ {2,}\S", line)}
    assert list(said) == names
    assert said["ssd"] == "Spatially Speculative Decoding (arXiv 2606.20543) with Janus-Pro's published settings"
    assert done.stdout.count("python -m ssd_train ") == 4


@pytest.mark.slow
def test_the_smoke_experiment_runs_every_stage(tmp_path):
    """On the shipped weights, from the command line; its figures mean nothing and it says so."""
    done = command_line("+model=tiny", "+experiment=smoke", "threads=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "runs/tiny-smoke/decode/report.json").read_text())
    assert set(report["decoders"]) == {"ar", "ssd", "ssd_corrected"}
    assert report["decoders"]["ar"]["passes"] == 256
    assert all(decoder["distance"]["to_ar"] > 0 for decoder in report["decoders"].values())
    for text in done.stdout, (tmp_path / "runs/tiny-smoke/decode/report.md").read_text(), report["note"]:
        assert "figures mean nothing" in text
    noise = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"[Ww]arning|Tip:|litlogger", line)]
    assert noise == []


@pytest.mark.parametrize("url", ["https://me:secret@host/cache", "s3://secret@bucket", "https://host/cache?key=secret"])
@pytest.mark.parametrize("name", ["cache.dir", "+model.prompts.path", "++logger.base_url"])
def test_a_secret_in_a_url_is_refused_before_a_file_is_written(name, url):
    with pytest.raises(ValueError, match=r"is a URL with a user, password or query.*\(~/.netrc\)") as caught:
        config.explain_typos([f"{name}={url}"])
    assert "secret" not in str(caught.value)
