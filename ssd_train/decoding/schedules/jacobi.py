"""Speculative Jacobi decoding (SJD, arXiv 2410.01699): a sliding window of drafts that are re-used, not dropped."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid


class JacobiWindow(Schedule):
    """A pass feeds the last settled position and judges the ``length`` - 1 drafts after it. Accepted drafts up to the
    first rejection, and its re-draw, are settled; the window moves on and new drafts enter at its end.

    What stood after the first rejection stays in the window: re-drawn fresh from p (the published way), or,
    ``coupled``, as its own judgement left it. Both are exact.
    New drafts come from the position above with ``source="above"``, else from the left.
    """

    adaptive = True

    def __init__(self, length: int = 16, coupled: bool = False, source: str = "left"):
        if length < 2:
            raise ValueError(f"length is {length}; expected at least 2: one settled position and a draft")
        if source not in ("left", "above"):
            raise ValueError(f"source is {source!r}; expected 'left' or 'above'")
        self.length, self.coupled, self.source = length, coupled, source

    def window(self, grid: Grid) -> int:
        return self.length

    def exact(self, grid: Grid) -> bool:
        return True

    def script(self, grid: Grid) -> Script:
        front, entered = 0, 1
        while front < grid.size - 1:
            stop = min(front + self.length, grid.size)
            new = range(entered, stop)
            entered = stop
            outcome = yield Step(
                draft=[(position, self._source(grid, position, front)) for position in new],
                feed=range(front, stop - 1),
                judge=range(front + 1, stop),
                fresh=not self.coupled,
            )
            accepted = outcome.accepted
            front += accepted.index(False) + 1 if False in accepted else len(accepted)

    def _source(self, grid: Grid, position: int, front: int) -> int:
        """A position that has a token: the one above, else the last settled one to the left."""
        if self.source == "above" and position >= grid.width:
            return position - grid.width
        return front
