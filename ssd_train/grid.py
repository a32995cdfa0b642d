"""Positions on an image's token grid. No other file does this arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """An h x w grid of image tokens in raster order.

    A *position* is a raster index ``row * width + column``. A *sequence index* also counts the
    end-of-line token that some backbones put after each row: these are fed to the backbone, never
    drafted, judged or counted.
    """

    height: int
    width: int
    end_of_line: bool = False

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"grid must be at least 1x1, got {self.height}x{self.width}")

    @property
    def size(self) -> int:
        """Image tokens, end-of-line tokens not counted."""
        return self.height * self.width

    @property
    def sequence_length(self) -> int:
        """Tokens in the backbone's sequence, end-of-line tokens included."""
        return self.height * (self.width + self.end_of_line)

    def position(self, row: int, column: int) -> int:
        return row * self.width + column

    def row_column(self, position: int) -> tuple[int, int]:
        return divmod(position, self.width)

    def row(self, row: int) -> range:
        """Positions of a row, left to right."""
        return range(row * self.width, (row + 1) * self.width)

    def offset(self, source: int, position: int) -> tuple[int, int]:
        """(rows down, columns right) from ``source`` to ``position``."""
        (y0, x0), (y1, x1) = self.row_column(source), self.row_column(position)
        return y1 - y0, x1 - x0

    def sequence_index(self, position: int) -> int:
        return position + (position // self.width if self.end_of_line else 0)

    def ends_row(self, position: int) -> bool:
        return (position + 1) % self.width == 0

    def feed_plan(self, positions: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
        """What to feed so that ``positions`` are consumed: three parallel lists.

        Returns the sequence indices, the position whose token stands at each (-1 for an end-of-line
        token), and the position that each one's output state predicts (-1 for an image token that an
        end-of-line token follows; ``size`` after the last token).
        """
        index, token, predicts = [], [], []
        for position in positions:
            sequence_index = self.sequence_index(position)
            end_of_line = self.end_of_line and self.ends_row(position)
            index.append(sequence_index)
            token.append(position)
            predicts.append(-1 if end_of_line else position + 1)
            if end_of_line:
                index.append(sequence_index + 1)
                token.append(-1)
                predicts.append(position + 1)
        return index, token, predicts
