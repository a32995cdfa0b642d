"""Shards -> batches, in an order that is a function of (seed, rank, worker) and can be entered anywhere."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Shards:
    """The samples of a run: those in these shards up to prompt ``last``. A longer run may have made more."""

    paths: list[Path]
    last: int

    def read(self, split: Split, shuffle: int = 0, rng: Random | None = None) -> Iterator[Sample]:
        """Samples of one split, read sequentially, through a shuffle buffer of undecoded samples."""
        files = wds.tariterators.tarfile_samples(({"url": str(path)} for path in self.paths), handler=_refuse)
        if shuffle:
            files = wds.shuffle(shuffle, initial=shuffle, rng=rng)(files)
        for raw in files:
            sample = decode_sample(raw)
            if sample.index <= self.last and split_of(sample.prompt) is split:
                yield sample


def _refuse(error: Exception) -> bool:
    raise CacheError(f"a shard cannot be read ({error}); re-run the cache stage to mend it") from error


class TrainingStream(IterableDataset):
    """Endless batches of training samples. Epoch after epoch, each (rank, worker) reads its share of the shards in a
    new order; nothing is dropped at an epoch's end, and no rank ever runs out before the others.

    ``first_batch`` enters the stream where an interrupted run left it: earlier batches are read and skipped.
    """

    def __init__(self, shards: Shards, batch_size: int, shuffle: int, seed: int, rank: int = 0, world: int = 1):
        self.shards, self.batch_size, self.shuffle, self.seed = shards, batch_size, shuffle, seed
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
        order = list(self.shards.paths)
        Random(f"{self.seed}/{epoch}").shuffle(order)
        share = order[self.rank * workers + worker :: self.world * workers]
        if not share:  # more readers than shards: this one reads them all, in an order of its own
            share = order
        rng = Random(f"{self.seed}/{epoch}/{self.rank}/{worker}")
        return replace(self.shards, paths=share).read(Split.TRAIN, self.shuffle, rng)


class HeadDataModule(L.LightningDataModule):
    """Plumbing: which shards, how many samples, which loaders."""

    def __init__(self, cache_dir: Path, samples: int, batch_size: int, shuffle: int, workers: int, seed: int,
                 validation_samples: int):  # fmt: skip
        super().__init__()
        cache = ShardCache(cache_dir)
        size = cache.manifest()["shard_size"]
        wanted = {i: min(size, samples - i * size) for i in range(-(-samples // size))}
        entries = {i: cache.entry(i) for i in wanted}
        missing = [i for i, entry in entries.items() if entry is None or len(entry.samples) < wanted[i]]
        if missing:
            raise CacheError(f"{cache_dir} lacks shards {missing[:8]} of {len(wanted)}; run the cache stage first")
        described = [sample for i, entry in entries.items() for sample in entry.samples[: wanted[i]]]
        self.shards = Shards([cache.path(i) for i in wanted], last=described[-1][0])
        self.counts = Counter(split for _, _, split in described)
        for split in Split.TRAIN, Split.VALIDATION:
            if not self.counts[split]:
                raise CacheError(f"none of the {samples} samples in {cache_dir} is a {split} one; raise cache.samples")
        self.batch_size, self.shuffle, self.workers, self.seed = batch_size, shuffle, workers, seed
        self.validation_samples = min(validation_samples, self.counts[Split.VALIDATION])

    def steps(self, epochs: float, batches_a_step: int = 1) -> int:
        return max(1, round(epochs * self.counts[Split.TRAIN] / (self.batch_size * batches_a_step)))

    def scales(self, embedding: Tensor) -> tuple[float, float]:
        """Standard deviations of the states and of the embeddings of the tokens, over the first samples."""
        samples = list(islice(self.shards.read(Split.TRAIN), 32))
        hidden = torch.cat([s.hidden.flatten() for s in samples])
        embedded = embedding[torch.cat([s.tokens.flatten() for s in samples]).to(embedding.device)].float()
        return float(hidden.std()), float(embedded.std())

    def train_dataloader(self) -> DataLoader:
        stream = TrainingStream(
            self.shards, self.batch_size, self.shuffle, self.seed, self.trainer.global_rank, self.trainer.world_size
        )
        stream.first_batch = self.trainer.global_step * self.trainer.accumulate_grad_batches
        return DataLoader(stream, batch_size=None, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        """Kept in memory: a few dozen samples, read once."""
        samples = list(islice(self.shards.read(Split.VALIDATION), self.validation_samples))
        batches = [collate(samples[i : i + self.batch_size]) for i in range(0, len(samples), self.batch_size)]
        return DataLoader(batches, batch_size=None)
