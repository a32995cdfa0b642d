"""What loggers get: W&B for real and offline, without an account; the others what they can hold."""

import json
import logging
import struct
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb
from hydra.errors import InstantiationException
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record

from ssd_train.heads.export import read_config
from ssd_train.processes.files import read_json
from ssd_train.processes.world import World
from ssd_train.runs import tracking
from ssd_train.stages import decode, export, train

KEY = "0123456789abcdef" * 3

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{noise}")
    for noise in ("exists and is not empty", "does not have many workers", "LeafSpec", "Cannot dispatch to fused")
]


def records(folder):
    """What a W&B run left in its folder: a seven-byte header, then blocks of 32 KiB of chunks (checksum, length,
    whether first, middle or last of a record, bytes)."""
    (path,) = Path(folder).glob("*.wandb")
    content, found, parts, at = path.read_bytes(), [], [], 7
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its end
            found.append(Record.FromString(b"".join(parts)))
            parts = []
    return found


def complete(folder):
    """The same, once W&B's own process has written all of them."""
    deadline = time.monotonic() + 60
    while True:
        found = records(folder)
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline
        time.sleep(0.1)


def history(found):
    """{metric: its values} in the order of logging; a picture's or table's description is spread over several."""
    values = {}
    for record in found:
        for item in record.history.item:
            key = item.key or ".".join(item.nested_key)
            values.setdefault(key, []).append(json.loads(item.value_json))
    return values


@pytest.fixture(scope="module")
def tracked(make_run, cached, tmp_path_factory):
    """(folder of a sweep's job, records of its W&B run, hint): trained, exported and decoded offline, in a home without
    credentials; then trained and decoded again in another process's stead. A key in the environment is nobody's
    business."""
    directory = tmp_path_factory.mktemp("tracked")
    output = directory / "a-sweep" / "head.lr=0.001"
    output.mkdir(parents=True)
    (output / "job.json").write_text("{}")
    settings = [f"cache.dir={cached}/cache", f"output='{output}'", "logger=wandb", "train.epochs=1", "head.lr=1e-3",
                "decoder=[ar,ssd]", "train.validate_every=5", "train.checkpoint_every=7"]  # fmt: skip
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    tracking.log.addHandler(handler)
    tracking.log.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(directory / "home"))
        patch.setenv("WANDB_API_KEY", KEY)
        for name in "WANDB_MODE", "WANDB_DIR", "WANDB_SILENT", "NETRC":
            patch.delenv(name, raising=False)
        for stages in (train, export, decode), (train, decode):
            run = make_run(cached, *settings)
            for stage in stages:
                stage.run(run)
            tracking.finish(failed=False)
        patch.delenv("WANDB_MODE", raising=False)  # Lightning sets it
    tracking.log.removeHandler(handler)
    return output, [complete(path) for path in sorted(output.glob("wandb/offline-run-*"))], messages


def test_a_wandb_run_is_named_and_grouped_and_goes_on_in_a_later_process(tracked):
    output, found, _ = tracked
    starts = [next(record.run for record in part if record.HasField("run")) for part in found]
    assert [(s.project, s.run_group, s.display_name) for s in starts] == [("ssd_train", "a-sweep", "head.lr=0.001")] * 2
    (identity,) = read_json(output / "wandb.json").values()
    assert [start.run_id for start in starts] == [identity] * 2


def test_wandb_knows_the_configuration_and_the_code(tracked):
    _, found, _ = tracked
    updates = [record.config.update for record in found[0]] + [record.run.config.update for record in found[0]]
    config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for part in updates for item in part}
    assert config["head"]["lr"] == 1e-3
    assert config["model"]["name"] == "micro"
    assert config["git"] == tracking.git_state()


def test_wandb_gets_training_throughput_and_acceptance_by_offset(tracked):
    _, found, _ = tracked
    values = history(found[0])
    assert len(values["train/samples_per_second"]) == len(values["train/loss"]) == 1  # 14 steps, one in 10
    assert 0 <= values["train/loader_wait"][0] < 1
    for head in "horizontal_1", "horizontal_2", "vertical_1", "vertical_2":
        assert len(values[f"validation/acceptance/{head}"]) == 3  # at 5 and 10, and at the end


def test_wandb_gets_figures_table_and_pictures_of_decoding(tracked):
    output, found, _ = tracked
    report = json.loads((output / "decode" / "report.json").read_text())
    for part in found:
        values = history(part)
        assert values["decode/ssd/step_speedup"][-1] == pytest.approx(report["decoders"]["ssd"]["step_speedup"])
        for picture in "images", "acceptance_map_ssd", "acceptance", "speed_fidelity":
            assert values[f"decode/{picture}._type"] == ["images/separated"]
        assert values["decode/report.nrows"] == [2]


def test_wandb_has_the_heads_and_the_manifest_of_their_cache(tracked, cached):
    output, found, _ = tracked
    artifacts = {record.request.log_artifact.artifact.type: record.request.log_artifact.artifact for record in found[0]}
    artifacts |= {record.artifact.type: record.artifact for record in found[0] if record.HasField("artifact")}
    files = {entry.path: entry for entry in artifacts["model"].manifest.contents}
    assert set(files) == {"model.safetensors", "config.json", "README.md"}
    assert json.loads(artifacts["model"].metadata) == read_config(output / "heads")
    (manifest,) = artifacts["cache"].manifest.contents
    assert manifest.ref == (cached / "cache" / "manifest.json").as_uri()


def test_the_hint_sends_all_parts_of_a_run(tracked):
    _, found, messages = tracked
    hints = [message for message in messages if "wandb sync" in message]
    assert len(hints) == len(found) == 2
    assert hints[0] == hints[1]
    pattern = Path(hints[0].split("wandb sync ")[1])
    assert len(list(pattern.parent.glob(pattern.name))) == 2


def test_no_key_is_written(tracked):
    output, *_ = tracked
    files = [path for path in output.parents[1].rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_cache_elsewhere_is_referred_to_and_not_read(tmp_path, monkeypatch):
    """Where shards are streamed from an address, its manifest's stands in the artifact as it is."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(tracking, "read_config", lambda _: {"backbone": "micro"})
    logged = []
    logger = WandbLogger(offline=True)
    logger._experiment = SimpleNamespace(offline=False, use_artifact=logged.append, log_artifact=logged.append)
    tracking.log_heads(logger, tmp_path, "https://nowhere.invalid/caches/micro-1")
    (reference,) = logged[0].manifest.entries.values()
    assert reference.ref == "https://nowhere.invalid/caches/micro-1/manifest.json"
    assert [artifact.type for artifact in logged] == ["cache", "model"]


def test_a_logger_that_is_not_there_is_refused_before_anything_is_done(make_run, tmp_path):
    for stage in train, decode:
        with pytest.raises(InstantiationException, match=r"ssd_train\.nowhere"):
            stage.check(make_run(tmp_path, "logger._target_=ssd_train.nowhere"))


def test_wandb_online_without_an_account_says_what_to_do(make_run, tmp_path, monkeypatch):
    """A refusal of W&B's, such as that no key is there, is no traceback."""
    run = make_run(tmp_path, "logger=wandb", "logger.offline=false")

    def refuse(*_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(WandbLogger, "log_hyperparams", refuse)
    with pytest.raises(RuntimeError, match=r"W&B: No API key configured\. logger\.offline=true needs neither"):
        _ = run.logger


def test_csv_gets_what_it_can_hold(make_run, cached, tmp_path):
    """The figures of training and decoding, the configuration and the state of the code; and nothing crashes."""
    settings = f"cache.dir={cached}/cache", f"output={tmp_path}", "train.epochs=1", "decoder=[ar,ssd]", "logger=csv"
    run = make_run(cached, *settings)
    for stage in train, export, decode:
        stage.run(run)
    (log,) = tmp_path.glob("csv/version_*")
    header, *lines = (log / "metrics.csv").read_text().splitlines()
    columns = header.split(",")
    rows = [dict(zip(columns, line.split(","), strict=True)) for line in lines]
    for name in "train/samples_per_second", "validation/acceptance/vertical_1", "decode/ssd/step_speedup":
        assert [row[name] for row in rows if row[name]], name
    assert rows[-1]["step"] == "14"
    assert "dirty:" in (log / "hparams.yaml").read_text() or tracking.git_state() is None


def test_without_a_logger_nothing_is_logged(make_run, cached, tmp_path):
    run = make_run(cached, f"output={tmp_path}")
    run.cfg.logger = None
    assert run.logger is None
    tracking.log_images(None, {"a": tmp_path / "missing.png"}, 0)
    tracking.log_heads(None, tmp_path, tmp_path)
    tracking.log_report(None, {}, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


class Board(Logger):
    """A logger whose experiment is like tensorboard's."""

    name, version = "board", 0

    def __init__(self):
        self.images, self.texts, self.metrics = {}, {}, {}
        self.experiment = SimpleNamespace(
            add_image=lambda name, image, step, dataformats: self.images.update({name: (image, step, dataformats)}),
            add_text=lambda name, text, step: self.texts.update({name: (text, step)}),
        )

    experiment = None

    def log_metrics(self, metrics, step=None):
        self.metrics.update(metrics)

    def log_hyperparams(self, *_):
        raise AssertionError("not asked for")


def test_tensorboard_gets_pictures_and_the_table(tmp_path):
    directory = tmp_path / "benchmark"
    directory.mkdir()
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    Image.fromarray(pixels).save(directory / "images.png")
    (directory / ".images.png").write_bytes(b"half written")
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    entry = {
        **{"exact": True, "passes": 256.0, "draft_fraction": 0.0, "nll": 2.5, "scene_score": score},
        **{"step_speedup": None, "wall_speedup": None, "acceptance": {"by_round": {}}},
    }
    board = Board()
    tracking.log_report(board, {"grid": [16, 16], "decoders": {"ar": entry}}, directory, 7)
    figures = {"passes": 256.0, "draft_fraction": 0.0, "nll": 2.5, "scene_score": 0.5}
    assert board.metrics == {f"benchmark/ar/{name}": value for name, value in figures.items()}
    image, *rest = board.images["benchmark/images"]
    assert (image.tolist(), rest, len(board.images)) == (pixels.tolist(), [7, "HWC"], 1)
    text, step = board.texts["benchmark/report"]
    assert "| ar | yes | 256.0 |" in text
    assert step == 7


def test_a_run_that_is_no_sweeps_has_no_group_and_another_training_is_another_run(make_run, tmp_path):
    def logger(*overrides, **world):
        run = make_run(tmp_path, "logger=wandb", *overrides)
        return tracking._wandb_identity(run.cfg, run.output, run.train_fingerprint, first=World(**world).rank == 0)

    first = logger()
    assert set(first) == {"name", "id"}
    assert first["name"] == "run"
    assert logger() == first
    assert logger("head.lr=2e-3")["id"] != first["id"]
    assert logger() == first
    assert "id" not in logger(rank=1, size=2)
    assert logger("+logger.name=mine", "+logger.id=7") == {}


def test_git_state_is_the_checkouts(tmp_path, monkeypatch):
    """A commit, and whether files differ from it; none for code that no repository tracks."""

    def git(*arguments):
        who = "-c", "user.name=a", "-c", "user.email=a@b"
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(tracking, "__file__", str(tmp_path / "package" / "tracking.py"))
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert tracking.git_state() is None
    git("init", "--quiet")
    assert tracking.git_state() is None
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    assert tracking.git_state() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("changed")
    assert tracking.git_state()["dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert tracking.git_state() is None


def test_throughput_by_hand(monkeypatch):
    """Two processes, batches of 4, a step of 3 s and a wait of 1 s; then a wait of 5 s. What validation or a checkpoint
    took does not count; nor does what is further back than two batches."""
    clock, logged = [0.0], []
    monkeypatch.setattr(tracking, "perf_counter", lambda: clock[0])
    throughput, trainer = tracking.Throughput(), SimpleNamespace(log_every_n_steps=2, world_size=2)
    monkeypatch.setattr(throughput, "log_dict", logged.append, raising=False)

    def step(wait):
        clock[0] += wait
        throughput.on_train_batch_start(trainer, None, None, 0)
        clock[0] += 3
        throughput.on_train_batch_end(trainer, None, None, {"index": torch.zeros(4)}, 0)

    throughput.on_train_start(trainer, None)
    step(100)  # the first wait is the start-up
    step(1)
    step(5)
    throughput.on_validation_start(trainer, None)
    step(1000)
    throughput.on_save_checkpoint(trainer, None, {})
    step(1000)
    step(1)
    assert [figures["train/samples_per_second"] for figures in logged] == pytest.approx([8 / 4, 16 / 12, 16 / 12])
    assert [figures["train/loader_wait"] for figures in logged] == pytest.approx([1 / 4, 6 / 12, 6 / 12])


def test_a_logger_without_pictures_is_left_alone(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    logger = CSVLogger(tmp_path / "log")
    tracking.log_images(logger, {"a": tmp_path / "a.png"}, 0)
    assert not list(tmp_path.rglob("*.csv"))


def test_finishing_without_a_run_does_nothing(caplog):
    assert wandb.run is None
    tracking.finish(failed=True)
    assert caplog.records == []
