"""Files that are there whole or not at all, and work that processes share through them.

Processes on one file system need no messages to share work that lies in pieces: whoever claims a piece makes it.
A claim is a lock on a byte of a file: it ends with its process, however that ends, and waiting for it has no time-out.

What is guaranteed. Every file that a run reads again carries a digest of its content, or is held against one
elsewhere: JSON by :func:`write_json`, tensors by :func:`save_tensors`, weights by the config.json beside them, shards
by their entries, samples by the index and a checksum, checkpoints by the CRCs of their zip and the training's
fingerprint. What was cut, altered or exchanged is made again, or refused by name; it never decides a result. A kill
or a full disk at any moment leaves the old file or the new one. Not guaranteed: digests are no signatures, so whoever
edits a file together with its digest is believed; directories are not flushed, so after a power loss an old file may
be back (whole, and found out of date); where the file system has no locks, sharing work is refused, and what a killed
process left half-written stays; pictures, figures and reports are for people, and no run reads them.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

STRAY = re.compile(r"\..+\.tmp-[0-9a-f]{16}")


class DamagedFile(ValueError):
    """A file is not what was written; the message names it, says what was expected, and the mend."""


# -- whole or not at all ------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Temporary name, flush to disk, rename: readers see the old file or the new one. An OSError names the file. What a
    process leaves that is killed meanwhile, :func:`remove_strays` finds."""
    try:
        with _own(path) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(file.name)
    except OSError as error:
        if error.filename is None or STRAY.fullmatch(os.path.basename(error.filename)):
            error.filename, error.filename2 = str(path), None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.strerror = f"{error.strerror}; free some space and run the same command again"
        raise


def _own(path: Path) -> BinaryIO:
    """Opens a new file with a name that no process has had, also of another machine or container, and locks it for as
    long as it is open."""
    while True:
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
        file = temporary.open("xb")
        with suppress(OSError):  # without locks there, strays stay
            fcntl.lockf(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()  # before it was locked, another process took it for a stray


def remove_strays(directory: Path) -> None:
    """Removes the temporary files that :func:`replacing` has left there, or in a folder there, in processes that were
    killed."""
    for path in directory.rglob(".*.tmp-*"):
        if STRAY.fullmatch(path.name):
            with suppress(OSError), path.open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
                path.unlink()


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Replaces several files once all of them are on the disk; the last one first."""
    with ExitStack() as stack:
        for path, content in contents.items():
            file = stack.enter_context(replacing(path))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    write_together({path: content})


# -- with a digest ------------------------------------------------------------------------------------------------


def sealed(content: Mapping[str, Any], kind: str, indent: int | None = None) -> bytes:
    """An object as JSON, with a digest of it and of what kind of file it is, so that none can stand for another. Raises
    ValueError for NaN and infinite numbers, which are no JSON."""
    content = json.loads(json.dumps(content, allow_nan=False))  # with the keys that reading it will give
    return json.dumps(content | {"digest": _digest(content, kind)}, indent=indent).encode()


def _digest(content: Mapping[str, Any], kind: str) -> str:
    return hashlib.sha256(f"{kind} {json.dumps(content, sort_keys=True)}".encode()).hexdigest()[:32]


def unsealed(text: bytes, kind: str, source: Any, mend: str, error: type[Exception] = DamagedFile) -> dict[str, Any]:
    """What :func:`sealed` was given. Raises ``error`` with ``source`` and ``mend`` if this is anything else."""
    content = parse_object(text, source, mend, error)
    if content.pop("digest", None) != _digest(content, kind):
        raise error(f"{source} is damaged: its content is not what its digest says was written; {mend}")
    return content


def parse_object(text: bytes, source: Any, mend: str, error: type[Exception] = DamagedFile) -> dict[str, Any]:
    """A JSON object. Raises ``error`` with ``source`` and ``mend`` if it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{source} holds no JSON ({cause}); {mend}") from cause
    if not isinstance(content, dict):
        raise error(f"{source} holds {str(content)[:40]!r}; expected a JSON object; {mend}")
    return content


def read_json(
    path: Path, mend: str = "remove it", error: type[Exception] = DamagedFile, kind: str = ""
) -> dict[str, Any] | None:
    """What :func:`write_json` wrote; None if there is no such file. Raises ``error`` for anything else. The ``kind`` is
    the file's name if it has no other."""
    try:
        return unsealed(path.read_bytes(), kind or path.name, path, mend, error)
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Mapping[str, Any], kind: str = "", indent: int | None = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sealed(content, kind or path.name, indent))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Contiguous tensors on the host, as safetensors with a digest of them, and of the file's name and folder, so that
    no file can stand for another."""
    write_atomically(path, safetensors.torch.save(dict(tensors), {"digest": _digest_of_tensors(path, tensors)}))


def load_tensors(path: Path, mend: str) -> dict[str, Tensor]:
    """What :func:`save_tensors` wrote there. Raises DamagedFile for anything else, FileNotFoundError for nothing."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            digest = (file.metadata() or {}).get("digest")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise DamagedFile(f"{path} is no whole safetensors file ({error}); {mend}") from error
    if digest != _digest_of_tensors(path, tensors):
        raise DamagedFile(f"{path} is damaged: its tensors are not what its digest says was written there; {mend}")
    return tensors


def _digest_of_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{path.parent.name}/{path.name} ".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- shared work --------------------------------------------------------------------------------------------------


class Claims:
    """A process's claims on pieces of work: locks on bytes of one file, all of which end when it is closed. Another
    object of the process on that file would end them too."""

    def __init__(self, lock: Path):
        lock.parent.mkdir(parents=True, exist_ok=True)
        self._file = lock.open("a")

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, piece: int, wait: bool) -> bool:
        """Whether this process alone may make a piece until it is released. What another process has claimed is waited
        for, or with ``wait`` false not had. Raises OSError that names the file if nothing there can be locked."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, piece)
        except OSError as error:
            if not wait and error.errno in (errno.EAGAIN, errno.EACCES):  # POSIX allows either for another's lock
                return False
            why = f"it cannot be locked ({error.strerror}); expected a file system with locks, use another folder"
            raise OSError(error.errno, why, self._file.name) from error
        return True

    def release(self, piece: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, piece)


@contextmanager
def claim(lock: Path, piece: int = 0, wait: bool = True) -> Iterator[bool]:
    """Yields whether this process alone may make a piece until the context ends; see :class:`Claims`."""
    with Claims(lock) as claims:
        yield claims.take(piece, wait)


def share_out(claims: Claims, pieces: Iterable[int], is_there: Callable[[int, bool], bool],
              finish: Callable[[], None] = lambda: None) -> Iterator[int]:  # fmt: skip
    """Yields each piece that this process is to make, and to release when it is made; at the end all are there.

    First come the pieces that no other process is making, then those that the others have not finished, should they
    have died. ``is_there(piece, again)`` says whether a piece needs no making; ``again`` is true when it was in another
    process's hands before. ``finish`` makes and releases what was yielded and is not released yet: processes that
    waited for each other's would never end.
    """
    pieces = list(pieces)
    for wait in False, True:
        elsewhere = []
        for piece in pieces:
            if wait:
                finish()
            if not claims.take(piece, wait):
                elsewhere.append(piece)
            elif is_there(piece, wait):
                claims.release(piece)
            else:
                yield piece
        pieces = elsewhere
