"""From shards to batches: splits, order, and entering the stream anywhere."""

import copy
import shutil
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ssd_train.cache.shards import CacheDtype, CacheError, Sample, ShardCache
from ssd_train.prompts import Split, split_of
from ssd_train.training.datamodule import PREFETCHED, Batch, Batches, HeadDataModule, Shards, TrainingStream

GRID, WIDTH, SIZE = (2, 3), 4, 10


def fill(directory, dtype=CacheDtype.float32, width=WIDTH):
    """40 samples in 4 shards. Prompt i is at index 2 i, as if every other one were a test prompt."""
    cache = ShardCache(directory)
    cache.pin({"shard_size": SIZE, "fingerprint": "a"})
    torch.manual_seed(0)
    for shard in range(4):
        cache.write(shard, [
            Sample.of(2 * i, f"prompt {i}", i, torch.randint(5, GRID), 3 * torch.randn(2, 6, width), "a", dtype)
            for i in range(shard * SIZE, (shard + 1) * SIZE)
        ])  # fmt: skip
    cache.write_index(4)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("cache"))


def make(directory, samples=40, **settings):
    defaults = dict(batch_size=4, shuffle=8, workers=0, seed=0, validation_samples=64)
    return HeadDataModule(directory, samples, **(defaults | settings))


def in_split(split, samples=40):
    return [2 * i for i in range(samples) if split_of(f"prompt {i}") is split]


def stream(data, **place):
    return TrainingStream(data.shards, data.batch_size, data.shuffle, data.seed, **place)


def indices(batches, count):
    return [batch["index"].tolist() for batch in islice(iter(batches), count)]


def test_no_prompt_is_in_both_training_and_validation(directory):
    data = make(directory)
    validation = {i for batch in data.val_dataloader() for i in batch["index"].tolist()}
    training = {i for batch in indices(stream(data), 40) for i in batch}
    assert validation == set(in_split(Split.VALIDATION))
    assert training == set(in_split(Split.TRAIN))
    assert data.counts == Counter({split: len(in_split(split)) for split in Split})


def by_index(directory):
    shards = Shards([ShardCache(directory).path(i) for i in range(4)], 10**6)
    return {stored.index: stored.load() for split in Split for stored in shards.read(split)}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dtype, stored", [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8)]
)
def test_a_batch_holds_what_the_shards_hold_as_they_hold_it(tmp_path, dtype, stored, workers):
    """And gives it as float32, whole or one stream a sample, however often its memory was given back meanwhile."""
    samples = by_index(fill(tmp_path, CacheDtype(dtype)))
    data = make(tmp_path, workers=workers)
    for batch in islice(data.loader(stream(data), "cpu"), 12):
        assert batch["tokens"].shape == (4, 2, 3)
        assert batch["tokens"].dtype is torch.int64
        assert batch["hidden"].shape == (4, 2, 2, 3, WIDTH)
        assert batch["hidden"].dtype is stored
        read = [samples[index] for index in batch["index"].tolist()]
        assert torch.equal(batch["tokens"], torch.stack([sample.tokens for sample in read]).long())
        assert batch["prompts"] == [sample.prompt for sample in read]
        for name in read[0].states:
            assert torch.equal(batch[name].flatten(2, 3), torch.stack([sample.states[name] for sample in read]))
        choice = batch["index"] % 3 // 2
        chosen = torch.stack([sample.hidden[s] for sample, s in zip(read, choice, strict=True)])
        kept = copy.deepcopy(batch)
        assert torch.equal(kept.states(choice).flatten(2, 3), chosen[None])
        assert not kept["lent"]
        kept = copy.deepcopy(batch)  # in memory that no worker lends again meanwhile
        kept.states()
        assert bool(kept["lent"]) == (dtype == "float32"), "float32 states lie in the batch itself"
        whole = batch.states()
        assert torch.equal(whole.flatten(2, 3), torch.stack([sample.hidden for sample in read], 1))
        assert whole.dtype is torch.float32


def test_memory_is_used_again_only_once_it_was_given_back(directory):
    samples = list(Shards([ShardCache(directory).path(0)], 10**6).read(Split.TRAIN))
    batches = Batches()
    made = [batches.make(samples[i : i + 1]) for i in range(5)]
    assert [batch["index"].item() for batch in made] == [sample.index for sample in samples[:5]]
    assert len({batch["hidden"].data_ptr() for batch in made}) == 5
    for batch, sample in zip(made, samples, strict=False):
        assert torch.equal(batch["hidden"][0].flatten(1, 2), sample.load().hidden)
    assert len(batches.made) == PREFETCHED, "no more stay in a worker's memory"
    made[4].give_back()
    assert batches.make(samples[5:7])["hidden"].data_ptr() != made[4]["hidden"].data_ptr(), "of another size"
    again = batches.make(samples[5:6])
    assert again["hidden"].data_ptr() == made[4]["hidden"].data_ptr()
    assert torch.equal(again["hidden"][0].flatten(1, 2), samples[5].load().hidden)


def test_samples_of_another_size_are_refused(tmp_path):
    """Two caches' shards in one directory."""
    fill(tmp_path)
    fill(tmp_path / "wide", width=5)
    ShardCache(tmp_path / "wide").path(1).replace(ShardCache(tmp_path).path(1))
    with pytest.raises(
        CacheError, match=r"sample 000000\d\d in .* holds .*5\).*; expected .*4\).*as the samples before"
    ):
        indices(stream(make(tmp_path)), 10)


def test_a_worker_holds_three_batches_and_no_shuffle_buffer_of_states(tmp_path):
    """Its own memory and what it shares, beyond what it had at its start; samples of 1.2 MB, batches of 8."""
    fill(tmp_path, width=25_000)
    size = 2 * 6 * 25_000 * 4
    data = make(tmp_path, batch_size=8, shuffle=40, workers=1)
    loader = iter(data.loader(Watched(stream(data)), "cpu"))
    grown, kept = [], []
    for i in range(24):
        batch = next(loader)
        grown.append(batch["grown"].item())
        kept.append(batch) if i < 12 else batch.give_back()
    assert max(grown) <= 3 * 8 * size + 4e6
    assert max(grown) >= 8 * size


class Watched(IterableDataset):
    """The stream, with how much this process has grown since its start, in bytes."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        before = resident()
        for batch in self.stream:
            yield Batch(batch, grown=torch.tensor(resident() - before))


def resident():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@pytest.mark.parametrize(
    "seed, order",
    [
        (0, [8, 0, 4, 10, 2, 14, 62, 18, 74, 64, 20, 76, 60, 26, 78, 68]),
        (7, [30, 38, 0, 26, 36, 34, 8, 20, 2, 10, 18, 66, 60, 16, 62, 74]),
    ],
)
def test_the_order_of_a_seed_stays(directory, seed, order):
    """From one version to the next: a resumed training relies on it."""
    assert [index for batch in indices(stream(make(directory, seed=seed)), 4) for index in batch] == order


def test_every_epoch_has_every_sample_once_in_a_new_order(directory):
    data = make(directory, batch_size=1)
    size = len(in_split(Split.TRAIN))
    order = [batch[0] for batch in indices(stream(data), 3 * size)]
    epochs = [order[i * size : (i + 1) * size] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == in_split(Split.TRAIN)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != in_split(Split.TRAIN)
    assert [batch[0] for batch in indices(stream(data), size)] == epochs[0]
    other = make(directory, batch_size=1, seed=1)
    assert [batch[0] for batch in indices(stream(other), size)] != epochs[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_the_stream_goes_on_from_any_batch(directory, workers):
    """As an uninterrupted run would have: also with workers, whose batches alternate."""
    data = make(directory, shuffle=5)

    def loader(first):
        s = stream(data)
        s.first_batch = first
        return DataLoader(s, batch_size=None, num_workers=workers)

    everything = indices(loader(0), 24)
    for first in (1, 6, 11) if workers < 2 else (7,):
        assert indices(loader(first), 24 - first) == everything[first:]


@pytest.mark.parametrize("epochs", [1, 2])
def test_entering_the_stream_reads_no_epoch_that_lies_behind(directory, monkeypatch, epochs):
    """The second or third epoch, from its first batch: each shard that is opened is of that epoch, in its order."""
    data = make(directory, batch_size=1, shuffle=0)
    size = data.counts[Split.TRAIN]
    opened, samples = [], Shards._samples
    monkeypatch.setattr(Shards, "_samples", lambda shards, path: (opened.append(path), samples(shards, path))[1])
    whole = indices(stream(data), (epochs + 1) * size)
    expected = opened[4 * epochs :]
    opened.clear()
    entered = stream(data)
    entered.first_batch = epochs * size
    assert indices(entered, size) == whole[epochs * size :]
    assert opened == expected
    assert len(expected) == 4


def test_ranks_share_an_epoch(directory):
    data = make(directory, batch_size=1)
    shares = []
    for rank in range(2):
        s = stream(data, rank=rank, world=2)
        shares.append([x.index for x in s._epoch(0, 0, 1)])
    assert sorted(shares[0] + shares[1]) == in_split(Split.TRAIN)
    assert all(shares)


def test_more_readers_than_shards_still_read(directory):
    s = stream(make(directory), rank=4, world=5)
    assert {i for batch in indices(s, 20) for i in batch} == set(in_split(Split.TRAIN))


def test_a_run_with_fewer_samples_sees_no_more_of_a_longer_cache(directory):
    data = make(directory, samples=25)
    assert len(data.shards.paths) == 3
    assert {i for batch in indices(stream(data), 20) for i in batch} == set(in_split(Split.TRAIN, 25))
    assert {i for b in data.val_dataloader() for i in b["index"].tolist()} == set(in_split(Split.VALIDATION, 25))
    assert data.counts[Split.TRAIN] == len(in_split(Split.TRAIN, 25))


def test_validation_takes_no_more_than_asked(directory):
    data = make(directory, validation_samples=2)
    assert [i for b in data.val_dataloader() for i in b["index"].tolist()] == in_split(Split.VALIDATION)[:2]


def test_steps_are_epochs_of_training_samples(directory):
    data = make(directory)
    train = len(in_split(Split.TRAIN))
    assert data.steps(3) == round(3 * train / 4)
    assert data.steps(3, batches_a_step=2) == round(3 * train / 8)
    assert data.steps(0.001) == 1


def test_scales_are_standard_deviations(directory):
    embedding = torch.randn(5, WIDTH) * 0.1
    state, embedded = make(directory).scales(embedding)
    assert state == pytest.approx(3, rel=0.05)
    assert embedded == pytest.approx(0.1, rel=0.6)
    doubled = make(directory).scales(2 * embedding)
    assert doubled == pytest.approx((state, 2 * embedded))


def test_a_cache_that_is_too_short_says_so(directory, tmp_path):
    with pytest.raises(CacheError, match=r"lacks shards \[4\] of 5; run the cache stage first"):
        make(directory, samples=41)
    with pytest.raises(CacheError, match=r"no manifest.json\); run the cache stage first"):
        make(tmp_path)
    short = ShardCache(tmp_path)
    short.pin({"shard_size": 10, "fingerprint": "a"})
    with pytest.raises(CacheError, match=r"no index.json\); run the cache stage first"):
        make(tmp_path)
    short.write(0, [stored.load() for stored in Shards([ShardCache(directory).path(0)], 10**6).read(Split.TRAIN)])
    short.write_index(1)
    with pytest.raises(CacheError, match=r"lacks shards \[0\] of 1"):
        make(tmp_path, samples=10)
    with pytest.raises(CacheError, match=r"none of the 3 samples in .* is a validation one; raise cache.samples"):
        make(tmp_path, samples=3)


SWAPS = {
    "another shard": lambda cache: shutil.copy(cache.path(2), cache.path(1)),
    "a prompt": lambda cache: replace_in(cache.path(1), b'"prompt 13"', b'"prompt 12"'),
    "a letter": lambda cache: replace_in(cache.path(1), b'"prompt 13"', b'"qrompt 13"'),
    "a seed": lambda cache: replace_in(cache.path(1), b'"seed": 13', b'"seed": 23'),
    "an index": lambda cache: replace_in(cache.path(1), b'"index": 26', b'"index": 36'),
    "a picture": lambda cache: replace_in(cache.path(1), b'"picture": "", "prompt": "prompt 13"',
                                          b'"picture":"1", "prompt": "prompt 13"'),
}  # fmt: skip


def replace_in(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS.keys())
def test_each_sample_is_held_against_the_index(tmp_path, swap):
    """A shard of the same size that holds other samples, whose own checksums are right."""
    fill(tmp_path)
    data = make(tmp_path)
    swap(ShardCache(tmp_path))
    with pytest.raises(
        CacheError, match=r"sample 0000\d+ in \S+/00001.tar is another one than .*; re-run the cache sta"
    ):
        indices(stream(data), 20)


def test_damage_that_came_after_the_start_is_refused_not_skipped(directory, tmp_path):
    """A bit that flips in a state, and a tar cut short."""
    content = bytearray(ShardCache(directory).path(0).read_bytes())
    with tarfile.open(ShardCache(directory).path(0)) as tar:
        member = tar.getmember("00000000.safetensors")
    broken = tmp_path / "00000.tar"
    shards = Shards([broken], 10**6)
    flipped = content.copy()
    flipped[member.offset_data + member.size - 1] ^= 1
    broken.write_bytes(flipped)
    with pytest.raises(CacheError, match=r"sample 00000000 in .* is damaged \(checksum\)"):
        [stored.load() for stored in shards.read(Split.TRAIN)]
    broken.write_bytes(content[: len(content) // 2])
    with pytest.raises(CacheError, match="re-run the cache stage"):
        list(shards.read(Split.TRAIN))
