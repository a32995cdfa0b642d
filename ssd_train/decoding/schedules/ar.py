"""Autoregressive decoding: one token a pass."""

from ssd_train.decoding.parts import Schedule, Script, Step
from ssd_train.grid import Grid


class Autoregressive(Schedule):
    """h*w passes, the prompt's included; the last token is never fed."""

    def script(self, grid: Grid) -> Script:
        for position in range(grid.size - 1):
            yield Step(feed=[position], judge=[position + 1])

    def window(self, grid: Grid) -> int:
        return 0

    def exact(self, grid: Grid) -> bool:
        return True
