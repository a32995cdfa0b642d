"""DPG-Bench (Hu et al., ELLA, arXiv 2403.05135; github.com/TencentQQGYLab/ELLA)."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import ClassVar

import numpy as np

from ssd_train.evaluation.suites.base import Interval, ScoredSuite, SuitePrompt, load_picture, save_png


@dataclass
class DPGBench(ScoredSuite):
    """the folder dpg_bench/prompts: a .txt file a prompt, named by its id"""

    images_per_prompt: int = 4

    results: ClassVar[str] = ".txt"

    def __post_init__(self) -> None:
        if not 1 <= self.images_per_prompt <= 4:
            raise ValueError(f"suite.images_per_prompt is {self.images_per_prompt}; a 2 x 2 grid holds 1 to 4")

    def finish(self, folder: Path, prompts: Sequence[SuitePrompt]) -> None:
        """Nothing: the scorer takes every file of the folder for a picture."""

    def rows(self) -> Iterator[SuitePrompt]:
        for row, path in enumerate(sorted(Path(self.path).glob("*.txt"))):
            yield SuitePrompt(row, path.stem, path.read_text("utf-8-sig").strip("\r\n"))

    def files(self, folder: Path, prompt: SuitePrompt) -> list[Path]:
        return [folder / f"{prompt.id}.png"]

    def save(self, folder: Path, prompt: SuitePrompt, pictures: np.ndarray) -> None:
        """A grid of square cells, as the scorer cuts it; a picture that is none stands at its cell's top left."""
        _, height, width, _ = pictures.shape
        side = max(height, width)
        grid = np.zeros((2 * side, 2 * side, 3), np.uint8)
        for number, picture in enumerate(pictures):
            y, x = number // 2 * side, number % 2 * side
            grid[y : y + height, x : x + width] = picture
        folder.mkdir(parents=True, exist_ok=True)
        save_png(folder / f"{prompt.id}.png", grid)

    def load(self, folder: Path, prompt: SuitePrompt, shape: tuple[int, int]) -> np.ndarray:
        grid, (height, width), side = load_picture(folder / f"{prompt.id}.png"), shape, max(shape)
        corners = [(number // 2 * side, number % 2 * side) for number in range(self.images_per_prompt)]
        return np.stack([grid[y : y + height, x : x + width] for y, x in corners])

    def command(self, folder: Path, results: Path, shape: tuple[int, int]) -> str:
        places = shlex.quote(str(folder)), shlex.quote(str(results))
        return (
            "accelerate launch dpg_bench/compute_dpg_bench.py --image-root-path {} --res-path {} ".format(*places)
            + f"--resolution {max(shape)} --pic-num {self.images_per_prompt} --vqa-model mplug"
        )

    def scores(self, results: Path, prompts: Sequence[SuitePrompt]) -> dict[str, Interval]:
        """Overall from the line of each picture, with the interval of a mean over prompts; the first level's categories
        from the summary, which says nothing of their spread."""
        lines = results.read_text("utf-8").splitlines()
        ids, values = {prompt.id for prompt in prompts}, {}
        for line in lines:
            if match := re.fullmatch(r"(.+)\.png, .*?([\d.]+)", line):
                values[Path(match[1]).name] = float(match[2])
        if not ids <= values.keys():
            missing = sorted(ids - values.keys())
            raise ValueError(
                f"{results} lacks {len(missing)} of {len(ids)} pictures, {missing[0]} first; run the scorer again"
            )
        own = [values[id] for id in ids]
        value, half = mean(own), 1.96 * stdev(own) / math.sqrt(len(own)) if len(own) > 1 else math.inf
        found = {"overall": (value, max(0.0, value - half), min(1.0, value + half))}
        level = 0
        for line in lines:
            level = 1 if line == "L1 category scores:" else 2 if line == "L2 category scores:" else level
            if level == 1 and values.keys() == ids and (match := re.fullmatch(r"\t(.+): ([\d.]+)", line)):
                found[match[1]] = (float(match[2]) / 100, None, None)
        return found
