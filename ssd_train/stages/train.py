"""Shards -> trained heads."""

import logging
import zipfile

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from ssd_train.datamodule import HeadDataModule
from ssd_train.heads import Heads, HeadSpec
from ssd_train.module import HeadModule
from ssd_train.prompts import Split
from ssd_train.run import Run
from ssd_train.shards import ShardCache
from ssd_train.stages.cache import identity, require_reach

log = logging.getLogger(__name__)


class Progress(TQDMProgressBar):
    """Shows the whole training, also in a run that resumes one."""

    @property
    def total_train_batches(self) -> int:
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.total = self.total_train_batches
        bar.initial = bar.n = self.trainer.global_step * self.trainer.accumulate_grad_batches
        return bar


def check(run: Run) -> None:
    """Raises ValueError for settings that Lightning refuses, InstantiationException for a logger that is not there."""
    if run.cfg.logger:
        instantiate(run.cfg.logger)
    try:
        make_trainer(run, steps=1, logger=False)
    except (TypeError, ValueError, MisconfigurationException) as error:
        cfg = run.cfg.train
        raise ValueError(f"train.precision={cfg.precision}, train.trainer={cfg.trainer}: {error}") from error


def run(run: Run) -> float:
    """Returns the mean acceptance rate over heads on the validation prompts."""
    summary = run.read_json("training.json")
    if summary and summary["fingerprint"] == run.train_fingerprint and run.checkpoint.exists():
        log.info("heads in %s are trained already", run.output)
        return summary["validation"]["validation/acceptance"]
    cfg = run.cfg.train
    require_reach(run)
    ShardCache(run.cache_dir).check(identity(run))
    data = HeadDataModule(
        run.cache_dir, run.cfg.cache.samples, cfg.batch_size, cfg.shuffle_buffer, cfg.workers, run.cfg.seed,
        cfg.validation_samples,
    )  # fmt: skip
    heads = make_heads(run, data)
    parameters = sum(p.numel() for p in heads.parameters())
    steps = data.steps(cfg.epochs, cfg.trainer.get("accumulate_grad_batches", 1))
    trainer = make_trainer(run, steps, make_logger(run))
    log.info(
        "training %d heads (%.1fM parameters) on %d samples for %d steps; %d validation samples",
        len(heads.predictors), parameters / 1e6, data.counts[Split.TRAIN], steps, data.validation_samples,
    )  # fmt: skip
    module = HeadModule(heads, run.backbone.output, run.backbone.grid, run.sampling, run.cfg.head, steps, run.cfg.seed)
    trainer.fit(module, data, ckpt_path=_resume_from(run), weights_only=True)
    # With head.ema, a checkpoint's "state_dict" holds the averaged weights, and these are validated.
    trainer.save_checkpoint(run.checkpoint, weights_only=False)
    if trainer.global_step < steps:
        raise RuntimeError(f"training stopped at step {trainer.global_step} of {steps}; run the same command to go on")
    trainer.validate(module, data, verbose=False)
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validation")}
    log.info(
        "heads trained; acceptance on validation prompts %.3f: %s", metrics["validation/acceptance"],
        ", ".join(f"{key} {metrics[f'validation/acceptance/{key}']:.2f}" for key in heads.predictors),
    )  # fmt: skip
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
            context=cfg.context,
            state_scale=state_scale,
            embedding_scale=embedding_scale,
        )
    )


def make_logger(run: Run) -> Logger | bool:
    if not run.cfg.logger:
        return False
    logger = instantiate(run.cfg.logger)
    logger.log_hyperparams(OmegaConf.to_container(run.cfg, resolve=True, enum_to_str=True))
    return logger


def make_trainer(run: Run, steps: int, logger: Logger | bool) -> L.Trainer:
    cfg = run.cfg.train
    callbacks: list[Callback] = [
        ModelCheckpoint(
            run.checkpoint.parent, filename=run.checkpoint.stem, every_n_train_steps=cfg.checkpoint_every,
            enable_version_counter=False,
        ),
        Progress(refresh_rate=max(1, steps // 200)),
    ]  # fmt: skip
    if run.cfg.head.ema is not None:
        callbacks.append(EMAWeightAveraging(decay=run.cfg.head.ema))
    return L.Trainer(
        accelerator="gpu" if run.device.type == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        precision=cfg.precision,
        gradient_clip_val=cfg.gradient_clip,
        val_check_interval=cfg.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=min(10, steps),
        callbacks=callbacks,
        logger=logger,
        default_root_dir=run.output,
        enable_model_summary=False,
        **OmegaConf.to_container(cfg.trainer, resolve=True),
    )


def _resume_from(run: Run) -> str | None:
    """The checkpoint, if it is whole and of this very training run; else it is removed."""
    (run.output / "training.json").unlink(missing_ok=True)
    mine = {"fingerprint": run.train_fingerprint}
    if run.checkpoint.exists() and run.read_json("checkpoints/of.json") == mine:
        if zipfile.is_zipfile(run.checkpoint):  # its directory stands at its end
            log.info("resuming from %s", run.checkpoint)
            return str(run.checkpoint)
        log.warning("%s is cut short; training starts again", run.checkpoint)
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    run.checkpoint.unlink(missing_ok=True)
    run.write_json("checkpoints/of.json", mine)
    return None
