"""Cached tokens of training prompts -> the phrase library that the phrase rule matches drafts with.

Needs no backbone: the cache's manifest says whose tokens they are.
"""

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from ssd_train import config
from ssd_train.cache.shards import ShardCache, StoredSample, place
from ssd_train.config import Stage
from ssd_train.decoding import phrases
from ssd_train.prompts import Split
from ssd_train.runs.run import Run
from ssd_train.training.datamodule import HeadDataModule, Shards

log = logging.getLogger(__name__)


def check(run: Run) -> None:
    """Raises CacheError if there is no cache and none is to be made, ValueError if the library cannot lie beside it."""
    if isinstance(place(run.cfg.phrases.path), str):
        raise ValueError(f"phrases.path is {run.cfg.phrases.path}; expected a file, where this run can write")
    if Stage.cache not in run.cfg.stages:
        ShardCache(run.cache_dir).manifest()


def run(run: Run) -> None:
    if run.world.rank > 0:
        return
    run.remove_strays()
    cfg, path = run.cfg, Path(run.cfg.phrases.path)
    manifest = ShardCache(run.cache_dir).manifest()
    identity = {
        "cache": config.fingerprint(manifest), "samples": cfg.cache.samples, "merges": cfg.phrases.merges
    }  # fmt: skip
    if _is_there(path, identity):
        log.info("phrases in %s are learned already", path)
        return
    data = HeadDataModule(
        run.cache_dir, cfg.cache.samples, batch_size=1, shuffle=0, workers=0, seed=cfg.seed,
        validation_samples=cfg.train.validation_samples,
    )  # fmt: skip
    log.info("learning up to %d phrases from %d samples", cfg.phrases.merges, data.counts[Split.TRAIN])
    learned = phrases.learn(_rows(data.shards), manifest["vocabulary"], cfg.phrases.merges)
    held_out = [s.load().tokens for s in islice(data.shards.read(Split.VALIDATION), data.validation_samples)]
    statistics = phrases.statistics(learned, torch.stack(held_out), manifest["vocabulary"])
    library = phrases.Library(
        manifest["backbone"], manifest["fingerprint"], manifest["vocabulary"], identity, statistics, learned
    )
    phrases.save(path, library)
    log.info(
        "%d phrases in %s, %s of them by length; they cover %.1f%% of the tokens of %d validation samples",
        len(learned), path, statistics["by_length"], 100 * statistics["validation_coverage"], len(held_out),
    )  # fmt: skip


def _is_there(path: Path, identity: dict) -> bool:
    if not path.exists():
        return False
    try:
        there = phrases.load(path).learned_from
    except phrases.PhrasesError as error:
        log.warning("%s", error)
        return False
    if there != identity:
        log.warning("%s was learned from %s; it is learned again from %s", path, there, identity)
    return there == identity


def _rows(shards: Shards) -> Iterator[np.ndarray]:
    for sample in map(StoredSample.load, shards.read(Split.TRAIN)):
        yield from sample.tokens.numpy()
