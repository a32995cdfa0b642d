"""An endless source of captions, and of the scenes they caption, for the tiny backbone."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from ssd_train.prompts import Prompt
from ssd_train.tiny.scenes import CATEGORIES, Scene, render, sample_scene


class GrammarPrompts:
    """Categories in turn, everything else drawn from ``seed`` and the prompt's index."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def __repr__(self) -> str:
        return f"GrammarPrompts(seed={self.seed})"

    def scene(self, index: int) -> tuple[Scene, np.random.Generator]:
        rng = np.random.default_rng([self.seed, index])
        return sample_scene(rng, CATEGORIES[index % len(CATEGORIES)]), rng

    def __iter__(self) -> Iterator[Prompt]:
        for index in count():
            yield Prompt(index, self.scene(index)[0].caption, lambda index=index: render(*self.scene(index)))
