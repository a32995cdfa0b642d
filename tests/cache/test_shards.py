"""Shards on disk: exact bytes, errors of the storage dtypes, and every way in which a shard can be broken."""

import errno
import io
import json
import math
import os
import shutil
import tarfile
import time
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from serving import Quiet, serving

from ssd_train.cache import shards
from ssd_train.cache.shards import (
    CacheDtype,
    CacheError,
    Sample,
    ShardCache,
    description,
    pack,
    sample_bytes,
    stored_samples,
    unpack,
)
from ssd_train.prompts import Split
from ssd_train.training.datamodule import Shards


def states(count=3, grid=(2, 3), width=8, first=0):
    """What :func:`make_samples` packs, [count, 2, L, d] float32."""
    return torch.randn(count, 2, math.prod(grid), width, generator=torch.Generator().manual_seed(first))


def make_samples(count=3, grid=(2, 3), width=8, first=0, dtype=CacheDtype.float32):
    generator = torch.Generator().manual_seed(first)
    return [
        Sample.of(first + i, f"prompt {first + i}", 1000 + i, torch.randint(5, grid, generator=generator), hidden, "a",
                  dtype)
        for i, hidden in enumerate(states(count, grid, width, first))
    ]  # fmt: skip


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


@pytest.mark.parametrize("dtype", list(CacheDtype))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_is_refused(value, dtype):
    hidden = torch.randn(2, 6, 8)
    hidden[1, 2, 3] = value
    with pytest.raises(CacheError, match=r"sample 1 \('a cat'\) is NaN or infinite.*backbone.dtype=float32"):
        Sample.of(1, "a cat", 0, torch.zeros(2, 3), hidden, "a", dtype)


def test_a_state_that_is_too_large_for_the_stored_dtype_is_refused():
    with pytest.raises(CacheError, match="is NaN or infinite"):
        Sample.of(
            1, "a cat", 0, torch.zeros(2, 3), torch.full((2, 6, 8), 1e300, dtype=torch.float64), "a", CacheDtype.float32
        )


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_a_shard_gives_back_what_was_written(cache, dtype):
    """As single samples, and into rows of larger tensors."""
    samples = make_samples(dtype=dtype)
    cache.write(0, samples)
    rows = {
        name: torch.stack([t] * 3).zero_() for name, t in (samples[0].states | {"tokens": samples[0].tokens}).items()
    }
    for i, (sample, stored) in enumerate(zip(samples, stored_samples(cache.path(0)), strict=True)):
        read = stored.load()
        assert (stored.index, stored.prompt, stored.seed) == (sample.index, sample.prompt, sample.seed)
        assert stored.backbone == read.backbone == sample.backbone
        assert torch.equal(read.tokens, sample.tokens)
        assert read.tokens.dtype is torch.int32
        assert torch.equal(read.hidden, unpack(pack(states()[i], dtype)))
        stored.read({name: tensor[i] for name, tensor in rows.items()})
    for name, tensor in rows.items():
        assert torch.equal(tensor, torch.stack([(s.states | {"tokens": s.tokens})[name] for s in samples]))


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_members_are_what_safetensors_and_tarfile_write(cache, dtype):
    """Bit for bit, so that a shard's bytes stay what they are whoever packs them."""
    samples = make_samples(dtype=dtype)
    cache.write(0, samples)
    expected = io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            payload = safetensors.torch.save(sample.states | {"tokens": sample.tokens})
            info = {name: getattr(sample, name) for name in ("index", "prompt", "seed", "backbone", "picture")}
            info = json.dumps(info | {"crc32": zlib.crc32(payload)}, sort_keys=True).encode()
            for extension, content in ("safetensors", payload), ("json", info):
                member = tarfile.TarInfo(f"{sample.index:08d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    assert cache.path(0).read_bytes() == expected.getvalue()


def test_int8_is_the_same_however_many_tokens_are_quantised_at_a_time(monkeypatch):
    hidden = torch.randn(2, 50, 64)
    whole = pack(hidden, CacheDtype.int8)
    monkeypatch.setattr(shards, "CHUNK", 64 * 7)
    few = pack(hidden.transpose(0, 1), CacheDtype.int8)
    assert all(torch.equal(few[name], whole[name].transpose(0, 1)) for name in whole)


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_the_estimate_is_within_one_percent(cache, dtype):
    entry = cache.write(0, make_samples(count=8, grid=(16, 16), width=256, dtype=dtype))
    assert 8 * sample_bytes(256, 256, dtype) == pytest.approx(entry.bytes, rel=0.01)


# -- writing ------------------------------------------------------------------------------------------------------


def test_the_same_samples_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    first = ShardCache(tmp_path / "a")
    second = ShardCache(tmp_path / "b")
    for cache in first, second:
        cache.directory.mkdir()
        cache.write(3, make_samples(dtype=CacheDtype.bfloat16))
        monkeypatch.setattr(time, "time", lambda: 1e9)
    for name in "00003.tar", "00003.json":
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


def test_a_full_disk_is_said_clearly_and_leaves_nothing(cache, monkeypatch):
    cache.write(0, make_samples())

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=r"disk is full while writing .*00001.tar; the shards before it are safe"):
        cache.write(1, make_samples(first=3))
    assert sorted(path.name for path in cache.directory.iterdir()) == ["00000.json", "00000.tar"]
    assert cache.entry(0, verify=True)
    assert cache.entry(1) is None


def test_other_errors_stay_what_they_are(cache, monkeypatch):
    def broken(_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="input/output error"):
        cache.write(0, make_samples())
    assert list(cache.directory.iterdir()) == []


def test_a_shard_is_not_replaced_before_its_successor_is_whole(cache):
    before = cache.write(0, make_samples())

    def samples():
        yield from make_samples(2)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cache.write(0, samples())
    assert cache.entry(0, verify=True) == before


# -- what is there ------------------------------------------------------------------------------------------------


def test_an_entry_describes_its_samples(cache):
    written = cache.write(0, make_samples())
    assert cache.entry(0, verify=True) == written
    assert written.samples == [description(i, f"prompt {i}", 1000 + i, "") for i in range(3)]
    assert written.bytes == cache.path(0).stat().st_size


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_broken_shard_is_no_shard(cache):
    """Missing tar, missing entry, garbage in the entry, truncated: seen at once. A flipped bit: with verify."""
    tar, entry = cache.path(0), cache.path(0).with_suffix(".json")
    cache.write(0, make_samples())
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


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def header(payload, old, new):
    """The payload with something else in its header, of the same length or longer."""
    size = int.from_bytes(payload[:8], "little")
    changed = payload[8 : 8 + size].replace(old, new)
    assert changed != payload[8 : 8 + size]
    return len(changed).to_bytes(8, "little") + changed + payload[8 + size :]


@pytest.mark.parametrize("damage, why", [
    (lambda files: files | {"safetensors": files["safetensors"][:-1] + b"?"}, "checksum"),
    (lambda files: files | {"safetensors": files["safetensors"][:-4]}, "bytes of tensors, expected"),
    (lambda files: files | {"safetensors": b"\xff" * 8 + files["safetensors"][8:]}, ""),
    (lambda files: files | {"safetensors": b""}, ""),
    (lambda files: files | {"safetensors": header(files["safetensors"], b"F32", b"F64")}, "F64"),
    (lambda files: files | {"safetensors": header(files["safetensors"], b"[2,6,8]", b"[2,6,9]")}, "lies at"),
    (lambda files: files | {"safetensors": header(files["safetensors"], b"hidden", b"hodden")}, "checksum"),
    (lambda files: {"safetensors": files["safetensors"]}, "'index'"),
    (lambda files: {"json": files["json"]}, "0 bytes of tensors"),
    (lambda files: files | {"json": b"{"}, "Expecting property name"),
    (lambda files: files | {"json": b"[]"}, "indices must be"),
    (lambda files: files | {"json": files["json"].replace(b'"seed": 1001', b'"seed": null')}, "None"),
])  # fmt: skip
def test_a_damaged_sample_is_refused_by_name(cache, damage, why):
    cache.write(0, make_samples())
    with tarfile.open(cache.path(0)) as tar:
        files = {name.partition(".")[2]: tar.extractfile(name).read() for name in tar.getnames() if "00000001" in name}
    path = cache.directory / "damaged.tar"
    write_tar(path, {f"00000001.{extension}": content for extension, content in damage(files).items()})
    with pytest.raises(CacheError, match=f"sample 00000001 in {path} is damaged .*{why}.*; re-run the cache stage"):
        [stored.load() for stored in stored_samples(path)]


def test_a_file_that_is_cut_short_after_its_sample_was_found_is_refused(cache):
    cache.write(0, make_samples())
    stored = list(stored_samples(cache.path(0)))
    os.truncate(cache.path(0), stored[1].payload + stored[1].size - 1)
    assert stored[0].load()
    with pytest.raises(CacheError, match=r"sample 00000001 in .* is damaged \(it ends too early\)"):
        stored[1].load()
    cache.path(0).unlink()
    with pytest.raises(CacheError, match=r"sample 00000000 in .* is damaged .*No such file"):
        stored[0].load()


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
    ("manifest", ""), ("manifest", "{"), ("manifest", "null"), ("manifest", "{}"), ("index", "[{"), ("index", "[{}]"),
    ("index", '{"shards": [], "digest": "0"}'),
])  # fmt: skip
def test_a_broken_file_is_named(cache, name, content):
    (cache.directory / f"{name}.json").write_text(content)
    with pytest.raises(CacheError, match=rf"{name}.json (holds|is damaged).*; (put back|re-run the cache)"):
        _ = cache.manifest() if name == "manifest" else cache.entries


def test_no_manifest_is_no_cache(cache):
    with pytest.raises(CacheError, match=r"no manifest.json\); run the cache stage first"):
        cache.manifest()


def test_the_manifest_is_json_that_people_can_read(cache):
    cache.pin(IDENTITY)
    assert cache.manifest() == IDENTITY
    assert len(cache.manifest_path.read_text().splitlines()) > len(IDENTITY)


# -- the index ----------------------------------------------------------------------------------------------------


@pytest.fixture
def indexed(cache):
    """Three shards of three samples."""
    cache.pin(IDENTITY)
    for shard in range(3):
        cache.write(shard, make_samples(first=3 * shard))
    cache.write_index(3)
    return cache


def fresh(cache):
    """As another process sees it."""
    return ShardCache(cache.directory)


@pytest.mark.parametrize(
    "directory, expected",
    [
        ("~/x", Path.home() / "x"),
        ("w:1/c", Path("w:1/c")),
        ("pipe:touch x;#", Path("pipe:touch x;#")),
        ("https://host/cache/", "https://host/cache"),
        ("s3://bucket/cache", "s3://bucket/cache"),
        ("ftp://host/cache", "a URL of 'ftp'; expected a directory, or one of http, https, s3"),
        ("pipe://touch x", "a URL of 'pipe'; expected"),
        ("https://me:secret@host/cache", r"a URL with a user, password or query.* \(~/.netrc\) or aws"),
        ("https://host/cache?token=secret", r"a URL with a user, password or query"),
    ],
)
def test_a_place_is_a_path_or_a_url_of_a_known_scheme(directory, expected):
    if isinstance(expected, str) and "://" not in expected:
        with pytest.raises(ValueError, match=expected) as error:
            shards.place(directory)
        assert "secret" not in str(error.value)
    else:
        assert shards.place(directory) == expected


def test_a_directory_may_have_any_name(tmp_path, monkeypatch):
    """None of them is a command or a URL."""
    monkeypatch.chdir(tmp_path)
    for name in "pipe:touch x;#", "w:1/c", "file[1]*?":
        cache = ShardCache(name)
        cache.pin(IDENTITY)
        cache.write(0, make_samples())
        cache.write_index(1)
        assert [sample.index for sample in shards.stored_samples(ShardCache(name).url(0))] == [0, 1, 2]
    assert not (tmp_path / "x").exists()


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
    indexed.write(2, make_samples(4, first=6))
    indexed.write(3, make_samples(2, first=10))
    indexed.write_index(4)
    assert [len(fresh(indexed).entries[i].samples) for i in range(4)] == [3, 3, 4, 2]


def test_the_index_of_a_finished_cache_is_left_alone_where_nothing_can_be_written(indexed, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in "claim", "write_json":
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
    indexed.write(1, theirs)
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
    samples = [stored.load() for split in Split for stored in shards.read(split)]
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
