"""An endless source of captions, and of the scenes they caption, for the tiny backbone."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from ssd_train.prompts import Prompt, Split, split_of
from ssd_train.tiny.scenes import CATEGORIES, SIZE, Scene, render, sample_scene

TURNS = [Split.TRAIN, Split.VALIDATION, Split.TEST] + [Split.TRAIN] * 7  # every split is there early


class GrammarPrompts:
    """Categories in turn within each split, everything else drawn from ``seed`` and the prompt's index. Captions do
    not depend on ``width``, the scenes' in pixels."""

    def __init__(self, seed: int = 0, width: int = SIZE):
        self.seed, self.width = seed, width

    def __repr__(self) -> str:
        width = f", width={self.width}" if self.width != SIZE else ""
        return f"GrammarPrompts(seed={self.seed}{width})"

    def scene(self, index: int) -> tuple[Scene, np.random.Generator]:
        rng = np.random.default_rng([self.seed, index])
        split = TURNS[index // len(CATEGORIES) % len(TURNS)]
        category = CATEGORIES[index % len(CATEGORIES)]
        return sample_scene(rng, category, lambda caption: split_of(caption) is split, self.width), rng

    def __iter__(self) -> Iterator[Prompt]:
        for index in count():
            yield Prompt(index, self.scene(index)[0].caption, lambda index=index: render(*self.scene(index)))
