"""The thread that writes shards: what it writes, in what order it lets go, and what errors on either side leave."""

import os
import threading

import pytest
import torch
from disk import full_for

from ssd_train.cache.shards import CacheDtype, CacheError, Sample, ShardCache
from ssd_train.cache.writer import ShardWriter
from ssd_train.processes.files import Claims, share_out


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path)


def samples(shard, count=5):
    for i in range(count):
        hidden = torch.full((2, 6, 4), float(shard))
        yield Sample.of(5 * shard + i, f"prompt {i}", 0, torch.zeros(2, 3), hidden, "a", CacheDtype.int8)


def names(cache):
    return sorted(path.name for path in cache.directory.iterdir())


@pytest.mark.parametrize("ahead", [1, 3, 100])
def test_everything_is_there_at_the_end_in_order(cache, tmp_path, ahead):
    written = []
    with ShardWriter(cache, ahead, written.append) as writer:
        for shard in 4, 0, 2:
            writer.write(shard, samples(shard))
        writer.finish()
        assert written == [4, 0, 2]
        writer.write(1, samples(1))
    assert written == [4, 0, 2, 1]
    (tmp_path / "alone").mkdir()
    alone = ShardCache(tmp_path / "alone")
    for shard in range(3):
        assert alone.write(shard, samples(shard)) == cache.entry(shard, verify=True)


def test_a_shard_is_written_while_the_next_is_made(cache, monkeypatch):
    """The first cannot be finished before the second one's samples are asked for; the caller does not notice."""
    asked, write = threading.Event(), cache.write
    monkeypatch.setattr(cache, "write", lambda shard, given: (write(shard, given), asked.wait(60)))

    def late():
        asked.set()
        yield from samples(1)

    with ShardWriter(cache, 100, lambda shard: None) as writer:
        writer.write(0, samples(0))
        writer.write(1, late())
    assert cache.entry(0)
    assert cache.entry(1)


def test_a_caller_that_is_ahead_waits(cache, monkeypatch):
    """No more samples than asked for are in memory: one is being written, one is in the caller's hands."""
    made, most, write = [], [], cache.write

    def slow(shard, given):
        def taking():
            for taken, sample in enumerate(given):
                most.append(len(made) - taken)
                yield sample

        write(shard, taking())

    monkeypatch.setattr(cache, "write", slow)
    with ShardWriter(cache, 2, lambda shard: None) as writer:
        writer.write(0, (made.append(sample) or sample for sample in samples(0, 40)))
    assert max(most) <= 2 + 2
    assert len(cache.entry(0).samples) == 40


@pytest.mark.parametrize("ahead", [1, 100])
def test_an_error_of_the_thread_stops_the_caller(cache, ahead):
    """A full disk, at the second of many shards; nobody waits for ever for room in the queue."""
    begun = []

    def run():
        with ShardWriter(cache, ahead, lambda shard: None) as writer:
            for shard in range(10_000):
                begun.append(shard)
                writer.write(shard, samples(shard, 1))

    with full_for("00001.tar"), pytest.raises(CacheError, match=r"the disk is full while writing .*00001.tar"):
        run()
    assert len(begun) < 10_000
    assert names(cache) == ["00000.json", "00000.tar"]


def test_an_error_of_the_caller_gives_up_only_the_shard_in_the_making(cache):
    def fails():
        yield from samples(2)
        raise KeyboardInterrupt

    def run():
        with ShardWriter(cache, 100, lambda shard: None) as writer:
            for shard in 0, 1:
                writer.write(shard, samples(shard))
            writer.write(2, fails())

    with pytest.raises(KeyboardInterrupt):
        run()
    assert names(cache) == ["00000.json", "00000.tar", "00001.json", "00001.tar"]
    assert not [thread for thread in threading.enumerate() if "_run" in thread.name]


def test_processes_with_writers_share_shards(cache, tmp_path):
    """Three of them: each shard is made once, by one, to the bytes that one alone makes."""

    def work(rank):
        with Claims(tmp_path / "claims.lock") as claims, ShardWriter(cache, 2, claims.release) as writer:
            pieces = share_out(claims, range(12), lambda i, again: cache.entry(i) is not None, writer.finish)
            for shard in pieces:
                (tmp_path / f"made-{shard}-{rank}").touch()
                writer.write(shard, samples(shard))

    children = []
    for rank in range(3):
        children.append(os.fork())
        if not children[-1]:
            try:
                work(rank)
            except BaseException:
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("made-*")) == list(range(12))
    (tmp_path / "alone").mkdir()
    alone = ShardCache(tmp_path / "alone")
    assert [alone.write(i, samples(i)) for i in range(12)] == [cache.entry(i, verify=True) for i in range(12)]
