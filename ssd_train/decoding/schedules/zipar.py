"""ZipAR (arXiv 2412.04062): rows in parallel, one token an active row a pass."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid


class ZipAR(Schedule):
    """A row starts when the row above is ``lead`` tokens ahead. Its first token is predicted from the end of the row
    above, which is not there yet: the token above that end stands in for it (drafter: Copy), until the row has ended
    and the next pass feeds its end. Everything else is drawn from p over what has been generated. About
    w + (h - 1) lead passes. Lossy."""

    def __init__(self, lead: int = 8):
        if lead < 1:
            raise ValueError(f"lead is {lead}; expected at least 1")
        self.lead = lead

    def window(self, grid: Grid) -> int:
        # A stand-in at a row's end is in use while the rows below it start.
        return grid.size

    def exact(self, grid: Grid) -> bool:
        """Rows that wait for the one above to end are AR."""
        return self.lead >= grid.width

    def script(self, grid: Grid) -> Script:
        lead = min(self.lead, grid.width)
        done = [1] + [0] * (grid.height - 1)  # tokens generated in each row
        ended: set[int] = set()  # rows whose end has been fed since it was drawn
        while done[-1] < grid.width:
            draft, feed, judge = [], [], []
            for row, count in enumerate(done):
                if count == grid.width:
                    if row not in ended:
                        feed.append(grid.row(row).stop - 1)
                        ended.add(row)
                    continue
                if count == 0:
                    if done[row - 1] < lead:
                        break
                    end = grid.row(row).start - 1
                    if done[row - 1] < grid.width:
                        stand_in = end - grid.width if row > 1 else grid.row(0)[done[0] - 1]
                        draft.append((end, stand_in))
                        feed.append(end)
                else:
                    feed.append(grid.position(row, count - 1))
                judge.append(grid.position(row, count))
            yield Step(draft=draft, feed=feed, judge=judge)
            for position in judge:
                done[grid.row_column(position)[0]] += 1
