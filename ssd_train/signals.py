"""SIGTERM and SIGUSR1 (a scheduler's "your time is up") end a run so that the same command goes on from there.

A stage that loses nothing worth keeping just ends. Training asks :func:`asked_to_stop` at every step instead, since it
has a checkpoint to write. Either way the exit status is :data:`AGAIN`, on which a batch script may requeue.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = os.EX_TEMPFAIL  # 75
SIGNALS = signal.SIGTERM, signal.SIGUSR1

_deferred = False
_received = False


class Stopped(SystemExit):
    """A signal ended the run; its exit status is :data:`AGAIN`."""

    def __init__(self) -> None:
        super().__init__(AGAIN)


def install() -> None:
    """Handles the signals from now on. Call it again where a library has put its own handlers in the way."""
    for number in SIGNALS:
        signal.signal(number, _handle)


def ignore() -> None:
    """For helper processes, which inherit handlers: their parent ends them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def deferred() -> Iterator[None]:
    """Within it a signal is only noted; raises :class:`Stopped` at the end if one came and nothing else was raised."""
    global _deferred
    _deferred = True
    try:
        yield
    finally:
        _deferred = False
    if _received:
        raise Stopped


def asked_to_stop() -> bool:
    return _received


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    if not _deferred:
        raise Stopped
