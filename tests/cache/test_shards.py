"""Shards on disk: exact bytes, errors of the storage dtypes, and every way in which a shard can be broken."""

import errno
import json
import os
import shutil
import tarfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from serving import Quiet, serving

from ssd_train.cache import shards
from ssd_train.cache.shards import (
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
from ssd_train.prompts import Split
from ssd_train.training.datamodule import Shards


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
            backbone="a",
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
        assert read.backbone == sample.backbone
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


@pytest.mark.parametrize("name, content", [
    ("manifest", ""), ("manifest", "{"), ("manifest", "null"), ("index", "[{"), ("index", "[{}]"),
])  # fmt: skip
def test_a_broken_file_is_named(cache, name, content):
    (cache.directory / f"{name}.json").write_text(content)
    with pytest.raises(CacheError, match=rf"{name}.json cannot be read \(.*\); expected that of a finished cache"):
        _ = cache.manifest() if name == "manifest" else cache.entries


def test_no_manifest_is_no_cache(cache):
    with pytest.raises(CacheError, match=r"no manifest.json\); run the cache stage first"):
        cache.manifest()


def test_the_manifest_is_json_that_people_can_read(cache):
    cache.pin(IDENTITY)
    assert json.loads(cache.manifest_path.read_text()) == IDENTITY
    assert len(cache.manifest_path.read_text().splitlines()) > len(IDENTITY)


# -- the index ----------------------------------------------------------------------------------------------------


@pytest.fixture
def indexed(cache):
    """Three shards of three samples."""
    cache.pin(IDENTITY)
    for shard in range(3):
        cache.write(shard, make_samples(first=3 * shard), CacheDtype.float32)
    cache.write_index(3)
    return cache


def fresh(cache):
    """As another process sees it."""
    return ShardCache(cache.directory)


def test_a_start_reads_the_index_and_touches_no_shard(indexed, monkeypatch):
    """Opening or asking for the size of a tar or of its entry is a failure."""
    expected = {i: indexed.entry(i) for i in range(3)}

    def touched(path, *_, **__):
        raise AssertionError(f"{path} was touched")

    for name in "stat", "open", "read_text", "read_bytes":
        monkeypatch.setattr(Path, name, touched)
    assert fresh(indexed).entries == expected


def test_the_index_leaves_out_a_shard_that_has_gone(indexed):
    indexed.path(1).unlink()
    assert sorted(fresh(indexed).entries) == [0, 2]


def test_the_index_grows_and_does_not_shrink(indexed):
    """Runs with 9, 6 and 12 samples: the second makes nothing; the third a longer last shard and another one."""
    before = (indexed.directory / "index.json").stat().st_mtime_ns
    indexed.write_index(2)
    assert (indexed.directory / "index.json").stat().st_mtime_ns == before
    indexed.write(2, make_samples(4, first=6), CacheDtype.float32)
    indexed.write(3, make_samples(2, first=10), CacheDtype.float32)
    indexed.write_index(4)
    assert [len(fresh(indexed).entries[i].samples) for i in range(4)] == [3, 3, 4, 2]


def test_the_index_of_a_finished_cache_is_left_alone_where_nothing_can_be_written(indexed, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in "claim", "write_atomically":
        monkeypatch.setattr(shards, name, refuse)
    indexed.write_index(3)
    indexed.write_index(2)
    (indexed.directory / "index.json").unlink()
    with pytest.raises(OSError, match="Read-only"):
        indexed.write_index(3)


def test_an_index_is_not_written_while_a_shard_is_in_the_making(indexed):
    (indexed.directory / "index.json").unlink()
    indexed.path(1).with_suffix(".json").unlink()
    indexed.write_index(3)
    with pytest.raises(CacheError, match=r"no index.json\); run the cache stage first"):
        _ = fresh(indexed).entries


def test_a_broken_index_is_written_again(indexed):
    expected = (indexed.directory / "index.json").read_bytes()
    (indexed.directory / "index.json").write_bytes(expected[:-3])
    indexed.write_index(3)
    assert (indexed.directory / "index.json").read_bytes() == expected


def test_a_shard_of_another_backbone_is_refused_by_name(indexed, tmp_path):
    """Whole and of the same prompts: tar and entry are copied from a cache of other weights."""
    for suffix in ".tar", ".json":
        indexed.path(1).with_suffix(suffix).unlink()
    theirs = [replace(sample, backbone="b") for sample in make_samples(first=3)]
    indexed.write(1, theirs, CacheDtype.float32)
    with pytest.raises(CacheError, match=r"00001.tar holds states of backbone b, but the cache is of a: .* Remove it"):
        indexed.write_index(3)


# -- under a URL --------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(indexed):
    """The same cache, served; a trailing slash does not matter."""
    with serving(indexed.directory) as url:
        yield ShardCache(f"{url}/")


needs_curl = pytest.mark.skipif(not shutil.which("curl"), reason="webdataset reads URLs with curl, which is not here")


def all_of(cache, count=3):
    """{index: states} as the training reads them."""
    paths = [cache.url(i) for i in range(count)]
    shards = Shards(paths, 10**6, {path: cache.entries[i] for i, path in enumerate(paths)})
    samples = [sample for split in Split for sample in shards.read(split)]
    return {sample.index: sample.hidden.tolist() for sample in samples}


@needs_curl
def test_a_cache_under_a_url_is_the_one_that_was_copied_there(indexed, remote):
    assert remote.manifest() == indexed.manifest()
    assert remote.entries == indexed.entries
    assert remote.entry(1, verify=True) == indexed.entry(1)
    assert remote.entry(3) is None
    read = all_of(remote)
    assert len(read) == 9
    assert read == all_of(indexed)


@needs_curl
def test_what_is_not_under_a_url_is_named(indexed, remote):
    with pytest.raises(CacheError, match=rf"{remote.directory}/nowhere/manifest.json cannot be read .*exit 22"):
        ShardCache(f"{remote.directory}/nowhere").manifest()
    assert len(remote.entries) == 3
    indexed.path(1).unlink()
    with pytest.raises(CacheError, match=rf"a shard cannot be read .*{remote.directory}/00001.tar"):
        all_of(remote)


@needs_curl
def test_a_transfer_that_breaks_off_is_refused(indexed):
    """The server promises the whole shard and hangs up in the middle of it, or between two samples."""
    length = len(indexed.path(1).read_bytes())
    with tarfile.open(indexed.path(1)) as tar:
        between = tar.getmembers()[2].offset
    for sent in length // 2 + 7, between:

        class HangsUp(Quiet):
            def copyfile(self, source, out, sent=sent):
                out.write(source.read() if "00001" not in self.path else source.read(sent))

        with serving(partial(HangsUp, directory=indexed.directory)) as url:
            cache = ShardCache(url)
            assert len(cache.entries) == 3
            with pytest.raises(CacheError, match=r"00001\.tar"):
                all_of(cache)


def test_without_curl_the_reason_is_said(remote, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CacheError, match=r"manifest.json cannot be read \(.*No such file or directory: 'curl'"):
        remote.manifest()


def test_s3_is_read_with_the_aws_command(indexed, tmp_path, monkeypatch):
    """A stand-in for it that has this bucket: what is proven is how it is called, and that its output is read."""
    (tmp_path / "bin").mkdir()
    aws = tmp_path / "bin/aws"
    aws.write_text(
        f'#!/bin/sh\n[ "$1 $2 $4" = "s3 cp -" ] || exit 2\ncat "{indexed.directory}/${{3#s3://bucket/my cache/}}"\n'
    )
    aws.chmod(0o755)
    monkeypatch.setenv("PATH", f"{aws.parent}:{os.environ['PATH']}")
    cache = ShardCache("s3://bucket/my cache")
    assert cache.entries == indexed.entries
    assert all_of(cache) == all_of(indexed)
    with pytest.raises(CacheError, match=r"s3://bucket/other/manifest.json cannot be read .*exit 1"):
        ShardCache("s3://bucket/other").manifest()
