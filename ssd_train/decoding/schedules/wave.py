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

    With ``until_settled`` a row settles before its ``rounds`` are over if a pass re-drew nothing in it and all above it
    has settled: more rounds would not change it. So does a chunk of the first row, and the row below need not wait for
    ``stagger`` or ``threshold`` any more. Rounds may then be None for no other limit; with first-row rounds to match,
    the result is exact AR sampling.

    The first row is that of :class:`Rows`. Passes with neither threshold nor until_settled:
    N1 + (h - 2) stagger + rounds.
    """

    def __init__(
        self,
        rounds: int | None = 2,
        stagger: int | None = None,
        threshold: float | None = None,
        chunk: int = 5,
        first_row_rounds: int | None = 1,
        until_settled: bool = False,
    ):
        for name, value in {"rounds": rounds, "first_row_rounds": first_row_rounds}.items():
            if value is None and not until_settled:
                raise ValueError(f"{name} is null, no limit; that needs until_settled=true")
        stagger = rounds if stagger is None else stagger
        if stagger is None:
            raise ValueError("stagger is null, as many as rounds, but rounds is null, no limit; expected at least 1")
        if stagger < 1 or (rounds is not None and stagger > rounds):
            limit = "at least 1" if rounds is None else f"between 1 and rounds ({rounds})"
            raise ValueError(f"stagger is {stagger}; expected {limit}")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}; expected a share between 0 and 1")
        self.rounds, self.stagger, self.threshold = rounds, stagger, threshold
        self.until_settled = until_settled
        self.adaptive = threshold is not None or until_settled
        self.chunk, self.first_row_rounds = chunk, first_row_rounds

    def window(self, grid: Grid) -> int:
        if self.rounds is None:
            return grid.size
        in_flight = self.rounds if self.threshold is not None else -(-self.rounds // self.stagger)
        return max((in_flight + 1) * grid.width, self.chunk + 1) + 1

    def exact(self, grid: Grid) -> bool:
        """A position is final one round after its left context is, if that does not begin to change again."""
        settles = self.rounds is None or self.stagger >= self.rounds >= grid.width
        return settles and (self.first_row_rounds is None or self.first_row_rounds >= min(self.chunk, grid.width - 1))

    def script(self, grid: Grid) -> Script:
        yield from chunks(grid, 0, self.chunk, self.first_row_rounds, self.until_settled)
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
            accepted = outcome.accepted if self.adaptive and judge else []
            if accepted:
                redrawn = 1 - sum(accepted[-grid.width :]) / min(grid.width, len(judge))
            for row in judged:
                judged[row] += 1
            settled = None
            for row in range(top, bottom + 1):
                final = self.until_settled and all(_of_row(grid, row, judge, accepted))
                if not final and (self.rounds is None or judged[row] < self.rounds):
                    break
                # One that changed ends the run: rows below have not seen its tokens. Rows before the last one of the
                # run did not change in this pass, so that it left their cache entries final.
                settled = row
                del judged[row]
                if not final:
                    break

    def _may_start(self, judged: dict[int, int], row: int, redrawn: float) -> bool:
        above = judged.get(row - 1)
        if above is None:
            return True
        return above >= self.stagger and (self.threshold is None or redrawn <= self.threshold)


def _of_row(grid: Grid, row: int, judge: range, accepted: list[bool]) -> list[bool]:
    """What of a pass's acceptances belongs to a row."""
    positions = grid.row(row)
    return accepted[max(positions.start - judge.start, 0) : positions.stop - judge.start]
