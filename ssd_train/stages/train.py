"""Shards -> trained heads."""

import logging
import math

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ssd_train.cache.shards import CacheError, ShardCache
from ssd_train.config import Strategy, corrector_spec
from ssd_train.heads.predictors import Heads, HeadSpec
from ssd_train.processes import signals
from ssd_train.processes.files import DamagedFile, read_json, write_json
from ssd_train.processes.world import PATIENCE
from ssd_train.prompts import Split
from ssd_train.runs import plan, tracking
from ssd_train.runs.run import Run
from ssd_train.stages.cache import identity
from ssd_train.training.checkpoints import Checkpoints, read_checkpoint
from ssd_train.training.datamodule import HeadDataModule
from ssd_train.training.module import HeadModule
from ssd_train.training.teacher import Teacher

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


class StopWhenAsked(Callback):
    """Ends training between two steps, in all processes at the same one, when a signal has reached any of them."""

    stopped = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signals.install()  # in place of Lightning's handler, which would exchange messages in mid-step

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.stopped = trainer.strategy.reduce_boolean_decision(signals.asked_to_stop(), all=False)
            trainer.should_stop |= self.stopped

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        checkpoint["processes"] = trainer.world_size


class Averaging(Callback):
    """An exponential moving average of the heads' weights, with FSDP of each process's parts of them. They are
    validated, and are a checkpoint's "state_dict"; those that are trained are its "current_model_state".

    Lightning's own copies the whole module, frozen layers and all, cannot copy parts, and has averages go on as the
    weights when training is stopped.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.average: list[Tensor] | None = None  # by parameter; none before the first step

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.average is not None:  # they were restored before the module was on its device
            self.average = [average.to(module.device) for average in self.average]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if self.average is None:
            self.average = [parameter.clone() for parameter in module.parameters()]
        for average, parameter in zip(self.average, module.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.average is None:
            return
        for average, parameter in zip(self.average, module.parameters(), strict=True):
            trained = parameter.clone()
            parameter.copy_(average)
            average.copy_(trained)

    on_validation_end = on_validation_start

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        if self.average is None:
            return
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {}
        for (name, _), average in zip(module.named_parameters(), self.average, strict=True):
            if isinstance(average, DTensor):
                average = average.full_tensor().cpu()  # all processes together
            checkpoint["state_dict"][name] = average

    @torch.no_grad()
    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        self.average = [parameter.clone() for parameter in module.parameters()]  # "state_dict" is loaded already
        for name, parameter in module.named_parameters():
            trained = checkpoint["current_model_state"][name]
            if isinstance(parameter, DTensor):
                trained = trained.to(parameter.device)
                trained = distribute_tensor(trained, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(trained)


def check(run: Run) -> None:
    """Raises ValueError for settings that Lightning refuses, InstantiationException for a logger that is not there."""
    tracking.check(run.cfg)
    accumulate = run.cfg.train.trainer.get("accumulate_grad_batches", 1)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"train.trainer.accumulate_grad_batches is {accumulate!r}; expected a whole number, 1 or more")
    try:
        make_trainer(run, steps=1, logger=False)
    except (TypeError, ValueError, MisconfigurationException) as error:
        cfg = run.cfg.train
        raise ValueError(f"train.precision={cfg.precision}, train.trainer={cfg.trainer}: {error}") from error


def run(run: Run) -> float:
    """Returns the mean acceptance rate over heads on the validation prompts."""
    run.remove_strays()
    checkpoint = _checkpoint(run)
    if checkpoint and (summary := _summary(run, checkpoint)):
        log.info("heads in %s are trained already", run.output)
        return summary["validation"]["validation/acceptance"]
    resume_from = _resume_from(run, checkpoint)
    cfg = run.cfg.train
    plan.require_reach(run.cfg, run.backbone.grid)
    ShardCache(run.cache_dir).check(identity(run))
    data = HeadDataModule(
        run.cache_dir, run.cfg.cache.samples, cfg.batch_size, cfg.shuffle_buffer, cfg.workers, run.cfg.seed,
        cfg.validation_samples,
    )  # fmt: skip
    heads = make_heads(run, data)
    parameters = sum(p.numel() for p in heads.parameters())
    batches = cfg.trainer.get("accumulate_grad_batches", 1)
    steps = data.steps(cfg.epochs, batches * run.world.size)
    stop = StopWhenAsked()
    trainer = make_trainer(run, steps, run.logger or False, stop, tracking.Throughput())
    log.info(
        "training %d heads (%.1fM parameters) on %d samples for %d steps of %d process(es); %d validation samples",
        len(heads.predictors), parameters / 1e6, data.counts[Split.TRAIN], steps, run.world.size,
        data.validation_samples,
    )  # fmt: skip
    log.info("%s", data.coverage(steps * batches, run.world.size))
    module = make_module(run, heads, steps)
    with signals.deferred():
        _fit(trainer, module, data, resume_from)
        # With head.ema, a checkpoint's "state_dict" holds the averaged weights, and these are validated.
        trainer.save_checkpoint(run.checkpoint, weights_only=False)
        if trainer.global_step < steps:
            why = f"training stopped at step {trainer.global_step} of {steps}; run the same command to go on"
            if not stop.stopped:
                raise RuntimeError(why)
            log.warning(why)
            raise signals.Stopped
    trainer.validate(module, data, verbose=False)
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validation")}
    broken = sorted(key for key, value in metrics.items() if not math.isfinite(value))
    if broken:
        raise ValueError(
            f"{', '.join(broken[:3])} of the trained heads is no finite number: the last steps broke them; lower "
            "head.lr, or clip gradients (train.gradient_clip)"
        )
    log.info(
        "heads trained; acceptance on validation prompts %.3f: %s", metrics["validation/acceptance"],
        ", ".join(f"{key} {metrics[f'validation/acceptance/{key}']:.2f}" for key in heads.predictors),
    )  # fmt: skip
    if heads.corrector is not None:
        stale, corrected = (metrics[f"validation/corrector/{kind}"] for kind in ("stale", "corrected"))
        log.info("stale drafts are accepted at a rate of %.3f as they are, %.3f corrected", stale, corrected)
    if run.world.rank == 0:
        write_json(
            run.output / "training.json",
            {
                "fingerprint": run.train_fingerprint,
                "steps": steps,
                "samples": data.counts[Split.TRAIN],
                "heads": heads.config(),
                "validation": metrics,
            },
        )
    return metrics["validation/acceptance"]


def _fit(trainer: L.Trainer, module: HeadModule, data: HeadDataModule, checkpoint: str | None) -> None:
    """Raises RuntimeError that says what to do if a worker of the loader was killed, CacheError if one found a damaged
    shard."""
    try:
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    except CacheError as error:  # a worker's comes with its traceback, which would bury what it says
        raise CacheError(str(error).strip().rpartition("CacheError: ")[2]) from error
    except (RuntimeError, ConnectionError, EOFError) as error:
        what = str(error).strip()
        if "Caught" in what or (isinstance(error, RuntimeError) and "DataLoader worker" not in what):
            raise  # an error of our own, or of a worker that lives
        if not isinstance(error, RuntimeError):  # it died between announcing a batch and handing it over
            what = f"A DataLoader worker exited unexpectedly ({what})."
        raise RuntimeError(
            f"{what} If memory ran out, lower train.shuffle_buffer (samples a worker) or train.workers="
            f"{data.workers}; run the same command to go on from the last checkpoint"
        ) from error


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
            corrector=corrector_spec(cfg),
        )
    )


def make_module(run: Run, heads: Heads, steps: int) -> HeadModule:
    backbone, sampling = run.backbone, run.sampling
    teacher = Teacher(backbone, sampling.guidance) if heads.corrector is not None else None
    return HeadModule(heads, backbone.output, backbone.grid, sampling, run.cfg.head, steps, run.cfg.seed, teacher)


def make_trainer(run: Run, steps: int, logger: Logger | bool, *more: Callback) -> L.Trainer:
    cfg, world = run.cfg.train, run.world
    callbacks: list[Callback] = [
        *more,
        ModelCheckpoint(
            run.checkpoint.parent, filename=run.checkpoint.stem, every_n_train_steps=cfg.checkpoint_every,
            enable_version_counter=False,
        ),
        Progress(refresh_rate=max(1, steps // 200)),
    ]  # fmt: skip
    if run.cfg.head.ema is not None:
        callbacks.append(Averaging(run.cfg.head.ema))
    accumulate = cfg.trainer.get("accumulate_grad_batches", 1)
    settings = {
        "accelerator": "gpu" if run.device.type == "cuda" else "cpu",
        "devices": world.local_size,
        "num_nodes": world.nodes,
        "plugins": [TorchElasticEnvironment() if world.size > 1 else LightningEnvironment(), Checkpoints()],
        # Every process validates on all samples: the same figures whatever their number.
        "use_distributed_sampler": False,
        "max_steps": steps,
        "max_epochs": -1,
        "precision": cfg.precision,
        "gradient_clip_val": cfg.gradient_clip,
        "val_check_interval": cfg.validate_every * accumulate,  # Lightning counts batches
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": min(10, steps),
        "callbacks": callbacks,
        "logger": logger,
        "default_root_dir": run.output,
        "enable_model_summary": False,
    }
    if cfg.strategy is Strategy.fsdp and world.size > 1:
        # Lightning's other strategy, for FSDP's first version, demands GPUs. One file a checkpoint: as DDP's, so that
        # either goes on from the other's, and the export need not know.
        settings["strategy"] = ModelParallelStrategy(
            data_parallel_size=world.size, tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=PATIENCE
        )
    return L.Trainer(**(settings | OmegaConf.to_container(cfg.trainer, resolve=True)))


def _checkpoint(run: Run) -> dict | None:
    """This very training's, without its tensors, if it is there and whole."""
    try:
        return read_checkpoint(run.checkpoint)
    except FileNotFoundError:
        others = [path.name for path in run.checkpoint.parent.glob("*.ckpt")]
        if others:
            log.info("training starts anew; %s, of other settings, stay where they are", ", ".join(others))
    except DamagedFile as error:
        log.warning("%s, or leave it: training starts again, and replaces it", error)
    return None


def _summary(run: Run, checkpoint: dict) -> dict | None:
    """What is known of this training if it has ended with this checkpoint."""
    try:
        summary = read_json(run.output / "training.json", "it is made again from the checkpoint") or {}
    except DamagedFile as error:
        log.warning("%s", error)
        return None
    ended = {"fingerprint": run.train_fingerprint, "steps": checkpoint["global_step"]}
    return summary if ended.items() <= summary.items() else None


def _resume_from(run: Run, checkpoint: dict | None) -> str | None:
    """Raises ValueError if the checkpoint was made by another number of processes: they would see other samples, and
    other numbers of them a step."""
    if checkpoint is None:
        return None
    processes = checkpoint["processes"]
    if processes != run.world.size:
        raise ValueError(
            f"{run.checkpoint} was made by {processes} process(es), and this run has {run.world.size}; go on with "
            f"{processes}, or remove it to start again"
        )
    log.info("resuming from %s", run.checkpoint)
    return str(run.checkpoint)
