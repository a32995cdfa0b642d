"""The cache of hidden states: webdataset shards that can be trusted.

    manifest.json      what every sample was made with; pinned, compared by name
    00012.tar          <key>.safetensors + <key>.json a sample, a fixed range of samples a shard
    00012.json         the shard's entry, written last: without it, or if the file differs from it, there is no shard
    index.json         the entries of all shards, once they are complete: to start training, no shard need be touched
    claims.lock        empty; a process locks a byte of it for as long as it makes a shard

A shard is the unit of work, of resumption and of repair. Its bytes depend on nothing but the manifest and its prompts.
A finished cache may be copied to where webdataset can open it (http, https, s3 and others) and be read from there.
L image tokens, d width; stream 0 is conditional, 1 unconditional.
"""

import errno
import hashlib
import io
import json
import os
import shlex
import tarfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from webdataset.gopen import gopen

from ssd_train.processes.files import claim, sha256, write_atomically
from ssd_train.prompts import split_of


class CacheDtype(StrEnum):
    """How states are stored; int8 has one scale a token."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


BYTES_PER_VALUE = {CacheDtype.float32: 4, CacheDtype.bfloat16: 2, CacheDtype.int8: 1}


class CacheError(RuntimeError):
    """Something in a cache is not what it should be; the message says what, and how to mend it."""


@dataclass(frozen=True)
class Sample:
    """tokens [h, w] int32; hidden [2, L, d], the states H before the final norm that predicted them; ``backbone`` the
    fingerprint of whose states they are."""

    index: int
    prompt: str
    seed: int
    tokens: Tensor
    hidden: Tensor
    backbone: str


@dataclass(frozen=True)
class ShardEntry:
    """``samples`` holds (index, hash of the prompt, split) of each, so that comparing and counting need no tar."""

    bytes: int
    sha256: str
    backbone: str
    samples: list[list]


# -- states on disk -----------------------------------------------------------------------------------------------


def pack(hidden: Tensor, dtype: CacheDtype) -> dict[str, Tensor]:
    """States [2, L, d] -> tensors to store. int8 is symmetric, one float32 scale a token."""
    if dtype is not CacheDtype.int8:
        return {"hidden": hidden.to(getattr(torch, dtype)).contiguous()}
    scale = hidden.abs().amax(-1).float().clamp_min(1e-12) / 127
    return {"hidden": (hidden / scale[..., None]).round().to(torch.int8), "scale": scale}


def unpack(tensors: dict[str, Tensor]) -> Tensor:
    """The inverse of :func:`pack`, float32."""
    hidden = tensors["hidden"].float()
    return hidden * tensors["scale"][..., None] if "scale" in tensors else hidden


def sample_bytes(length: int, width: int, dtype: CacheDtype) -> int:
    """Bytes of one sample on disk, to about 1 %."""
    scale = 4 if dtype is CacheDtype.int8 else 0
    return 2 * length * (width * BYTES_PER_VALUE[dtype] + scale) + 4 * length + 3072


def _encode(sample: Sample, dtype: CacheDtype) -> tuple[bytes, bytes]:
    if not torch.isfinite(sample.hidden).all():
        raise CacheError(
            f"a state of sample {sample.index} ({sample.prompt!r}) is NaN or infinite: the backbone overflowed; try "
            "model.backbone.dtype=float32"
        )
    tensors = pack(sample.hidden, dtype) | {"tokens": sample.tokens.to(torch.int32)}
    payload = safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
    info = {"index": sample.index, "prompt": sample.prompt, "seed": sample.seed, "backbone": sample.backbone}
    info["crc32"] = zlib.crc32(payload)
    return payload, json.dumps(info, sort_keys=True).encode()


def decode_sample(files: dict) -> Sample:
    """A webdataset sample ({"safetensors": bytes, "json": bytes, ...}) -> Sample, its checksum verified."""
    where = f"sample {files.get('__key__')} in {files.get('__url__')}"
    try:
        payload, info = files["safetensors"], json.loads(files["json"])
        if zlib.crc32(payload) != info["crc32"]:
            raise CacheError(f"{where} is damaged (checksum); re-run the cache stage with cache.verify=true to mend it")
        tensors = safetensors.torch.load(payload)
        return Sample(info["index"], info["prompt"], info["seed"], tensors["tokens"], unpack(tensors), info["backbone"])
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise CacheError(f"{where} is damaged ({error}); re-run the cache stage to mend it") from error


# -- a directory of shards ----------------------------------------------------------------------------------------


def place(directory: str | Path) -> str | Path:
    """Where a cache lies: a path, or a URL as it stands."""
    return directory.rstrip("/") if isinstance(directory, str) and "://" in directory else Path(directory)


class ShardCache:
    """The shards under one directory, all made from one manifest. One under a URL is only read."""

    def __init__(self, directory: str | Path):
        self.directory = place(directory)
        self.remote = isinstance(self.directory, str)
        if not self.remote:
            self.manifest_path = self.directory / "manifest.json"
            self.claims = self.directory / "claims.lock"

    def check(self, identity: dict) -> None:
        """Raises CacheError naming each value of ``identity`` in which the manifest that is there differs.
        Library versions are recorded, not compared: they alter rounding only."""
        mine, theirs = json.loads(json.dumps(identity)), self.manifest()
        different = [key for key in mine if key != "versions" and mine[key] != theirs.get(key)]
        if different:
            lines = [f"  {key}: cache {theirs.get(key)!r}, this run {mine[key]!r}" for key in different]
            raise CacheError(
                f"the cache in {self.directory} was made with something else:\n"
                + "\n".join(lines)
                + "\nUse another cache.dir, or remove this one if it is not needed."
            )

    def pin(self, manifest: dict) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(self.manifest_path, json.dumps(manifest, indent=2, sort_keys=True).encode())

    def manifest(self) -> dict:
        return self._read("manifest.json", lambda text: dict(json.loads(text)))

    @cached_property
    def entries(self) -> dict[int, ShardEntry]:
        """Of the shards that there are, from index.json: a start that touches none of them. Raises CacheError if there
        is no index."""
        there = None if self.remote else set(os.listdir(self.directory))
        return {i: entry for i, entry in enumerate(self._index()) if there is None or self.path(i).name in there}

    def write_index(self, count: int) -> None:
        """Puts the entries of shards 0 to ``count`` - 1 into index.json, and leaves those of further ones: runs with
        other numbers of samples share it. Nothing is written if they are there, so that a finished cache may be
        read-only. Raises CacheError if a shard is not of the manifest's backbone."""
        with suppress(CacheError):
            if self._index()[:count] == [self.entry(i) for i in range(count)]:
                return
        with claim(self.directory / "manifest.lock"):
            new = [self.entry(i) for i in range(count)]
            if None in new:
                return  # another process is making that shard longer, and writes the index when it is done
            expected = self.manifest()["fingerprint"]
            for i, entry in enumerate(new):
                if entry.backbone != expected:
                    raise CacheError(
                        f"{self.path(i)} holds states of backbone {entry.backbone}, but the cache is of {expected}: it "
                        "was copied here from elsewhere. Remove it and run the cache stage again."
                    )
            try:
                old = self._index()
            except CacheError:
                old = []
            new += old[count:]
            if new != old:
                write_atomically(self.directory / "index.json", json.dumps([asdict(entry) for entry in new]).encode())

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.tar"

    def url(self, file: int | str) -> str:
        """What webdataset opens to read a shard, by its number, or another file of the cache, by its name."""
        where = f"{self.directory}/{f'{file:05d}.tar' if isinstance(file, int) else file}"
        return f"pipe:aws s3 cp {shlex.quote(where)} -" if where.startswith("s3://") else where

    def _index(self) -> list[ShardEntry]:
        return self._read("index.json", lambda text: [ShardEntry(**entry) for entry in json.loads(text)])

    def _read(self, name: str, parse: Callable[[bytes], Any]) -> Any:
        """A file of the cache, parsed. Raises CacheError if it is not there, or not what it should be."""
        try:
            with gopen(self.url(name)) as file:
                return parse(file.read())
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, FileNotFoundError) and not self.remote:
                reason = f"there is no cache in {self.directory} (no {name}); run the cache stage first"
            else:
                reason = (
                    f"{self.directory}/{name} cannot be read ({error}); expected that of a finished cache, which is "
                    "made in a directory and can then be copied to where a URL leads"
                )
            raise CacheError(reason) from error

    def write(self, shard: int, samples: Iterable[Sample], dtype: CacheDtype) -> ShardEntry:
        """Writes a shard so that it is there whole or not at all. A full disk raises CacheError; nothing is left."""
        samples = list(samples)
        path = self.path(shard)
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                    for sample in samples:
                        for extension, content in zip(("safetensors", "json"), _encode(sample, dtype), strict=True):
                            member = tarfile.TarInfo(f"{sample.index:08d}.{extension}")
                            member.size = len(content)
                            tar.addfile(member, io.BytesIO(content))
                file.flush()
                os.fsync(file.fileno())
            size, digest = temporary.stat().st_size, sha256(temporary)
            entry = ShardEntry(size, digest, samples[0].backbone, [describe(s.index, s.prompt) for s in samples])
            temporary.replace(path)
            write_atomically(path.with_suffix(".json"), json.dumps(asdict(entry), sort_keys=True).encode())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CacheError(
                    f"the disk is full while writing {path}; the shards before it are safe. "
                    "Free some space (cache.dtype=int8 halves bfloat16) and run the same command again."
                ) from error
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return entry

    def entry(self, shard: int, verify: bool = False) -> ShardEntry | None:
        """The shard's entry if the shard is there and whole, else None. ``verify`` reads and hashes the file
        (otherwise only its size is compared). Under a URL what the index says has to do; samples are checked as they
        are read."""
        if self.remote:
            return self.entries.get(shard)
        path = self.path(shard)
        try:
            entry = ShardEntry(**json.loads(path.with_suffix(".json").read_text()))
            whole = path.stat().st_size == entry.bytes and not (verify and sha256(path) != entry.sha256)
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return entry if whole else None


def describe(index: int, prompt: str) -> list:
    """What a shard's entry says about a sample."""
    return [index, hashlib.sha256(prompt.encode()).hexdigest()[:16], str(split_of(prompt))]
