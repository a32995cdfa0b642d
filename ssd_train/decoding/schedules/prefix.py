"""Strict speculative decoding: a run of drafts, kept up to the first rejection (arXiv 2211.17192; 2302.01318)."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid


class Prefix(Schedule):
    """``length`` drafts a pass; the first rejected one is re-drawn from the residual and the rest dropped; if all
    pass, the position after them is drawn from p (the bonus token).

    The ``source`` of all drafts is the last settled position ("settled"), or each one's left neighbour ("left", for
    drafters that go step by step). ``within_row`` ends a run with the row, for drafters that know no further.
    """

    adaptive = True

    def __init__(self, length: int = 5, source: str = "settled", within_row: bool = False):
        if length < 1:
            raise ValueError(f"length is {length}; expected at least 1")
        if source not in ("settled", "left"):
            raise ValueError(f"source is {source!r}; expected 'settled' or 'left'")
        self.length, self.source, self.within_row = length, source, within_row

    def window(self, grid: Grid) -> int:
        return self.length + 1

    def exact(self, grid: Grid) -> bool:
        return True

    def script(self, grid: Grid) -> Script:
        front = 0
        while front < grid.size - 1:
            stop = min(front + 1 + self.length, grid.size)
            if self.within_row:
                stop = min(stop, grid.row(front // grid.width).stop)
            drafts = range(front + 1, stop)
            bonus = [stop] if stop < grid.size else []
            outcome = yield Step(
                draft=[(position, front if self.source == "settled" else position - 1) for position in drafts],
                feed=range(front, stop if bonus else stop - 1),
                judge=[*drafts, *bonus],
                anew=bonus,
            )
            accepted = outcome.accepted
            # The first False is a re-drawn draft or the bonus: settled either way.
            front += accepted.index(False) + 1 if False in accepted else len(accepted)
