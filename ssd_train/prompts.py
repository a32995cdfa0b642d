"""Prompt sources, and the split that keeps training, validation and test prompts apart."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True)
class Prompt:
    """``index`` is the place in its source and keys the sample's seed; ``image`` loads the uint8 [H, W, 3] picture
    that the text captions, where the source has one."""

    index: int
    text: str
    image: Callable[[], np.ndarray] | None = None


class PromptSource(Protocol):
    def __iter__(self) -> Iterator[Prompt]:
        """Always the same prompts in the same order; may be endless."""


def split_of(text: str) -> Split:
    """Decided by the text alone (8 : 1 : 1), so a prompt that a source repeats is never in two splits. With this salt
    the few captions of tiny's grammar fall so that each split has some of every category."""
    bucket = hashlib.sha256(f"3081 {text.strip()}".encode()).digest()[0] * 10 // 256
    return {0: Split.VALIDATION, 1: Split.TEST}.get(bucket, Split.TRAIN)


def take(source: PromptSource, splits: Collection[Split], count: int, scan: int = 1_000_000) -> list[Prompt]:
    """The first ``count`` prompts of the given splits. Raises ValueError if the source, or its first ``scan``
    prompts, do not hold that many."""
    chosen = (prompt for prompt in islice(iter(source), scan) if split_of(prompt.text) in splits)
    prompts = list(islice(chosen, count))
    if len(prompts) < count:
        raise ValueError(
            f"{count} {'/'.join(splits)} prompts wanted, but {source} holds {len(prompts)}; "
            "lower cache.samples or decode.prompts, or give a longer source"
        )
    return prompts


class DatasetPrompts:
    """Any text file, JSONL file or ``datasets`` source.

    A path that ends in .txt holds one prompt a line; .json or .jsonl one object a line; anything else is given to
    ``datasets.load_dataset``. ``image_column``, images or paths of image files, is needed for cache.source=images.

    Rows without a prompt, null or blank, are left out but counted: a prompt's index is its row in the source, so that
    filling in a row changes no other sample.
    """

    def __init__(self, path: str, column: str = "text", image_column: str | None = None, split: str = "train"):
        self.path, self.image_column, self.split = path, image_column, split
        self.column = "text" if path.endswith(".txt") else column  # the lines of a text file have no other name

    def __repr__(self) -> str:
        return f"DatasetPrompts({self.path!r})"

    def __iter__(self) -> Iterator[Prompt]:
        rows = self._rows()
        blank = 0
        try:
            for index, row in enumerate(rows.select_columns([self.column])):
                text = row[self.column]
                if not isinstance(text, str | None):
                    raise ValueError(f"{self.path}: row {index} has {text!r} in column {self.column!r}; expected text")
                if text and text.strip():
                    yield Prompt(index, text, self._loader(rows, index) if self.image_column else None)
                else:
                    blank += 1
        finally:
            if blank:
                _log_once(f"{self.path}: {blank} of the first {index + 1} rows have no prompt and are left out")

    def _rows(self) -> "Dataset":
        """Raises ValueError, with what to do, if the source is not to be had or lacks a column."""
        from datasets import Image, load_dataset
        from datasets.exceptions import DatasetsError

        if Path(self.path).is_file() and not Path(self.path).stat().st_size:
            raise ValueError(f"{self.path} is empty; expected a prompt a line")
        try:
            if self.path.endswith(".txt"):
                rows = load_dataset("text", data_files=self.path, split="train")
            elif self.path.endswith((".json", ".jsonl")):
                rows = load_dataset("json", data_files=self.path, split="train")
            else:
                rows = load_dataset(self.path, split=self.split)
        except (OSError, ValueError, DatasetsError) as error:
            raise ValueError(
                f"no prompts to be had from {self.path} ({error.__cause__ or error}). Set model.prompts.path to a file "
                "of your own: prompts.txt with a prompt a line, or prompts.jsonl with an object a line and "
                "model.prompts.column=NAME. A data set of the Hugging Face hub is downloaded once where there is a "
                "network; without one, bring the HF_HOME of such a machine here."
            ) from error
        missing = {self.column, self.image_column or self.column} - set(rows.column_names)
        if missing:
            raise ValueError(
                f"{self.path} has columns {rows.column_names}, not {sorted(missing)}; set model.prompts.column or "
                "model.prompts.image_column"
            )
        return rows.cast_column(self.image_column, Image()) if self.image_column else rows

    def _loader(self, rows: "Dataset", index: int) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(rows[index][self.image_column].convert("RGB"))


@cache
def _log_once(message: str) -> None:
    """A run reads its prompts several times."""
    log.warning(message)
