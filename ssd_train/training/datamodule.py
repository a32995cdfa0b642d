"""Shards -> batches, in an order that is a function of (seed, rank, worker) and can be entered anywhere."""

import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from random import Random

import lightning as L
import torch
import webdataset as wds
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ssd_train.cache.shards import CacheError, ShardCache, ShardEntry, StoredSample, describe, stored_samples, unpack
from ssd_train.processes import signals
from ssd_train.prompts import Split, split_of

SCALED = 32  # samples that the scales of a head's inputs are measured on
PREFETCHED = 3  # batches of a worker: one in the making, and DataLoader's two that wait


class Batch(dict[str, Tensor | list[str]]):
    """index [B] int64, B prompts, tokens [B, h, w] int64, and the states as they are stored: hidden [B, S, h, w, d]
    float32, bfloat16 or int8, with int8 scale [B, S, h, w] float32.

    ``lent`` [1] uint8 is 1 until whoever has the batch gives it back; its maker may then write the next one there.
    """

    def states(self, stream: Tensor | None = None) -> Tensor:
        """float32 [S, B, h, w, d]; or [1, B, h, w, d], of each sample the ``stream`` [B] alone. The batch is given
        back, unless the result lies in it."""
        stored = {name: self[name] for name in ("hidden", "scale") if name in self}
        if stream is not None and self["hidden"].shape[1] > 1:
            at = torch.arange(len(stream), device=stream.device)
            stored = {name: tensor[at, stream][:, None] for name, tensor in stored.items()}
        states = unpack(stored)
        if states.untyped_storage().data_ptr() != self["hidden"].untyped_storage().data_ptr():
            self.give_back()
        return states.transpose(0, 1)

    def give_back(self) -> None:
        if "lent" in self:
            self["lent"].zero_()

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory; this one is given back. DataLoader calls it."""
        tensors = {name: tensor.pin_memory() for name, tensor in self.items() if name not in ("lent", "prompts")}
        self.give_back()
        return Batch(tensors, prompts=self["prompts"])

    def first(self, images: int) -> "Batch":
        """Of so many images, in the same memory."""
        return Batch({name: value[:images] for name, value in self.items() if name != "lent"})


class Batches:
    """Makes batches, in memory that is shared if a worker makes them, and where one was given back in its memory:
    the kernel takes longer to find and clear new memory than it takes to read a batch."""

    def __init__(self) -> None:
        self.made: list[Batch] = []

    def make(self, samples: Sequence[StoredSample]) -> Batch:
        """Raises CacheError if a sample is damaged, or of another layout than the first one."""
        layout, size = samples[0].layout(), len(samples)
        batch = self._memory(size, layout)
        for i, sample in enumerate(samples):
            sample.read({name: batch[name][i] for name in layout})
        grid = batch["tokens"].shape[1:]
        whole = {name: batch[name].unflatten(2, grid) for name in layout if name != "tokens"}
        index = torch.tensor([sample.index for sample in samples])
        prompts = [sample.prompt for sample in samples]
        return Batch(whole, index=index, prompts=prompts, tokens=batch["tokens"].long(), lent=batch["lent"])

    def _memory(self, size: int, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> Batch:
        shapes = {name: (dtype, (size, *shape)) for name, (dtype, shape) in layout.items()}
        shapes["lent"] = torch.uint8, (1,)
        for batch in self.made:
            if not batch["lent"] and shapes == {name: (t.dtype, tuple(t.shape)) for name, t in batch.items()}:
                break
        else:
            self.made = self.made[1 - PREFETCHED :]
            batch = Batch({name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()})
            if get_worker_info():
                batch = Batch({name: tensor.share_memory_() for name, tensor in batch.items()})
            self.made.append(batch)
        batch["lent"].fill_(1)
        return batch


@dataclass(frozen=True)
class Shards:
    """The samples of a run: those in these shards up to prompt ``last``. A longer run may have made more.

    ``paths`` are what webdataset opens. A shard is held against its entry, where ``entries`` has one.
    """

    paths: list[str | Path]
    last: int
    entries: dict[str, ShardEntry] = field(default_factory=dict)

    def read(self, split: Split, shuffle: int = 0, rng: Random | None = None) -> Iterator[StoredSample]:
        """Samples of one split, shard after shard, through a shuffle buffer."""
        samples = chain.from_iterable(map(self._samples, self.paths))
        if shuffle:
            samples = wds.shuffle(shuffle, initial=shuffle, rng=rng)(samples)
        for sample in samples:
            if sample.index <= self.last and split_of(sample.prompt) is split:
                yield sample

    def count(self, split: Split) -> int:
        """How many samples :meth:`read` gives, by the entries."""
        samples = chain.from_iterable(self.entries[str(path)].samples for path in self.paths)
        return sum(index <= self.last and of == split for index, _, of in samples)

    def _samples(self, path: str | Path) -> Iterator[StoredSample]:
        """A shard's samples. Raises CacheError if they are not those of its entry, one by one, or too few: a tar cut
        short between two samples looks whole."""
        entry, found = self.entries.get(str(path)), 0
        try:
            for sample in stored_samples(path, entry and entry.bytes):
                if entry and sample.backbone != entry.backbone:
                    raise CacheError(
                        f"{sample.shard} holds states of backbone {sample.backbone}; expected {entry.backbone}, of "
                        "which the cache is. It was copied here from elsewhere: remove it and run the cache stage "
                        "again."
                    )
                if entry and [describe(sample)] != entry.samples[found : found + 1]:
                    raise CacheError(
                        f"{sample} is another one than the cache's index names there; re-run the cache stage with "
                        "cache.verify=true to mend it"
                    )
                found += 1
                yield sample
        except (OSError, EOFError, tarfile.TarError) as error:
            what = getattr(error, "strerror", None) or error
            raise CacheError(f"a shard cannot be read ({path}: {what}); re-run the cache stage to mend it") from error
        if entry and found < len(entry.samples):
            raise CacheError(
                f"{path} ends after {found} samples, and should hold {len(entry.samples)}; re-run the cache stage to "
                "mend it"
            )


class TrainingStream(IterableDataset):
    """Endless batches of training samples. Epoch after epoch, each (rank, worker) reads its share of the shards in a
    new order; nothing is dropped at an epoch's end, and no rank ever runs out before the others.

    ``first_batch`` enters the stream where an interrupted run left it: what that epoch had before is passed over.
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
        skipped = (self.first_batch - worker + workers - 1) // workers * self.batch_size
        for first in count():  # epochs that lie behind are not read
            size = self._share(first, worker, workers).count(Split.TRAIN)
            if skipped < size:
                break
            skipped -= size
        epochs = (self._epoch(epoch, worker, workers) for epoch in count(first))
        stream = islice(chain.from_iterable(epochs), skipped, None)
        batches = Batches()
        for samples in iter(lambda: list(islice(stream, self.batch_size)), []):
            yield batches.make(samples)

    def _share(self, epoch: int, worker: int, workers: int) -> Shards:
        shares = share(len(self.shards.paths), self.seed, epoch, self.rank * workers + worker, self.world * workers)
        return replace(self.shards, paths=[self.shards.paths[i] for i in shares])

    def _epoch(self, epoch: int, worker: int, workers: int) -> Iterator[StoredSample]:
        rng = Random(f"{self.seed}/{epoch}/{self.rank}/{worker}")
        return self._share(epoch, worker, workers).read(Split.TRAIN, self.shuffle, rng)


def share(shards: int, seed: int, epoch: int, reader: int, readers: int) -> list[int]:
    """The shards that one of the readers reads in an epoch, in its order."""
    order = list(range(shards))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order[reader::readers] or order  # more readers than shards: this one reads them all


def visits(sizes: Sequence[int], seed: int, readers: int, each: float) -> list[float]:
    """How often a sample of each shard is seen when each reader reads ``each`` samples of shards of these sizes.
    Readers whose shares are smaller go on to the next epoch earlier: shards are seen the more unequally the fewer of
    them there are for a reader."""
    seen = [0.0] * len(sizes)
    for reader in range(readers):
        left = each
        for shard in chain.from_iterable(share(len(sizes), seed, epoch, reader, readers) for epoch in count()):
            if sizes[shard]:
                read = min(left, sizes[shard])
                seen[shard] += read / sizes[shard]
                left -= read
            if left <= 0:
                break
    return [times for times, size in zip(seen, sizes, strict=True) if size]


def _start_worker(worker: int) -> None:
    signals.heed_parent_only()


class HeadDataModule(L.LightningDataModule):
    """Plumbing: which shards, how many samples, which loaders."""

    def __init__(self, cache_dir: Path | str, samples: int, batch_size: int, shuffle: int, workers: int, seed: int,
                 validation_samples: int):  # fmt: skip
        super().__init__()
        cache = ShardCache(cache_dir)
        size = cache.manifest()["shard_size"]
        wanted = {i: min(size, samples - i * size) for i in range(-(-samples // size))}
        entries = cache.entries
        missing = [i for i in wanted if i not in entries or len(entries[i].samples) < wanted[i]]
        if missing:
            raise CacheError(f"{cache_dir} lacks shards {missing[:8]} of {len(wanted)}; run the cache stage first")
        described = [sample for i, size in wanted.items() for sample in entries[i].samples[:size]]
        paths = {i: cache.url(i) for i in wanted}
        self.shards = Shards(
            list(paths.values()), described[-1][0], {str(path): entries[i] for i, path in paths.items()}
        )
        self.counts = Counter(split for _, _, split in described)
        self.sizes = [
            sum(split == Split.TRAIN for _, _, split in entries[i].samples[:size]) for i, size in wanted.items()
        ]  # training samples by shard
        for split in Split.TRAIN, Split.VALIDATION:
            if not self.counts[split]:
                raise CacheError(f"none of the {samples} samples in {cache_dir} is a {split} one; raise cache.samples")
        self.batch_size, self.shuffle, self.workers, self.seed = batch_size, shuffle, workers, seed
        self.validation_samples = min(validation_samples, self.counts[Split.VALIDATION])

    def steps(self, epochs: float, batches_a_step: int = 1) -> int:
        return max(1, round(epochs * self.counts[Split.TRAIN] / (self.batch_size * batches_a_step)))

    def coverage(self, batches: int, world: int) -> str:
        """What becomes of epochs when each process trains on this many batches."""
        readers = world * max(1, self.workers)
        seen = visits(self.sizes, self.seed, readers, batches * self.batch_size * world / readers)
        return (
            f"each training sample is seen {min(seen):.2f} to {max(seen):.2f} times: {len(seen)} shards for {readers} "
            "reader(s)"
        )

    def scales(self, embedding: Tensor) -> tuple[float, float]:
        """Standard deviations of the states and of the embeddings of the tokens, over the first samples."""
        moments, tokens = [], []
        for sample in islice(self.shards.read(Split.TRAIN), SCALED):
            loaded = sample.load()
            moments.append(torch.stack(torch.var_mean(loaded.hidden.to(embedding.device), correction=0)))
            tokens.append(loaded.tokens.flatten())
        variance, mean = torch.stack(moments).double().unbind(1)  # of samples of one size
        embedded = embedding[torch.cat(tokens).to(embedding.device)].float()
        return float((variance.mean() + mean.var(correction=0)).sqrt()), float(embedded.std())

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        stream = TrainingStream(
            self.shards, self.batch_size, self.shuffle, self.seed, trainer.global_rank, trainer.world_size
        )
        stream.first_batch = trainer.global_step * trainer.accumulate_grad_batches
        return self.loader(stream, trainer.strategy.root_device.type)

    def loader(self, stream: TrainingStream, device: str) -> DataLoader:
        return DataLoader(
            stream, batch_size=None, num_workers=self.workers, worker_init_fn=_start_worker, pin_memory=device == "cuda"
        )

    def val_dataloader(self) -> DataLoader:
        """Kept in memory: a few dozen samples, read once."""
        samples = list(islice(self.shards.read(Split.VALIDATION), self.validation_samples))
        batches = [Batches().make(samples[i : i + self.batch_size]) for i in range(0, len(samples), self.batch_size)]
        return DataLoader(batches, batch_size=None)
