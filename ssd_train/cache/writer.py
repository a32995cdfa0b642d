"""Shards are encoded, hashed and written in a thread, behind the sampling of what comes next."""

from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from threading import Event, Thread
from time import perf_counter

from ssd_train.cache.shards import Sample, ShardCache

END, GIVE_UP, STOP = "end of a shard", "no end of a shard", "end of everything"


class ShardWriter:
    """Within its context a thread writes what it is given; at its end everything is written.

    ``ahead`` samples may wait for the thread, then the caller does: ``waited`` is for how many seconds. ``written`` is
    called, in the thread, with each shard that is there. An error of the thread is raised by whatever is called next.
    If the context ends with an error, nothing stays of a shard that has not been handed over to its end.
    """

    def __init__(self, cache: ShardCache, ahead: int, written: Callable[[int], None]):
        self.waited = 0.0
        self._cache, self._written = cache, written
        self._queue: Queue[int | Sample | Event | str] = Queue(ahead)  # a shard's number, its samples, END, ...; STOP
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ShardWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        for item in (GIVE_UP, STOP) if error else (STOP,):
            self._queue.put(item)
        self._thread.join()
        if error is None:
            self._check()

    def write(self, shard: int, samples: Iterable[Sample]) -> None:
        """Hands over a shard. Returns when its last sample has been taken, not when it is written."""
        self._put(shard)
        for sample in samples:
            self._put(sample)
        self._put(END)

    def finish(self) -> None:
        """Waits until everything is written."""
        done = Event()
        self._put(done)
        start = perf_counter()
        done.wait()
        self.waited += perf_counter() - start
        self._check()

    def _put(self, item: int | Sample | Event | None) -> None:
        start = perf_counter()
        self._queue.put(item)
        self.waited += perf_counter() - start
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """After an error takes what comes and does nothing with it, so that nobody waits for room in the queue."""
        for item in iter(self._queue.get, STOP):
            if isinstance(item, Event):
                item.set()
            elif isinstance(item, int) and self._error is None:
                try:
                    self._cache.write(item, self._samples())
                    self._written(item)
                except BaseException as error:
                    self._error = error

    def _samples(self) -> Iterator[Sample]:
        for sample in iter(self._queue.get, END):
            if sample is GIVE_UP:
                raise RuntimeError("the shard in the making is given up")
            yield sample
