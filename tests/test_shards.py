"""Shards on disk: exact bytes, errors of the storage dtypes, and every way in which a shard can be broken."""

import errno
import json
import os
import signal
import tarfile
import time

import pytest
import torch

from ssd_train.shards import (
    CacheDtype,
    CacheError,
    Sample,
    ShardCache,
    decode_sample,
    describe,
    pack,
    sample_bytes,
    unpack,
)


def make_samples(count=3, grid=(2, 3), width=8, first=0):
    generator = torch.Generator().manual_seed(first)
    h, w = grid
    return [
        Sample(
            index=first + i,
            prompt=f"prompt {first + i}",
            seed=1000 + i,
            tokens=torch.randint(5, grid, generator=generator).int(),
            hidden=torch.randn(2, h * w, width, generator=generator),
        )
        for i in range(count)
    ]


def files(path):
    """The members of a tar as webdataset hands them over, sample by sample."""
    with tarfile.open(path) as tar:
        names = sorted({member.name.split(".")[0] for member in tar})
        for name in names:
            yield {
                "__key__": name,
                "__url__": str(path),
                "safetensors": tar.extractfile(f"{name}.safetensors").read(),
                "json": tar.extractfile(f"{name}.json").read(),
            }


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path)


# -- states on disk -----------------------------------------------------------------------------------------------


def test_float32_is_exact_and_bfloat16_rounds_once():
    hidden = torch.randn(2, 6, 64) * 37
    assert torch.equal(unpack(pack(hidden, CacheDtype.float32)), hidden)
    rounded = unpack(pack(hidden, CacheDtype.bfloat16))
    assert ((rounded - hidden).abs() <= 2.0**-8 * hidden.abs()).all()
    assert torch.equal(unpack(pack(hidden.bfloat16(), CacheDtype.bfloat16)), hidden.bfloat16().float())


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_int8_errs_by_at_most_half_a_step_of_its_token_scale(source):
    hidden = (torch.randn(2, 6, 64) * torch.logspace(-3, 3, 6)[:, None]).to(source)
    stored = pack(hidden, CacheDtype.int8)
    assert stored["hidden"].dtype is torch.int8
    assert stored["scale"].shape == (2, 6)
    step = hidden.abs().amax(-1).float() / 127
    error = (unpack(stored) - hidden.float()).abs().amax(-1)
    assert (error <= 0.502 * step).all()
    assert (error > 0.3 * step).all(), "one scale a token: an error of this size shows that it is used"


def test_int8_of_zeros_is_zeros():
    assert torch.equal(unpack(pack(torch.zeros(2, 3, 4), CacheDtype.int8)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused_and_nothing_is_written(cache, value):
    samples = make_samples()
    samples[1].hidden[1, 2, 3] = value
    with pytest.raises(CacheError, match=r"sample 1 \('prompt 1'\) is NaN or infinite.*backbone.dtype=float32"):
        cache.write(0, samples, CacheDtype.float32)
    assert list(cache.directory.iterdir()) == []


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_a_shard_gives_back_what_was_written(cache, dtype):
    samples = make_samples()
    cache.write(0, samples, dtype)
    for sample, read in zip(samples, map(decode_sample, files(cache.path(0))), strict=True):
        assert (read.index, read.prompt, read.seed) == (sample.index, sample.prompt, sample.seed)
        assert torch.equal(read.tokens, sample.tokens)
        assert read.tokens.dtype is torch.int32
        assert torch.equal(read.hidden, unpack(pack(sample.hidden, dtype)))


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_the_estimate_is_within_one_percent(cache, dtype):
    samples = make_samples(count=8, grid=(16, 16), width=256)
    entry = cache.write(0, samples, dtype)
    assert 8 * sample_bytes(256, 256, dtype) == pytest.approx(entry.bytes, rel=0.01)


# -- writing ------------------------------------------------------------------------------------------------------


def test_the_same_samples_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    first = ShardCache(tmp_path / "a")
    second = ShardCache(tmp_path / "b")
    for cache in first, second:
        cache.directory.mkdir()
        cache.write(3, make_samples(), CacheDtype.bfloat16)
        monkeypatch.setattr(time, "time", lambda: 1e9)
    for name in "00003.tar", "00003.json":
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


def test_a_full_disk_is_said_clearly_and_leaves_nothing(cache):
    """The kernel's own ENOSPC: the temporary file is /dev/full."""
    cache.write(0, make_samples(), CacheDtype.float32)
    (cache.directory / "00001.tmp").symlink_to("/dev/full")
    with pytest.raises(CacheError, match=r"disk is full while writing .*00001.tar; the shards before it are safe"):
        cache.write(1, make_samples(first=3), CacheDtype.float32)
    assert sorted(path.name for path in cache.directory.iterdir()) == ["00000.json", "00000.tar"]
    assert cache.entry(0, verify=True)
    assert cache.entry(1) is None


def test_other_errors_stay_what_they_are(cache, monkeypatch):
    def broken(_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="input/output error"):
        cache.write(0, make_samples(), CacheDtype.float32)
    assert list(cache.directory.iterdir()) == []


def test_a_shard_is_not_replaced_before_its_successor_is_whole(cache):
    before = cache.write(0, make_samples(), CacheDtype.float32)

    def samples():
        yield from make_samples(2)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cache.write(0, samples(), CacheDtype.float32)
    assert cache.entry(0, verify=True) == before


# -- what is there ------------------------------------------------------------------------------------------------


def test_an_entry_describes_its_samples(cache):
    written = cache.write(0, make_samples(), CacheDtype.float32)
    assert cache.entry(0, verify=True) == written
    assert written.samples == [describe(i, f"prompt {i}") for i in range(3)]
    assert written.bytes == cache.path(0).stat().st_size


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_broken_shard_is_no_shard(cache):
    """Missing tar, missing entry, garbage in the entry, truncated: seen at once. A flipped bit: with verify."""
    tar, entry = cache.path(0), cache.path(0).with_suffix(".json")
    cache.write(0, make_samples(), CacheDtype.float32)
    good = {path: path.read_bytes() for path in (tar, entry)}
    for break_it in (
        tar.unlink,
        entry.unlink,
        lambda: entry.write_text('{"bytes": 3'),
        lambda: entry.write_text('{"bytes": 3}'),
        lambda: tar.write_bytes(good[tar][:-1]),
    ):
        break_it()
        assert cache.entry(0) is None
        for path, content in good.items():
            path.write_bytes(content)
    flip_a_bit(tar)
    assert cache.entry(0, verify=False)
    assert cache.entry(0, verify=True) is None


def test_a_damaged_sample_is_refused_by_name(cache):
    cache.write(0, make_samples(), CacheDtype.float32)
    raw = list(files(cache.path(0)))[1]
    flipped = bytearray(raw["safetensors"])
    flipped[-1] ^= 1
    where = f"sample 00000001 in {cache.path(0)} is damaged"
    with pytest.raises(CacheError, match=rf"{where} \(checksum\); re-run the cache stage"):
        decode_sample(raw | {"safetensors": bytes(flipped)})
    with pytest.raises(CacheError, match=rf"{where} \('json'\); re-run the cache stage"):
        decode_sample({key: value for key, value in raw.items() if key != "json"})
    with pytest.raises(CacheError, match=f"{where}.*re-run the cache stage"):
        decode_sample(raw | {"json": b"{"})


# -- manifest -----------------------------------------------------------------------------------------------------

IDENTITY = {"fingerprint": "a", "grid": [2, 3], "dtype": "int8", "sampling": {"guidance": 2.0}, "versions": {"x": 1}}


@pytest.mark.parametrize(
    "key, value",
    [("fingerprint", "b"), ("grid", [3, 2]), ("dtype", "float32"), ("sampling", {"guidance": 3.0}), ("new", True)],
)
def test_a_manifest_of_something_else_is_refused_by_name(cache, key, value):
    cache.pin(IDENTITY | {"readout_error": 0.0})
    cache.check(IDENTITY)
    cache.check(IDENTITY | {"versions": {"x": 2}})
    theirs = IDENTITY.get(key)
    with pytest.raises(CacheError) as caught:
        cache.check(IDENTITY | {key: value})
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [f"  {key}: cache {theirs!r}, this run {value!r}"]
    assert "Use another cache.dir" in lines[-1]


def test_no_manifest_is_no_cache(cache):
    with pytest.raises(CacheError, match=r"no manifest.json\); run the cache stage first"):
        cache.manifest()


def test_the_manifest_is_json_that_people_can_read(cache):
    cache.pin(IDENTITY)
    assert json.loads(cache.manifest_path.read_text()) == IDENTITY
    assert len(cache.manifest_path.read_text().splitlines()) > len(IDENTITY)


# -- claims -------------------------------------------------------------------------------------------------------


def test_a_claim_holds_for_one_process_and_dies_with_it(cache):
    """A child claims shard 1 and is killed: until then it is not to be had, others are; afterwards it is."""
    ready, claimed = os.pipe()
    child = os.fork()
    if child == 0:
        with cache.claim(1):
            os.write(claimed, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        with cache.claim(1, wait=False) as mine:
            assert not mine
        with cache.claim(0, wait=False) as other, cache.claim(None, wait=False) as manifest:
            assert other
            assert manifest
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with cache.claim(1, wait=True) as mine:
        assert mine
