"""Files that are there whole or not at all, and work that processes share through them.

Processes on one file system need no messages to share work that lies in pieces: whoever claims a piece makes it.
A claim is a lock on a byte of a file: it ends with its process, however that ends, and waiting for it has no time-out.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Temporary name, flush to disk, rename: readers see the old file or the new one. An OSError names the file. What a
    process leaves that is killed meanwhile, :func:`remove_strays` finds."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with _own(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _own(temporary: Path) -> BinaryIO:
    """Opens a new file and locks it for as long as it is open."""
    while True:
        file = temporary.open("wb")
        with suppress(OSError):  # without locks there, strays stay
            fcntl.lockf(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()  # before it was locked, another process took it for a stray


def remove_strays(directory: Path) -> None:
    """Removes the temporary files that :func:`replacing` has left there in processes that were killed."""
    for path in directory.glob(".*.tmp-*"):
        with suppress(OSError), path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
            path.unlink()


def write_atomically(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def read_json(path: Path) -> Any:
    """A file's content; None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    """Raises ValueError for NaN and infinite numbers, which are no JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False).encode())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        for, or with ``wait`` false not had."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, piece)
        except (BlockingIOError, PermissionError):
            return False
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
