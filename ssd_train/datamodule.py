"""Shards -> batches, in an order that is a function of (seed, rank, worker) and can be entered anywhere."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from random import Random

import lightning as L
import torch
import webdataset as wds
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ssd_train.prompts import Split, split_of
from ssd_train.shards import CacheError, Sample, ShardCache, decode_sample

Batch = dict[str, Tensor]  # tokens [B, h, w] int64, hidden [B, 2, h, w, d] float32, index [B] int64


def collate(samples: list[Sample]) -> Batch:
    height, width = samples[0].tokens.shape
    return {
        "index": torch.tensor([s.index for s in samples]),
        "tokens": torch.stack([s.tokens for s in samples]).long(),
        "hidden": torch.stack([s.hidden for s in samples]).unflatten(2, (height, width)),
    }


def read(paths: list[Path], split: Split, shuffle: int = 0, rng: Random | None = None) -> Iterator[Sample]:
    """Samples of one split from shards, read sequentially, through a shuffle buffer of undecoded samples."""
    files = wds.tariterators.tarfile_samples(
        ({"url": str(path)} for path in paths), handler=partial(_refuse), select_files=None
    )
    if shuffle:
        files = wds.filters._shuffle(files, bufsize=shuffle, initial=shuffle, rng=rng)
    for raw in files:
        sample = decode_sample(raw)
        if split_of(sample.prompt) is split:
            yield sample


def _refuse(error: Exception) -> bool:
    raise CacheError(f"a shard cannot be read ({error}); re-run the cache stage to mend it") from error


class TrainingStream(IterableDataset):
    """Endless batches of training samples. Epoch after epoch, each (rank, worker) reads its share of the shards in a
    new order; nothing is dropped at an epoch's end, and no rank ever runs out before the others.

    ``first_batch`` enters the stream where an interrupted run left it: earlier batches are read and skipped.
    """

    def __init__(self, paths: list[Path], batch_size: int, shuffle: int, seed: int, rank: int = 0, world: int = 1):
        self.paths, self.batch_size, self.shuffle, self.seed = paths, batch_size, shuffle, seed
        self.rank, self.world = rank, world
        self.first_batch = 0

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        workers, slot = (info.num_workers, info.id) if info else (1, 0)
        # Batches come from the workers in turn, starting with the first: re-enter with the turn it would have been.
        worker = (slot + self.first_batch) % workers
        skipped = (self.first_batch - worker + workers - 1) // workers
        stream = chain.from_iterable(self._epoch(epoch, worker, workers) for epoch in count())
        batches = iter(lambda: list(islice(stream, self.batch_size)), [])
        for samples in islice(batches, skipped, None):
            yield collate(samples)

    def _epoch(self, epoch: int, worker: int, workers: int) -> Iterator[Sample]:
        order = list(self.paths)
        Random(f"{self.seed}/{epoch}").shuffle(order)
        share = order[self.rank * workers + worker :: self.world * workers]
        if not share:  # more readers than shards: this one reads them all, in an order of its own
            share = order
        return read(share, Split.TRAIN, self.shuffle, Random(f"{self.seed}/{epoch}/{self.rank}/{worker}"))


class HeadDataModule(L.LightningDataModule):
    """Plumbing: which shards, how many samples, which loaders."""

    def __init__(self, cache_dir: Path, samples: int, batch_size: int, shuffle: int, workers: int, seed: int,
                 validation_samples: int):  # fmt: skip
        super().__init__()
        cache = ShardCache(cache_dir)
        self.manifest = cache.manifest()
        shards = range(-(-samples // self.manifest["shard_size"]))
        entries = [cache.entry(i) for i in shards]
        missing = [i for i, entry in enumerate(entries) if entry is None]
        if missing:
            raise CacheError(f"{cache_dir} lacks shards {missing[:8]} of {len(shards)}; run the cache stage first")
        self.paths = [cache.path(i) for i in shards]
        self.counts = {split: sum(entry.splits.count(split) for entry in entries) for split in Split}
        for split in Split.TRAIN, Split.VALIDATION:
            if not self.counts[split]:
                raise CacheError(f"none of the {samples} samples in {cache_dir} is in the {split} split; raise cache.samples")
        self.batch_size, self.shuffle, self.workers, self.seed = batch_size, shuffle, workers, seed
        self.validation_samples = min(validation_samples, self.counts[Split.VALIDATION])

    def steps(self, epochs: float, world: int = 1) -> int:
        return max(1, round(epochs * self.counts[Split.TRAIN] / (self.batch_size * world)))

    def scales(self, embedding: Tensor) -> tuple[float, float]:
        """Standard deviations of the states and of the embeddings of the tokens, over the first samples."""
        samples = list(islice(read(self.paths, Split.TRAIN), 32))
        hidden = torch.cat([s.hidden.flatten() for s in samples])
        embedded = embedding[torch.cat([s.tokens.flatten() for s in samples]).to(embedding.device)].float()
        return float(hidden.std()), float(embedded.std())

    def train_dataloader(self) -> DataLoader:
        stream = TrainingStream(
            self.paths, self.batch_size, self.shuffle, self.seed, self.trainer.global_rank, self.trainer.world_size
        )
        stream.first_batch = self.trainer.global_step
        return DataLoader(stream, batch_size=None, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        """Kept in memory: a few dozen samples, read once."""
        samples = list(islice(read(self.paths, Split.VALIDATION), self.validation_samples))
        batches = [collate(samples[i : i + self.batch_size]) for i in range(0, len(samples), self.batch_size)]
        return DataLoader(batches, batch_size=None)
