"""Runs of horizontal drafts, repaired in place and then committed: the first row of SSD, and lossy 1D-MTP."""

from collections.abc import Sequence

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid

Drafts = Sequence[tuple[int, int]]


def verify(draft: Drafts, feed: range, judge: range, rounds: int | None, until_settled: bool = False) -> Script:
    """Drafts, then rounds of accept-and-redraw; None is no limit. ``until_settled`` leaves after a round that re-drew
    nothing. Returns the drafts that are still to be made, when there is no round to make them in."""
    done = 0
    while rounds is None or done < rounds:
        outcome = yield Step(draft=draft, feed=feed, judge=judge)
        draft = ()
        done += 1
        if until_settled and all(outcome.accepted):
            break
    return draft


def chunks(grid: Grid, row: int, length: int, rounds: int | None, until_settled: bool = False) -> Script:
    """One row, whose first token is drawn already: a chunk of 1 + ``length`` tokens, then chunks of ``length``.

    A chunk's first token was drawn exactly in the pass that committed the chunk before, and is the source of the
    chunk's drafts. The last commit draws the next row's first token.
    """
    start, end = grid.row(row).start, grid.row(row).stop
    while start < end:
        stop = min(start + length + (start == grid.row(row).start), end)
        judge = range(start + 1, stop)
        draft: Drafts = [(position, start) for position in judge]
        if draft:
            draft = yield from verify(draft, range(start, stop - 1), judge, rounds, until_settled)
        yield Step(draft=draft, feed=range(start, stop), judge=[stop] if stop < grid.size else [])
        start = stop


class Chunks(Schedule):
    """Every row in chunks of ``length`` drafts, with ``rounds`` of repair a chunk: the paper's lossy 1D-MTP baseline
    (arXiv 2606.20543) with 5 and 1."""

    def __init__(self, length: int = 5, rounds: int = 1):
        if length < 1 or rounds < 0:
            raise ValueError(f"length is {length} and rounds {rounds}; expected at least 1 and 0")
        self.length, self.rounds = length, rounds

    def window(self, grid: Grid) -> int:
        return self.length + 2

    def exact(self, grid: Grid) -> bool:
        return self.rounds >= min(self.length, grid.width - 1)

    def script(self, grid: Grid) -> Script:
        for row in range(grid.height):
            yield from chunks(grid, row, self.length, self.rounds)
