"""GenEval (Ghosh et al., arXiv 2310.11513; github.com/djghosh13/geneval)."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ssd_train.evaluation.metrics import wilson
from ssd_train.evaluation.suites.base import Interval, ScoredSuite, SuitePrompt, column, mean_of
from ssd_train.processes.files import write_atomically
from ssd_train.prompts import READERS


@dataclass
class GenEval(ScoredSuite):
    """evaluation_metadata.jsonl of GenEval: an object a line with tag, include and prompt"""

    images_per_prompt: int = 4

    results: ClassVar[str] = ".jsonl"

    def rows(self) -> Iterator[SuitePrompt]:
        for row, (place, value) in enumerate(READERS[".jsonl"](Path(self.path))):
            value = value or {"tag": None, "prompt": None}  # a blank line
            column(self.path, place, value, "tag")
            yield SuitePrompt(row, f"{row:05d}", column(self.path, place, value, "prompt"), value)

    def files(self, folder: Path, prompt: SuitePrompt) -> list[Path]:
        return [folder / prompt.id / "samples" / f"{number:04d}.png" for number in range(self.images_per_prompt)]

    def finish(self, folder: Path, prompts: Sequence[SuitePrompt]) -> None:
        for prompt in prompts:
            write_atomically(folder / prompt.id / "metadata.jsonl", json.dumps(prompt.metadata).encode())

    def command(self, folder: Path, results: Path, shape: tuple[int, int]) -> str:
        places = shlex.quote(str(folder)), shlex.quote(str(results))
        return "python evaluation/evaluate_images.py {} --outfile {} --model-path <detector's folder>".format(*places)

    def scores(self, results: Path, prompts: Sequence[SuitePrompt]) -> dict[str, Interval]:
        """The scorer's own overall: the mean over tags. Intervals take the images of one prompt as independent."""
        tags = {prompt.id: prompt.metadata["tag"] for prompt in prompts}
        found: dict[str, list[bool]] = {}
        for place, row in READERS[".jsonl"](results):
            if row is None:
                continue
            try:
                name, tag, correct = Path(row["filename"]).parts[-3], row["tag"], row["correct"]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{results}, {place}: expected filename, tag and correct; run the scorer again"
                ) from error
            if name not in tags:
                continue  # beyond suite.limit
            if tags[name] != tag or not isinstance(correct, bool):
                raise ValueError(
                    f"{results}, {place}: {name} is {tag!r}, {correct!r}; expected {tags[name]!r}, true or false"
                )
            found.setdefault(tag, []).append(correct)
        if (count := sum(map(len, found.values()))) != (expected := len(prompts) * self.images_per_prompt):
            raise ValueError(f"{results} is of {count} images, and there are {expected}; run the scorer again")
        by_tag = {tag: wilson(sum(oks), len(oks)) for tag, oks in found.items()}
        return {"overall": mean_of(list(by_tag.values()))} | by_tag
