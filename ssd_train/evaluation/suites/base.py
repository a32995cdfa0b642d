"""What every suite has: prompts with what the official file says of them, a layout of pictures, scores read back."""

import csv
import io
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from ssd_train.draws import sample_seed
from ssd_train.processes.files import write_atomically
from ssd_train.prompts import MEND

log = logging.getLogger(__name__)

Interval = tuple[float, float | None, float | None]  # value, low, high; null where only the value is known


@dataclass(frozen=True)
class SuitePrompt:
    """``row`` is its place in the official file, blank rows counted, and keys the seeds of its images; ``id`` its name
    in the layout; ``metadata`` what the file says of it."""

    row: int
    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def seed(self, seed: int, number: int) -> int:
        """Of image ``number``, whatever the decoder and the batch. Rows with the same text have different ones."""
        return sample_seed(sample_seed(seed, self.row), number)


@dataclass
class Suite(ABC):
    """The settings of conf/suite. ``name`` is that of its folder and of its published rows; ``reference`` is a decoder
    of this run or a folder of pictures, ``inception`` and ``clip`` as in :mod:`ssd_train.evaluation.networks`."""

    name: str
    path: str
    images_per_prompt: int = 1
    limit: int | None = None  # the first prompts only
    reference: str = "ar"
    inception: str | None = None
    clip: str | None = None

    @abstractmethod
    def rows(self) -> Iterator[SuitePrompt]:
        """The prompts of the official file in its order, blank texts included. Raises ValueError naming the row."""

    @abstractmethod
    def files(self, folder: Path, prompt: SuitePrompt) -> list[Path]:
        """Where the layout has the prompt's pictures."""

    def save(self, folder: Path, prompt: SuitePrompt, pictures: np.ndarray) -> None:
        """Writes the prompt's pictures, uint8 [n, H, W, 3], each whole or not at all."""
        for path, picture in zip(self.files(folder, prompt), pictures, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_png(path, picture)

    def load(self, folder: Path, prompt: SuitePrompt, shape: tuple[int, int]) -> np.ndarray:
        """The pictures of (height, width) again, uint8 [n, H, W, 3]."""
        return np.stack([load_picture(path) for path in self.files(folder, prompt)])

    @abstractmethod
    def finish(self, folder: Path, prompts: Sequence[SuitePrompt]) -> None:
        """Writes what the layout has beside the pictures."""

    def prompts(self) -> tuple[list[SuitePrompt], int]:
        """All prompts that have a text, and how many rows have none. Raises ValueError for a file without prompts,
        unreadable, or with two rows of one id."""
        with self.explained(self.path):
            rows = list(self.rows())
        prompts = [row for row in rows if row.text.strip()]
        if not prompts:
            raise ValueError(f"suite.path={self.path} holds no prompts; expected {self.__doc__}")
        seen: dict[str, int] = {}
        for prompt in prompts:
            if seen.setdefault(prompt.id, prompt.row) != prompt.row:
                first = seen[prompt.id]
                raise ValueError(
                    f"{self.path}: rows {first + 1} and {prompt.row + 1} are both {prompt.id!r}; rename one"
                )
        if blank := len(rows) - len(prompts):
            log.warning("%s: %d of %d rows have no prompt and are left out", self.path, blank, len(rows))
        return prompts, blank

    @contextmanager
    def explained(self, path: Path | str) -> Iterator[None]:
        """Makes of what goes wrong while a file is read a ValueError that says what the suite expects."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}); save it as such") from error
        except (OSError, EOFError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read ({error}); expected {self.__doc__}") from error
        except ValueError as error:  # the mends of training prompts are other settings
            message = str(error).replace(MEND, f"expected {self.__doc__}").replace("model.prompts.", "suite.")
            raise ValueError(message) from error


class ScoredSuite(Suite):
    """One with an official scorer, whose scores can be read back."""

    results: ClassVar[str]
    """Suffix of the scorer's result file."""

    @abstractmethod
    def command(self, folder: Path, results: Path, shape: tuple[int, int]) -> str:
        """The official scorer's, to be run in a checkout of it."""

    @abstractmethod
    def scores(self, results: Path, prompts: Sequence[SuitePrompt]) -> dict[str, Interval]:
        """By category, "overall" first, as shares of 1, from the scorer's result file. Raises ValueError if that is of
        other prompts, or cut short."""


def column(path: str, place: str, row: dict[str, Any], name: str) -> str:
    """The text in a row's column, "" for null. Raises ValueError if there is no such column, or no text in it."""
    if name not in row:
        raise ValueError(f"{path}, {place}: there are columns {sorted(row)}, not {name!r}")
    if not isinstance(row[name], str | None):
        raise ValueError(f"{path}, {place}: column {name!r} holds {row[name]!r}; expected text")
    return row[name] or ""


def save_png(path: Path, picture: np.ndarray) -> None:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    write_atomically(path, buffer.getvalue())


def load_picture(path: Path) -> np.ndarray:
    """uint8 [H, W, 3]. Raises ValueError if the file holds no picture."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"no whole picture in {path} ({error}); remove it, and it is drawn again") from error


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def mean_of(intervals: Sequence[Interval]) -> Interval:
    """The mean of independent shares, with the ends of its interval at the root of the summed squares of theirs
    (square-and-add; Newcombe, Statistics in Medicine 1998)."""
    n = len(intervals)
    value = sum(x for x, _, _ in intervals) / n
    below = math.sqrt(sum((x - low) ** 2 for x, low, _ in intervals)) / n
    above = math.sqrt(sum((high - x) ** 2 for x, _, high in intervals)) / n
    return value, value - below, value + above
