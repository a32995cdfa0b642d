"""SIGTERM and SIGUSR1 (a scheduler's "your time is up") end a run so that the same command goes on from there.

A stage that loses nothing worth keeping just ends. Training asks :func:`asked_to_stop` at every step instead, since it
has a checkpoint to write. Either way the exit status is :data:`AGAIN`, on which a batch script may requeue.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
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


def heed_parent_only() -> None:
    """For helper processes: a scheduler may signal a job's every process, but these end when their parent says so. It
    does with SIGTERM, at the latest when Python exits, which then waits for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    Thread(target=_wait_for, args=(os.getppid(),), daemon=True).start()


def _wait_for(parent: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != parent:
        pass
    os._exit(0)


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
