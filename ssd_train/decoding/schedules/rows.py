"""Spatially Speculative Decoding's schedule (arXiv 2606.20543): rows drafted at once, repaired in place."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.decoding.schedules.chunks import Drafts, chunks, verify
from ssd_train.grid import Grid


class Rows(Schedule):
    """The first row in horizontal chunks, then blocks of ``rows_per_block`` rows, with rounds of accept-and-redraw.

    A chunk's first token is drawn exactly from a state that is already there, and is the source of its other drafts.
    A block is drafted from the row above it and verified ``rounds`` times as a whole; then each of its rows is
    committed by one pass over its final tokens, which also draws the first token of the next row exactly. Rows of the
    block after its first get ``staged_rounds`` more rounds of their own once the row above them is committed
    (method "staged" b=5, i=4; 0 is "joint").

    With ``until_settled`` a sample leaves a row or chunk after a round that re-drew nothing: more rounds would not
    change it. Rounds may then be None for no other limit, and the result is exact AR sampling.

    Passes (prompt included), with chunks of c, B blocks, R = h - 1 rows, r, b, i rounds of first row, block, stage:
    1 + ceil((w - 1) / c) (r + 1)  +  B b + R + (R - B) i; r less where the last chunk is a single token.
    """

    def __init__(
        self,
        rounds: int | None = 2,
        rows_per_block: int = 1,
        staged_rounds: int = 0,
        chunk: int = 5,
        first_row_rounds: int | None = 1,
        until_settled: bool = False,
    ):
        for name, value in {"rows_per_block": rows_per_block, "chunk": chunk}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        for name, value in {"rounds": rounds, "first_row_rounds": first_row_rounds}.items():
            if value is None and not until_settled:
                raise ValueError(f"{name} is null, no limit; that needs until_settled=true")
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; expected >= 0, or null with until_settled=true")
        if staged_rounds < 0:
            raise ValueError(f"staged_rounds is {staged_rounds}; expected >= 0")
        self.rounds = rounds
        self.rows_per_block = rows_per_block
        self.staged_rounds = staged_rounds
        self.chunk = chunk
        self.first_row_rounds = first_row_rounds
        self.until_settled = until_settled
        self.adaptive = until_settled

    def window(self, grid: Grid) -> int:
        # One more: the first token after a block or chunk is drawn in the pass that commits it.
        return max(self.rows_per_block * grid.width, self.chunk + 1) + 1

    def exact(self, grid: Grid) -> bool:
        """A position is final one round after its left context is: as many rounds as drafts in a block are enough."""
        longest_chunk = min(self.chunk, grid.width - 1)
        block = min(self.rows_per_block, grid.height - 1) * grid.width - 1
        return (self.first_row_rounds is None or self.first_row_rounds >= longest_chunk) and (
            self.rounds is None or self.rounds >= block
        )

    def script(self, grid: Grid) -> Script:
        yield from chunks(grid, 0, self.chunk, self.first_row_rounds, self.until_settled)
        for top in range(1, grid.height, self.rows_per_block):
            yield from self._block(grid, range(top, min(top + self.rows_per_block, grid.height)))

    def _block(self, grid: Grid, rows: range) -> Script:
        first, last = grid.row(rows[0]), grid.row(rows[-1])
        judge = range(first.start + 1, last.stop)
        above = grid.row(rows[0] - 1).start
        draft: Drafts = [(position, above + position % grid.width) for position in judge]
        if draft:
            feed = range(first.start, last.stop - 1)
            draft = yield from verify(draft, feed, judge, self.rounds, self.until_settled)
        for row in rows:
            positions = grid.row(row)
            if row > rows[0] and len(positions) > 1:
                yield from verify((), positions[:-1], positions[1:], self.staged_rounds, self.until_settled)
            yield Step(draft=draft, feed=positions, judge=[positions.stop] if positions.stop < grid.size else [])
            draft = ()
