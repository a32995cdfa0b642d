"""Trained heads -> safetensors."""

import logging

import torch

from ssd_train.export import HeadsError, load_heads, save_heads
from ssd_train.heads import Heads, HeadSpec
from ssd_train.run import Run

log = logging.getLogger(__name__)


def run(run: Run) -> None:
    summary = run.read_json("training.json")
    checkpoint = run.checkpoint_dir / "final.ckpt"
    if summary is None or not checkpoint.exists():
        raise HeadsError(f"{run.output} holds no finished training; run the train stage first")
    weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    heads = Heads(HeadSpec(**summary["heads"]))
    heads.load_state_dict({key.removeprefix("heads."): tensor for key, tensor in weights.items()})
    directory = run.output / "heads"
    training = {key: summary[key] for key in ("fingerprint", "steps", "samples", "validation")}
    save_heads(directory, heads, run.backbone, training | {"cache": str(run.cache_fingerprint)})
    load_heads(directory, run.backbone)
    log.info("exported %d heads to %s", len(heads.predictors), directory)
