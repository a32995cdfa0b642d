"""PJD (arXiv 2606.05703): speculative Jacobi windows on several rows at once."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid


class ParallelJacobi(Schedule):
    """Each row has a window of up to ``length`` - 1 drafts, settled up to the first rejection as in SJD; a row starts
    when ``lag`` tokens of the row above are settled. Until the row above ends, the token above its end stands in for
    it; then the next pass feeds its end. New drafts come from the position above, in the first row from the left
    (drafter: Copy); those after a rejection keep their own judgement (the coupled form). No row drafts beyond what an
    earlier pass left in the row above it, however much of it is accepted. Lossy: tokens are settled before what lies to
    their upper right is."""

    adaptive = True

    def __init__(self, length: int = 16, lag: int = 8):
        if length < 2:
            raise ValueError(f"length is {length}; expected at least 2: one settled position and a draft")
        if lag < 1:
            raise ValueError(f"lag is {lag}; expected at least 1")
        self.length, self.lag = length, lag

    def window(self, grid: Grid) -> int:
        return grid.size

    def exact(self, grid: Grid) -> bool:
        """Rows that wait for the one above to end are coupled Jacobi windows, one after the other."""
        return self.lag >= grid.width

    def script(self, grid: Grid) -> Script:
        lag = min(self.lag, grid.width)
        settled = [1] + [0] * (grid.height - 1)
        entered = list(settled)
        ended: set[int] = set()  # rows whose end has been fed since it was settled
        while min(settled) < grid.width:
            draft, feed, judge, windows = [], [], [], []
            above = [grid.width, *entered]  # of each row, what a new draft may be copied from
            for row, count in enumerate(settled):
                if count == grid.width:
                    if row not in ended:
                        feed.append(grid.row(row).stop - 1)
                        ended.add(row)
                    continue
                if row and count == 0 and settled[row - 1] < lag:
                    break
                start = grid.row(row).start
                if row and settled[row - 1] < grid.width and count == 0 and entered[row - 1] < grid.width:
                    draft.append((start - 1, start - 1 - grid.width if row > 1 else settled[0] - 1))
                stop = min(count + self.length - 1, above[row])
                for column in range(entered[row], stop):
                    draft.append((start + column, start + column - grid.width if row else count - 1))
                entered[row] = max(entered[row], stop)
                feed.extend(range(start + count - 1, start + stop - 1))
                judge.extend(range(start + count, start + stop))
                windows.append((row, stop - count))
            outcome = yield Step(draft=draft, feed=sorted(set(feed)), judge=judge)
            accepted = outcome.accepted
            for row, size in windows:
                mine, accepted = accepted[:size], accepted[size:]
                settled[row] += mine.index(False) + 1 if False in mine else size
