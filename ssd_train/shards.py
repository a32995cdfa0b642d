"""The cache of hidden states: webdataset shards that can be trusted.

    manifest.json      what every sample was made with; pinned, compared by name
    00012.tar          <key>.safetensors + <key>.json a sample, a fixed range of samples a shard
    00012.json         the shard's entry, written last: without it, or if the file differs from it, there is no shard
    claims.lock        empty; a process locks a byte of it for as long as it makes a shard

A shard is the unit of work, of resumption and of repair. Its bytes depend on nothing but the manifest and its prompts.
L image tokens, d width; stream 0 is conditional, 1 unconditional.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ssd_train.files import write_atomically
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
    """tokens [h, w] int32; hidden [2, L, d], the states H before the final norm that predicted them."""

    index: int
    prompt: str
    seed: int
    tokens: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class ShardEntry:
    """``samples`` holds (index, hash of the prompt, split) of each, so that comparing and counting need no tar."""

    bytes: int
    sha256: str
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
    info = {"index": sample.index, "prompt": sample.prompt, "seed": sample.seed, "crc32": zlib.crc32(payload)}
    return payload, json.dumps(info, sort_keys=True).encode()


def decode_sample(files: dict) -> Sample:
    """A webdataset sample ({"safetensors": bytes, "json": bytes, ...}) -> Sample, its checksum verified."""
    where = f"sample {files.get('__key__')} in {files.get('__url__')}"
    try:
        payload, info = files["safetensors"], json.loads(files["json"])
        if zlib.crc32(payload) != info["crc32"]:
            raise CacheError(f"{where} is damaged (checksum); re-run the cache stage with cache.verify=true to mend it")
        tensors = safetensors.torch.load(payload)
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise CacheError(f"{where} is damaged ({error}); re-run the cache stage to mend it") from error
    return Sample(info["index"], info["prompt"], info["seed"], tensors["tokens"], unpack(tensors))


# -- a directory of shards ----------------------------------------------------------------------------------------


class ShardCache:
    """The shards under one directory, all made from one manifest."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.manifest_path = self.directory / "manifest.json"

    def check(self, identity: dict) -> None:
        """Raises CacheError naming each value of ``identity`` in which the manifest that is there differs.
        Library versions are recorded, not compared: they alter rounding only."""
        mine, theirs = json.loads(json.dumps(identity)), self.manifest()
        different = [key for key in mine if key != "versions" and mine[key] != theirs.get(key)]
        if different:
            lines = [f"  {key}: cache {theirs.get(key)!r}, this run {mine[key]!r}" for key in different]
            raise CacheError(
                f"the cache in {self.directory} was made with something else:\n" + "\n".join(lines)
                + "\nUse another cache.dir, or remove this one if it is not needed."
            )

    def pin(self, manifest: dict) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(self.manifest_path, json.dumps(manifest, indent=2, sort_keys=True).encode())

    def manifest(self) -> dict:
        if not self.manifest_path.exists():
            raise CacheError(f"there is no cache in {self.directory} (no manifest.json); run the cache stage first")
        return json.loads(self.manifest_path.read_text())

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.tar"

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
            size, digest = temporary.stat().st_size, _sha256(temporary)
            entry = ShardEntry(size, digest, [describe(s.index, s.prompt) for s in samples])
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
        (otherwise only its size is compared)."""
        path = self.path(shard)
        try:
            entry = ShardEntry(**json.loads(path.with_suffix(".json").read_text()))
            whole = path.stat().st_size == entry.bytes and not (verify and _sha256(path) != entry.sha256)
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return entry if whole else None

    @contextmanager
    def claim(self, shard: int | None, wait: bool = True) -> Iterator[bool]:
        """Yields whether this process alone may make the shard (None: the manifest) until the context ends. What
        another process has claimed is waited for, or with ``wait`` false not had. A claim ends with its process,
        however that ends."""
        self.directory.mkdir(parents=True, exist_ok=True)
        byte = 0 if shard is None else shard + 1
        with (self.directory / "claims.lock").open("a") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
            except (BlockingIOError, PermissionError):
                yield False
            else:
                yield True


def describe(index: int, prompt: str) -> list:
    """What a shard's entry says about a sample."""
    return [index, hashlib.sha256(prompt.encode()).hexdigest()[:16], str(split_of(prompt))]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
