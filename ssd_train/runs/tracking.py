"""What a run's logger gets beside the metrics of training: who it is, throughput, decoding figures, pictures and heads.

Every logger gets what it can hold; files keep the rest. W&B needs neither an account nor a network as configured:
``wandb sync`` sends what was logged, whenever. No key is read or written here.
"""

import logging
import secrets
import subprocess
import sys
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
from hydra.utils import get_class, instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf
from PIL import Image

from ssd_train.config import Config
from ssd_train.evaluation.report import table_markdown
from ssd_train.heads.export import read_config
from ssd_train.processes.files import read_json, write_json
from ssd_train.training.datamodule import Batch

log = logging.getLogger(__name__)

FIGURES = "passes", "step_speedup", "wall_speedup", "draft_fraction", "nll", "nll_distance", "scene_score"


class Throughput(Callback):
    """Logs, over the last ``log_every_n_steps`` batches, ``train/samples_per_second`` of all processes, and
    ``train/loader_wait``, the share of the time that the first process waited for its data loader.

    Steps end on the clock because the training step looks at its loss. Batches after which a validation or a checkpoint
    took the time are left out.
    """

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.batches: deque[tuple[int, float, float]] = deque(maxlen=trainer.log_every_n_steps)  # samples, wait, all
        self.asked = self.given = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, batch_idx: int) -> None:
        self.given = perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Batch,
                           batch_idx: int) -> None:  # fmt: skip
        now = perf_counter()
        if self.asked is not None:
            self.batches.append((len(batch["index"]) * trainer.world_size, self.given - self.asked, now - self.asked))
            samples, wait, everything = map(sum, zip(*self.batches, strict=True))
            self.log_dict({"train/samples_per_second": samples / everything, "train/loader_wait": wait / everything})
        self.asked = now

    def on_validation_start(self, *_: Any) -> None:
        self.asked = None

    on_save_checkpoint = on_validation_start


def check(cfg: Config) -> None:
    """Raises InstantiationException for a logger that is not there."""
    if cfg.logger:
        instantiate(cfg.logger)


def make_logger(cfg: Config, output: Path, training: str, first: bool) -> Logger | None:
    """The configured logger, told the whole configuration and the state of the code. ``output`` is the run's folder,
    ``training`` the fingerprint of its training, ``first`` whether this is the first process. Raises RuntimeError if
    W&B, when it is to be online, refuses."""
    if not cfg.logger:
        return None
    is_wandb = get_class(cfg.logger._target_) is WandbLogger
    logger = instantiate(cfg.logger, **(_wandb_identity(cfg, output, training, first) if is_wandb else {}))
    refusals: tuple[type[Exception], ...] = ()
    if is_wandb:
        import wandb

        refusals = (wandb.Error,)
    try:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True) | {"git": git_state()})
    except refusals as error:
        raise RuntimeError(f"W&B: {error} logger.offline=true needs neither an account nor a network.") from error
    return logger


def _wandb_identity(cfg: Config, output: Path, training: str, first: bool) -> dict[str, str]:
    """What the configuration does not say itself. A training that is resumed has the id it had; another one in the
    same folder, or in a folder that was emptied, is another run. The runs of a sweep are a group."""
    identity = {"name": output.name}
    if (output / "job.json").exists():
        identity["group"] = output.parent.name
    if first:
        ids = read_json(output / "wandb.json", "remove it to start a new W&B run") or {}
        if training not in ids:
            ids[training] = secrets.token_hex(4)
            write_json(output / "wandb.json", ids)
        identity["id"] = ids[training]
    return {key: value for key, value in identity.items() if cfg.logger.get(key) is None}


def git_state() -> dict[str, Any] | None:
    """{"commit", "dirty"} of the checkout that this code is part of; None where it is in none, as in a wheel."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


@rank_zero_only
def log_report(logger: Logger | None, contents: dict, directory: Path, step: int) -> None:
    """A comparison of decoders: the figures of report.json by decoder, their table, and the PNGs in the directory, all
    under the directory's name."""
    if logger is None:
        return
    figures = {}
    for name, entry in contents["decoders"].items():
        scored = entry | {"scene_score": (entry["scene_score"] or {}).get("value")}
        figures |= {f"{directory.name}/{name}/{key}": scored.get(key) for key in FIGURES}
    logger.log_metrics({key: value for key, value in figures.items() if value is not None}, step)
    table = table_markdown(contents)
    if hasattr(logger, "log_table"):
        columns, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines())
        logger.log_table(f"{directory.name}/report", columns, rows, step=step)
    elif hasattr(logger.experiment, "add_text"):
        logger.experiment.add_text(f"{directory.name}/report", table, step)
    log_images(logger, {f"{directory.name}/{path.stem}": path for path in sorted(directory.glob("[!.]*.png"))}, step)
    logger.save()


@rank_zero_only
def log_images(logger: Logger | None, images: dict[str, Path], step: int) -> None:
    """PNGs by name, where the logger shows pictures."""
    for name, path in images.items():
        if hasattr(logger, "log_image"):
            logger.log_image(name, [str(path)], step)
        elif hasattr(logger, "experiment") and hasattr(logger.experiment, "add_image"):
            logger.experiment.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")


@rank_zero_only
def log_heads(logger: Logger | None, directory: Path, cache_dir: Path | str) -> None:
    """To W&B: an export as an artifact, made from the cache whose manifest another artifact refers to. Offline W&B
    knows no inputs of a run, so there the manifest is logged as one more output."""
    if not isinstance(logger, WandbLogger):
        return
    import wandb

    where = cache_dir if isinstance(cache_dir, str) else cache_dir.resolve().as_uri()
    cache = wandb.Artifact(f"cache-{Path(cache_dir).name}", "cache", metadata={"directory": str(cache_dir)})
    cache.add_reference(f"{where}/manifest.json", checksum=isinstance(cache_dir, Path))
    metadata = read_config(directory)
    heads = wandb.Artifact(f"heads-{metadata['backbone']}", "model", metadata=metadata)
    heads.add_dir(str(directory))
    (logger.experiment.log_artifact if logger.experiment.offline else logger.experiment.use_artifact)(cache)
    logger.experiment.log_artifact(heads)


def finish(failed: bool) -> None:
    """Ends the W&B run, if there is one, so that the next job of a sweep gets its own; says how to send it."""
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return
    offline, parts = wandb.run.offline, Path(wandb.run.dir).parents[1] / f"offline-run-*-{wandb.run.id}"
    wandb.finish(exit_code=int(failed))
    if offline:
        log.info("to send this run to W&B: wandb sync %s", parts)
