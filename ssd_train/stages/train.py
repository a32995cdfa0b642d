"""Shards -> trained heads."""

import logging

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, TQDMProgressBar
from omegaconf import OmegaConf

from ssd_train.datamodule import HeadDataModule
from ssd_train.heads import Heads, HeadSpec
from ssd_train.module import HeadModule
from ssd_train.prompts import Split
from ssd_train.run import Run

log = logging.getLogger(__name__)


def run(run: Run) -> float:
    """Returns the mean acceptance rate over heads on the validation prompts."""
    summary = run.read_json("training.json")
    if summary and summary["fingerprint"] == run.train_fingerprint:
        log.info("heads in %s are trained already", run.checkpoint_dir)
        return summary["validation"]["validation/acceptance"]
    cfg = run.cfg.train
    data = HeadDataModule(
        run.cache_dir, run.cfg.cache.samples, cfg.batch_size, cfg.shuffle_buffer, cfg.workers, run.cfg.seed,
        cfg.validation_samples,
    )  # fmt: skip
    heads = make_heads(run, data)
    parameters = sum(p.numel() for p in heads.parameters())
    trainer = make_trainer(run, data)
    steps = data.steps(cfg.epochs, trainer.world_size)
    log.info(
        "training %d heads (%.1fM parameters) on %d samples for %d steps; %d validation samples",
        len(heads.predictors), parameters / 1e6, data.counts[Split.TRAIN], steps, data.validation_samples,
    )  # fmt: skip
    module = HeadModule(heads, run.backbone.output, run.backbone.grid, run.sampling, run.cfg.head, steps, run.cfg.seed)
    trainer.fit(module, data, ckpt_path=_resume_from(run))
    trainer.save_checkpoint(run.checkpoint_dir / "final.ckpt", weights_only=True)
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validation")}
    run.write_json(
        "training.json",
        {
            "fingerprint": run.train_fingerprint,
            "steps": steps,
            "samples": data.counts[Split.TRAIN],
            "heads": heads.config(),
            "validation": metrics,
        },
    )
    return metrics["validation/acceptance"]


def make_heads(run: Run, data: HeadDataModule) -> Heads:
    cfg, backbone = run.cfg.head, run.backbone
    state_scale, embedding_scale = data.scales(backbone.output.embedding)
    torch.manual_seed(run.cfg.seed)
    return Heads(
        HeadSpec(
            width=backbone.width,
            vocabulary=backbone.vocabulary,
            k_horizontal=cfg.k_horizontal,
            k_vertical=cfg.k_vertical,
            hidden=cfg.hidden or 0,
            space=cfg.space.name,
            state_scale=state_scale,
            embedding_scale=embedding_scale,
        )
    )


def make_trainer(run: Run, data: HeadDataModule) -> L.Trainer:
    cfg = run.cfg.train
    steps = data.steps(cfg.epochs)
    callbacks: list[Callback] = [
        ModelCheckpoint(
            run.checkpoint_dir, filename="step-{step}", every_n_train_steps=cfg.checkpoint_every, save_last=True,
            enable_version_counter=False,
        ),
        TQDMProgressBar(refresh_rate=max(1, steps // 200)),
    ]  # fmt: skip
    if run.cfg.head.ema is not None:
        callbacks.append(EMAWeightAveraging(decay=run.cfg.head.ema))
    logger = instantiate(run.cfg.logger) if run.cfg.logger else False
    if logger:
        logger.log_hyperparams(OmegaConf.to_container(run.cfg, resolve=True, enum_to_str=True))
    return L.Trainer(
        accelerator="gpu" if run.device.type == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        precision=cfg.precision,
        gradient_clip_val=cfg.gradient_clip,
        val_check_interval=min(cfg.validate_every, steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=min(10, steps),
        callbacks=callbacks,
        logger=logger,
        default_root_dir=run.output,
        enable_model_summary=False,
        **cfg.trainer,
    )


def _resume_from(run: Run) -> str | None:
    """The last checkpoint, if it is of this very training run; another one's is left alone and not resumed."""
    marker = run.read_json("checkpoints/of.json")
    last = run.checkpoint_dir / "last.ckpt"
    if last.exists() and marker == {"fingerprint": run.train_fingerprint}:
        log.info("resuming from %s", last)
        return str(last)
    run.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    for stale in run.checkpoint_dir.glob("*.ckpt"):
        stale.unlink()
    run.write_json("checkpoints/of.json", {"fingerprint": run.train_fingerprint})
    return None
