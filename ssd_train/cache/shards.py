"""The cache of hidden states: webdataset shards that can be trusted.

    manifest.json      what every sample was made with; pinned, compared by name
    00012.tar          <key>.safetensors + <key>.json a sample, a fixed range of samples a shard
    00012.json         the shard's entry, written last: without it, or if the file differs from it, there is no shard
    index.json         the entries of all shards, once they are complete: to start training, no shard need be touched
    claims.lock        empty; a process locks a byte of it for as long as it makes a shard

A shard is the unit of work, of resumption and of repair. Its bytes depend on nothing but the manifest and its prompts.
A finished cache may be copied to where webdataset can open it (http, https, s3 and others) and be read from there.
S streams (0 is conditional, 1 unconditional; without guidance only the former), L image tokens, d width.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from torch import Tensor
from webdataset.gopen import Pipe

from ssd_train.processes.files import (
    DamagedFile,
    claim,
    read_json,
    replacing,
    sha256,
    unsealed,
    write_json,
)
from ssd_train.prompts import split_of


class CacheDtype(StrEnum):
    """How states are stored; int8 has one scale a token."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


BYTES_PER_VALUE = {CacheDtype.float32: 4, CacheDtype.bfloat16: 2, CacheDtype.int8: 1}
SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "I32": torch.int32}
CHUNK = 2**18
"""Bytes that are read, hashed or quantised at a time: they stay in a core's cache from one to the other."""


class CacheError(RuntimeError):
    """Something in a cache is not what it should be; the message says what, and how to mend it."""


@dataclass(frozen=True)
class Sample:
    """tokens [h, w] int32; states, as :func:`pack` makes them of the H before the final norm that predicted these;
    ``backbone`` the fingerprint of whose states they are; ``picture`` the digest of the one that the tokens were read
    off, if any. All on the host."""

    index: int
    prompt: str
    seed: int
    tokens: Tensor
    states: dict[str, Tensor]
    backbone: str
    picture: str = ""

    @classmethod
    def of(cls, index: int, prompt: str, seed: int, tokens: Tensor, hidden: Tensor, backbone: str,
           dtype: CacheDtype, picture: str = "") -> "Sample":  # fmt: skip
        """From states [S, L, d], which are converted where they lie. Raises CacheError if one is not finite."""
        states = pack(hidden, dtype)
        # NaN is the largest and smallest of what it is among; isfinite() of everything takes ten times as long.
        extremes = [x for t in states.values() if t.is_floating_point() for x in (t.amax(), t.amin())]
        if not all(x.isfinite() for x in extremes):
            raise CacheError(
                f"a state of sample {index} ({prompt!r}) is NaN or infinite: the backbone overflowed; try "
                "model.backbone.dtype=float32"
            )
        return cls(index, prompt, seed, tokens.int().cpu(), {k: v.cpu() for k, v in states.items()}, backbone, picture)

    @property
    def hidden(self) -> Tensor:
        """float32 [S, L, d]."""
        return unpack(self.states)


IDENTITY = {"index": int, "prompt": str, "seed": int, "backbone": str, "picture": str}
"""What a sample is, as its JSON says it."""


@dataclass(frozen=True)
class ShardEntry:
    """``samples`` holds what :func:`describe` says of each, so that comparing and counting need no tar."""

    bytes: int
    sha256: str
    backbone: str
    samples: list[list]


# -- states on disk -----------------------------------------------------------------------------------------------


def pack(hidden: Tensor, dtype: CacheDtype) -> dict[str, Tensor]:
    """States [..., d] -> tensors to store, on their device. int8 is symmetric, one float32 scale a token."""
    if dtype is not CacheDtype.int8:
        return {"hidden": hidden.to(getattr(torch, dtype)).contiguous()}
    stored = torch.empty_like(hidden, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = stored.new_empty(hidden.shape[:-1], dtype=torch.float32)
    few = max(1, CHUNK // hidden.shape[-1]) if hidden.device.type == "cpu" else scale.numel()  # tokens at a time
    rows = (tensor.flatten(0, hidden.ndim - 2).split(few) for tensor in (hidden, stored, scale[..., None]))
    for exact, quantised, step in zip(*rows, strict=True):
        step.copy_(exact.abs().amax(-1, keepdim=True).float().clamp_min_(1e-12).div_(127))
        quantised.copy_(exact.div(step).round_())
    return {"hidden": stored, "scale": scale}


def unpack(states: Mapping[str, Tensor]) -> Tensor:
    """The inverse of :func:`pack`: float32 [..., d], on the device of the states."""
    hidden = states["hidden"].float()
    return hidden.mul_(states["scale"][..., None]) if "scale" in states else hidden


def sample_bytes(length: int, width: int, dtype: CacheDtype) -> int:
    """Bytes of one sample on disk, to about 1 %."""
    scale = 4 if dtype is CacheDtype.int8 else 0
    return 2 * length * (width * BYTES_PER_VALUE[dtype] + scale) + 4 * length + 3072


# -- a shard ------------------------------------------------------------------------------------------------------


def _layout(header: bytes, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the tensors whose ``size`` bytes follow a safetensors header, in their order. Raises
    ValueError, KeyError or TypeError if the header does not say just that."""
    layout, end = {}, 0
    for name, field in sorted(json.loads(header).items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = SAFETENSORS[field["dtype"]], tuple(field["shape"])
        start, end = end, end + math.prod(shape) * dtype.itemsize
        if field["data_offsets"] != [start, end]:
            raise ValueError(f"{name} lies at {field['data_offsets']}, expected [{start}, {end}]")
        layout[name] = dtype, shape
    if end != size:
        raise ValueError(f"{size} bytes of tensors, expected {end}")
    return layout


def _bytes(tensor: Tensor) -> memoryview:
    """Those of a contiguous tensor, not a copy of them."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


@lru_cache
def _header(layout: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> bytes:
    """What safetensors puts before such tensors."""
    payload = safetensors.torch.save({name: torch.empty(shape, dtype=dtype) for name, dtype, shape in layout})
    return payload[: 8 + int.from_bytes(payload[:8], "little")]


def _encode(sample: Sample) -> Iterator[bytes | memoryview]:
    """A sample's members of a tar, piece by piece: its tensors as safetensors, then what it is as JSON."""
    tensors = {name: tensor.contiguous() for name, tensor in (sample.states | {"tokens": sample.tokens}).items()}
    header = _header(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))
    size = sum(tensor.nbytes for tensor in tensors.values())
    payload = [memoryview(header), *(_bytes(tensors[name]) for name in _layout(header[8:], size))]
    checksum = 0
    for part in payload:
        checksum = zlib.crc32(part, checksum)
    info = {name: getattr(sample, name) for name in IDENTITY} | {"crc32": checksum}
    for extension, parts in {"safetensors": payload, "json": [json.dumps(info, sort_keys=True).encode()]}.items():
        member = tarfile.TarInfo(f"{sample.index:08d}.{extension}")
        member.size = sum(map(len, parts))
        yield member.tobuf(tarfile.USTAR_FORMAT)
        yield from parts
        yield bytes(-member.size % tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class StoredSample:
    """A sample as it lies in a shard; what it is has been read, its tensors have not. ``payload`` is where they start
    in the file ``shard``, or, of a shard under a URL, they themselves."""

    key: str
    shard: str
    index: int
    prompt: str
    seed: int
    backbone: str
    picture: str
    crc32: int
    payload: int | bytes
    size: int

    def __str__(self) -> str:
        return f"sample {self.key} in {self.shard}"

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of its tensors: ``tokens`` and its states'. Raises CacheError if they cannot be read."""
        with self._opened() as file:
            return self._head(file)[1]

    def load(self) -> Sample:
        """With tensors of its own; raises CacheError as :meth:`read` does."""
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self.layout().items()}
        self.read(tensors)
        return Sample(self.index, self.prompt, self.seed, tensors.pop("tokens"), tensors, self.backbone, self.picture)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Its tensors, into contiguous ones of its layout. Raises CacheError if they are damaged, or of another
        layout."""
        with self._opened() as file:
            head, layout = self._head(file)
            expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in into.items()}
            if layout != expected:
                raise CacheError(f"{self} holds {layout}; expected {expected}, as the samples before it")
            checksum = zlib.crc32(head)
            for name in layout:
                content = _bytes(into[name])
                for start in range(0, len(content), CHUNK):
                    part = content[start : start + CHUNK]
                    if file.readinto(part) < len(part):
                        raise EOFError("it ends too early")
                    checksum = zlib.crc32(part, checksum)
        if checksum != self.crc32:
            raise CacheError(f"{self} is damaged (checksum); re-run the cache stage with cache.verify=true to mend it")

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Where its bytes start. What cannot be read or understood within raises CacheError."""
        try:
            with io.BytesIO(self.payload) if isinstance(self.payload, bytes) else open(self.shard, "rb") as file:
                if isinstance(self.payload, int):
                    file.seek(self.payload)
                yield file
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"{self} is damaged ({error}); re-run the cache stage to mend it") from error

    def _head(self, file: BinaryIO) -> tuple[bytes, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """The bytes before the tensors, and what they say."""
        head = file.read(8)
        head += file.read(min(int.from_bytes(head, "little"), self.size))
        return head, _layout(head[8:], self.size - len(head))


def stored_samples(url: str | Path, most: int | None = None) -> Iterator[StoredSample]:
    """What a shard holds, in its order. Of a file only headers and JSON are read; what comes through a pipe is read
    whole, though no member of more than ``most`` bytes. Raises CacheError for a damaged sample, and for the tar itself
    what ``tarfile`` and ``open`` raise."""
    stream = _open(url)
    piped = isinstance(stream, Pipe)  # closing one complains that the other end has not been read
    with nullcontext() if piped else stream, tarfile.open(fileobj=stream, mode="r|" if piped else "r:") as tar:
        for key, members in groupby(tar, lambda member: member.name.rpartition(".")[0]):
            payload, info, size = None, {}, 0
            try:
                for member in members:
                    if most is not None and member.size > most:
                        raise ValueError(f"{member.name} has {member.size} bytes; expected at most {most}")
                    if member.name == f"{key}.safetensors":
                        size = member.size
                        payload = tar.extractfile(member).read() if piped else member.offset_data
                    elif member.name == f"{key}.json":
                        info = json.loads(tar.extractfile(member).read())
                values = {name: info[name] for name in (*IDENTITY, "crc32")}
                if list(map(type, values.values())) != [*IDENTITY.values(), int] or payload is None:
                    raise ValueError(f"it holds {size} bytes of tensors, and {values}")
            except (ValueError, KeyError, TypeError) as error:
                raise CacheError(
                    f"sample {key} in {url} is damaged ({error}); re-run the cache stage to mend it"
                ) from error
            yield StoredSample(key, str(url), payload=payload, size=size, **values)


# -- a directory of shards ----------------------------------------------------------------------------------------


SCHEMES = "http", "https", "s3"
SECRET = re.compile(r"://[^/]*@|://.*\?")
"""A URL with a user and password, or with a query, as signed ones have."""
SECRETS_MEND = (
    "a user, password or query, which would get into files and logs; expected one without, and these where curl "
    "(~/.netrc) or aws look for them"
)
LONGEST_INDEX = 2**30
"""Bytes, under a URL as well."""
RETRIES = "--connect-timeout", "30", "--retry", "30", "--retry-delay", "2"


def place(directory: str | Path) -> str | Path:
    """Where a cache lies: a path, or a URL as it stands. Raises ValueError for a URL of another scheme, or with a
    secret in it, which would get into files and logs."""
    scheme, separator, _ = str(directory).partition("://")
    if isinstance(directory, Path) or not separator:
        return Path(directory).expanduser()
    if scheme not in SCHEMES:
        raise ValueError(f"cache.dir is a URL of {scheme!r}; expected a directory, or one of {', '.join(SCHEMES)}")
    if SECRET.search(directory):
        raise ValueError(f"cache.dir is a URL with {SECRETS_MEND}")
    return directory.rstrip("/")


def _open(url: str | Path) -> BinaryIO:
    """A path is a file, whatever its name; a string is a URL. No shell sees it."""
    if isinstance(url, Path):
        return open(url, "rb")
    if url.startswith("s3://"):
        return Pipe(["aws", "s3", "cp", url, "-"], mode="r")
    return Pipe(["curl", "--netrc-optional", *RETRIES, "-fsSL", url], mode="r", ignore_status=[141, 23])


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
        write_json(self.manifest_path, manifest)

    def manifest(self) -> dict:
        return self._read("manifest.json", "put back a copy of it, or use another cache.dir")

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
                write_json(self.directory / "index.json", {"shards": [asdict(entry) for entry in new]}, indent=None)

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.tar"

    def url(self, file: int | str) -> str | Path:
        """A shard, by its number, or another file of the cache, by its name."""
        name = f"{file:05d}.tar" if isinstance(file, int) else file
        return f"{self.directory}/{name}" if self.remote else self.directory / name

    def _index(self) -> list[ShardEntry]:
        index = self._read("index.json", "re-run the cache stage to mend it")
        return [ShardEntry(**entry) for entry in index["shards"]]

    def _read(self, name: str, mend: str) -> dict:
        """A JSON file of the cache. Raises CacheError if it is not there, or not what was written."""
        try:
            with _open(self.url(name)) as file:
                text = file.read(LONGEST_INDEX)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self.remote:
                reason = f"there is no cache in {self.directory} (no {name}); run the cache stage first"
            else:
                reason = (
                    f"{self.directory}/{name} cannot be read ({error}); expected that of a finished cache, which is "
                    "made in a directory and can then be copied to where a URL leads"
                )
            raise CacheError(reason) from error
        return unsealed(text, name, f"{self.directory}/{name}", mend, CacheError)

    def write(self, shard: int, samples: Iterable[Sample]) -> ShardEntry:
        """Writes a shard so that it is there whole or not at all, sample by sample. A full disk raises CacheError;
        nothing is left."""
        path = self.path(shard)
        described, backbone, size, digest = [], "", 0, hashlib.sha256()
        try:
            with replacing(path) as file:

                def write(part: bytes | memoryview) -> None:
                    for start in range(0, len(part), CHUNK):
                        file.write(part[start : start + CHUNK])
                        digest.update(part[start : start + CHUNK])

                for sample in samples:
                    for part in _encode(sample):
                        write(part)
                    described.append(describe(sample))
                    backbone = sample.backbone
                write(bytes(2 * tarfile.BLOCKSIZE))
                write(bytes(-file.tell() % tarfile.RECORDSIZE))
                size = file.tell()
            entry = ShardEntry(size, digest.hexdigest(), backbone, described)
            write_json(path.with_suffix(".json"), asdict(entry), indent=None)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CacheError(
                    f"the disk is full while writing {path}; the shards before it are safe. "
                    "Free some space (cache.dtype=int8 halves bfloat16) and run the same command again."
                ) from error
            raise
        return entry

    def entry(self, shard: int, verify: bool = False) -> ShardEntry | None:
        """The shard's entry if the shard is there and whole, else None. ``verify`` reads and hashes the file
        (otherwise only its size is compared). Under a URL what the index says has to do; samples are checked as they
        are read."""
        if self.remote:
            return self.entries.get(shard)
        path = self.path(shard)
        try:
            entry = ShardEntry(**read_json(path.with_suffix(".json"), "the shard is made again") or {})
            whole = path.stat().st_size == entry.bytes and not (verify and sha256(path) != entry.sha256)
        except (FileNotFoundError, DamagedFile, TypeError):
            return None
        return entry if whole else None


def describe(sample: Sample | StoredSample) -> list:
    """What a shard's entry says about a sample: its index, a hash of all that decides its tokens, its split."""
    return description(sample.index, sample.prompt, sample.seed, sample.picture)


def description(index: int, prompt: str, seed: int, picture: str) -> list:
    what = hashlib.sha256(f"{seed} {picture} {prompt}".encode()).hexdigest()[:16]
    return [index, what, str(split_of(prompt))]
