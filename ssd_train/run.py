"""What the stages of one run share: its configuration, folders, backbone and prompts."""

import json
import logging
import time
from functools import cached_property
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ssd_train import config
from ssd_train.backbones.base import Backbone
from ssd_train.distributions import Sampling
from ssd_train.files import write_atomically
from ssd_train.plan import require_fit
from ssd_train.prompts import Prompt, Split, take

log = logging.getLogger("ssd_train")


class Run:
    def __init__(self, cfg: config.Config):
        self.cfg = cfg
        self.output = Path(cfg.output)
        self.device = config.device(cfg)
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

    def prompts(self, splits: list[Split], count: int) -> list[Prompt]:
        return take(instantiate(self.cfg.model.prompts), splits, count)

    # -- folders ------------------------------------------------------------------------------------------------

    @cached_property
    def cache_fingerprint(self) -> str:
        """Of everything that decides what is in a cache, but for how many samples there are."""
        model = (self.cfg.model[key] for key in ("name", "backbone", "sampling", "prompts"))
        cache = {k: str(v) for k, v in self.cfg.cache.items() if k not in ("dir", "samples", "verify")}
        return config.fingerprint(*model, cache, self.cfg.seed)

    @property
    def cache_dir(self) -> Path:
        if self.cfg.cache.dir:
            return Path(self.cfg.cache.dir)
        return Path("runs/cache") / f"{self.cfg.model.name}-{self.cache_fingerprint}"

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoints" / "last.ckpt"

    @property
    def heads_dir(self) -> Path:
        return Path(self.cfg.decode.heads) if self.cfg.decode.heads else self.output / "heads"

    @cached_property
    def train_fingerprint(self) -> str:
        """Of everything that decides what a training run ends with (the number of workers decides the order of
        samples)."""
        train = {k: str(v) for k, v in self.cfg.train.items() if k not in ("validate_every", "checkpoint_every")}
        return config.fingerprint(self.cache_fingerprint, self.cfg.cache.samples, self.cfg.head, train)

    def write_json(self, name: str, content: dict) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        write_atomically(self.output / name, json.dumps(content, indent=2).encode())

    def read_json(self, name: str) -> dict | None:
        path = self.output / name
        return json.loads(path.read_text()) if path.exists() else None
