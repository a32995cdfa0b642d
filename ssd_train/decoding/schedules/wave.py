"""Rows in flight one behind the other, with commits merged into the next row's passes."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.decoding.schedules.chunks import chunks
from ssd_train.grid import Grid


class Wave(Schedule):
    """A row starts, drafted from the row above as it stands, when that has been judged ``stagger`` times; it settles
    after ``rounds`` judgements. The row that settled last is fed once more at the head of the next pass, which makes
    its KV cache entries final and costs no pass of its own.

    ``stagger`` = ``rounds`` is the merged commit: ``rounds`` passes a row instead of ``rounds`` + 1. Less than that
    puts several rows in flight. With ``threshold``, a row also waits until at most that share of the row above was
    re-drawn in the last pass.
    The first row is that of :class:`Rows`. Passes without a threshold: N1 + (h - 2) stagger + rounds.
    """

    def __init__(
        self,
        rounds: int = 2,
        stagger: int | None = None,
        threshold: float | None = None,
        chunk: int = 5,
        first_row_rounds: int = 1,
    ):
        stagger = rounds if stagger is None else stagger
        if not 1 <= stagger <= rounds:
            raise ValueError(f"stagger is {stagger}; expected between 1 and rounds ({rounds})")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}; expected a share between 0 and 1")
        self.rounds, self.stagger, self.threshold = rounds, stagger, threshold
        self.adaptive = threshold is not None
        self.chunk, self.first_row_rounds = chunk, first_row_rounds

    def window(self, grid: Grid) -> int:
        in_flight = self.rounds if self.threshold is not None else -(-self.rounds // self.stagger)
        return max((in_flight + 1) * grid.width, self.chunk + 1) + 1

    def script(self, grid: Grid) -> Script:
        yield from chunks(grid, 0, self.chunk, self.first_row_rounds)
        judged: dict[int, int] = {}  # row in flight -> judgements
        redrawn = 0.0  # share of the lowest row in the last pass
        next_row, settled = 1, None
        while next_row < grid.height or judged:
            draft: list[tuple[int, int]] = []
            if next_row < grid.height and self._may_start(judged, next_row, redrawn):
                start = grid.row(next_row).start + (next_row == 1)  # the first row's commit drew (1, 0)
                draft = [(p, p - grid.width) for p in range(start, grid.row(next_row).stop)]
                judged[next_row] = 0
                next_row += 1
            top, bottom = min(judged), max(judged)
            first = top if settled is None else settled
            judge = range(grid.row(top).start + (top == 1), grid.row(bottom).stop)
            outcome = yield Step(draft=draft, feed=range(grid.row(first).start, grid.row(bottom).stop - 1), judge=judge)
            if self.threshold is not None:
                redrawn = 1 - sum(outcome.accepted[-grid.width :]) / min(grid.width, len(judge))
            for row in judged:
                judged[row] += 1
            settled = None
            if judged[top] >= self.rounds:
                settled = top
                del judged[top]

    def _may_start(self, judged: dict[int, int], row: int, redrawn: float) -> bool:
        above = judged.get(row - 1)
        if above is None:
            return True
        return above >= self.stagger and (self.threshold is None or redrawn <= self.threshold)
