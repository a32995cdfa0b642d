"""What the stages of one run share: its configuration, folders, backbone and prompts."""

import logging
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tqdm import tqdm

from ssd_train import config
from ssd_train.backbones.base import Backbone
from ssd_train.distributions import Sampling
from ssd_train.heads.export import heads_folder
from ssd_train.processes.files import remove_strays
from ssd_train.processes.world import ALONE, World
from ssd_train.prompts import Prompt, Split, take
from ssd_train.runs.plan import require_fit

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

log = logging.getLogger("ssd_train")


class Run:
    def __init__(self, cfg: config.Config, world: World = ALONE):
        self.cfg = cfg
        self.world = world
        self.output = Path(cfg.output).expanduser()
        self.device = config.device(cfg, world.local_rank)
        self.sampling = Sampling(**OmegaConf.to_container(cfg.model.sampling, resolve=True))
        if cfg.threads:
            torch.set_num_threads(cfg.threads)

    @cached_property
    def backbone(self) -> Backbone:
        require_fit(self.cfg, self.device)
        start = time.perf_counter()
        backbone = instantiate(self.cfg.model.backbone, name=self.cfg.model.name, device=str(self.device))
        parameters = sum(p.numel() for p in backbone.model.parameters())
        log.info(
            "backbone %s: %.1fM parameters, grid %dx%d, %d image tokens, %s on %s, fingerprint %s (%.1f s)",
            backbone.name, parameters / 1e6, backbone.grid.height, backbone.grid.width, backbone.vocabulary,
            str(backbone.dtype).removeprefix("torch."), backbone.device, backbone.fingerprint,
            time.perf_counter() - start,
        )  # fmt: skip
        return backbone

    @cached_property
    def logger(self) -> "Logger | None":
        """One for all stages."""
        from ssd_train.runs.tracking import make_logger  # and with it Lightning, which drawing has no need of

        return make_logger(self.cfg, self.output, self.train_fingerprint, first=self.world.rank == 0)

    def prompts(self, splits: list[Split], count: int) -> list[Prompt]:
        return take(instantiate(self.cfg.model.prompts), splits, count)

    def progress(self, *args: Any, **kwargs: Any) -> tqdm:
        """tqdm's bar, in the first process only."""
        return tqdm(*args, disable=self.world.rank > 0, **kwargs)

    def meet(self) -> None:
        """Waits until all processes are here."""
        self.world.meet("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")

    def remove_strays(self) -> None:
        """Removes what killed processes have left half-written. Every stage starts with it."""
        if self.world.rank == 0:
            for folder in self.output, self.cache_dir, Path(self.cfg.phrases.path).parent:
                if isinstance(folder, Path):
                    remove_strays(folder)

    # -- folders ------------------------------------------------------------------------------------------------

    @property
    def cache_dir(self) -> Path | str:
        """A URL only if cache.dir is one."""
        return config.cache_dir(self.cfg)

    @property
    def checkpoint(self) -> Path:
        """Another training's is another file: a change of settings and back loses nothing."""
        return self.output / "checkpoints" / f"{self.train_fingerprint}.ckpt"

    @cached_property
    def heads_dir(self) -> Path:
        return heads_folder(self.cfg.decode.heads) if self.cfg.decode.heads else self.output / "heads"

    @cached_property
    def train_fingerprint(self) -> str:
        """Of everything that decides what a training run ends with, but for the number of processes (the number of
        workers decides the order of samples)."""
        without = "validate_every", "checkpoint_every", "strategy"
        train = {k: str(v) for k, v in self.cfg.train.items() if k not in without}
        return config.fingerprint(config.cache_fingerprint(self.cfg), self.cfg.cache.samples, self.cfg.head, train)
