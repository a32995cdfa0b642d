"""Speculative Jacobi decoding (SJD, arXiv 2410.01699): a sliding window of drafts that are re-used, not dropped."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid


class JacobiWindow(Schedule):
    """A pass feeds the last settled position and judges the drafts after it: together they are the window, of so many
    ``rows`` of the grid, to the nearest token. Accepted drafts up to the first rejection, and its re-draw, are settled;
    the window moves on and new drafts enter at its end.

    What stood after the first rejection stays in the window: re-drawn fresh from p (the published way), or,
    ``coupled``, as its own judgement left it (Speculative Coupled Decoding by maximal coupling, So et al., arXiv
    2510.24211). Both are exact. Coupled is, because a token is always a draw from the p
    of what stood to its left when that was fed, by random numbers which nothing to its left has seen: given that
    context and what has become of it, the token is a draft from q = that p, so accept-and-redraw makes it a draw from
    the new p; and a position is settled when its p is that of a settled context.
    New drafts come from the last settled position; with ``source="above"``, from the position above them where there
    is one, once it has been judged. ``reach`` is how far a draft may be from a source to its left (heads, which draft
    no other rows from there, need ``source="above"`` and a reach of at most head.k_horizontal); the window ends before
    the first position that nothing can draft yet.
    """

    adaptive = True

    def __init__(self, rows: float = 1.0, coupled: bool = False, source: str = "settled", reach: int | None = None):
        if rows <= 0:
            raise ValueError(f"rows is {rows}; expected more than 0")
        if source not in ("settled", "above"):
            raise ValueError(f"source is {source!r}; expected 'settled' or 'above'")
        if reach is not None and reach < 1:
            raise ValueError(f"reach is {reach}; expected at least 1, or null for no limit")
        self.rows, self.coupled, self.source, self.reach = rows, coupled, source, reach

    def window(self, grid: Grid) -> int:
        return max(2, round(self.rows * grid.width))

    def exact(self, grid: Grid) -> bool:
        return True

    def script(self, grid: Grid) -> Script:
        front, entered = 0, 1
        while front < grid.size - 1:
            stop = self._stop(grid, front, entered)
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

    def _stop(self, grid: Grid, front: int, entered: int) -> int:
        """Where the window ends, if all before ``entered`` have been judged: that is as far as sources go."""
        stop, from_the_left = min(front + self.window(grid), grid.size), grid.size
        if self.source == "above":
            stop, from_the_left = min(stop, entered + grid.width), grid.width
        if self.reach is not None and front + self.reach + 1 < from_the_left:
            stop = min(stop, front + self.reach + 1)
        return stop

    def _source(self, grid: Grid, position: int, front: int) -> int:
        """A position that has a token: the one above, else the last settled one to the left."""
        if self.source == "above" and position >= grid.width:
            return position - grid.width
        return front
