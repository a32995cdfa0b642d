"""Trained heads -> safetensors."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from ssd_train.config import Stage, cache_fingerprint
from ssd_train.heads.export import HeadsError, load_heads, read_config, save_heads
from ssd_train.heads.predictors import Heads, HeadSpec
from ssd_train.processes.files import DamagedFile, read_json
from ssd_train.runs.run import Run
from ssd_train.runs.tracking import log_heads
from ssd_train.training.checkpoints import read_checkpoint

log = logging.getLogger(__name__)


def check(run: Run) -> None:
    if Stage.train not in run.cfg.stages:
        _summary(run)


def run(run: Run) -> None:
    if run.world.rank > 0:
        return
    run.remove_strays()
    summary = _summary(run)
    directory = run.output / "heads"
    training = {key: summary[key] for key in ("fingerprint", "steps", "samples", "validation")}
    training |= {"cache": cache_fingerprint(run.cfg), "dtype": run.cfg.export.dtype.name}
    if _is_exported(run, directory, training):
        log.info("heads are exported already to %s", directory)
        return
    weights = _weights(run, summary["steps"])
    heads = Heads(HeadSpec(**summary["heads"]))
    heads.load_state_dict({key.removeprefix("heads."): tensor for key, tensor in weights.items()})
    heads.to(getattr(torch, run.cfg.export.dtype.name))
    save_heads(directory, heads, run.backbone, training)
    load_heads(directory, run.backbone)
    log.info("exported %d heads to %s", len(heads.predictors), directory)
    log_heads(run.logger, directory, run.cache_dir)


def _summary(run: Run) -> dict:
    """What the train stage wrote when it had finished. Raises HeadsError if that was never, or other heads."""
    summary = read_json(run.output / "training.json", "run the train stage again", HeadsError)
    if summary is not None and summary["fingerprint"] != run.train_fingerprint:
        raise HeadsError(f"{run.output} holds heads trained with other settings; run the train stage first")
    if summary is None or not run.checkpoint.exists():
        raise HeadsError(f"{run.output} holds no finished training; run the train stage first")
    return summary


def _weights(run: Run, steps: int) -> dict[str, Tensor]:
    """Those that training ended with. Raises HeadsError if the checkpoint is damaged, or of another step."""
    try:
        checkpoint = read_checkpoint(run.checkpoint, "cpu")
    except DamagedFile as error:
        raise HeadsError(f"{error}, and run the train stage again") from error
    if checkpoint["global_step"] != steps:
        raise HeadsError(
            f"{run.checkpoint} is of step {checkpoint['global_step']}; expected {steps}; run the train stage again"
        )
    return checkpoint["state_dict"]


def _is_exported(run: Run, directory: Path, training: dict) -> bool:
    try:
        load_heads(directory, run.backbone)
    except HeadsError as error:
        if directory.exists():
            log.warning("%s; they are exported now", error)
        return False
    return read_config(directory)["training"] == training
