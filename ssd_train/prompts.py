"""Prompt sources, and the split that keeps training, validation and test prompts apart."""

import csv
import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ssd_train.pictures import Picture

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


LONGEST = 10_000
"""Characters of a prompt; a longer one is no caption but a file read in the wrong way."""
LONGEST_ROW, LONGEST_LIST = 2**24, 2**28
"""Characters of a line, which may hold a picture, and of a .json file: a small .gz can unpack to any number."""

Row = tuple[str, dict[str, Any] | None]
"""Where it stands ("line 3", "row 2"), and its columns; None if the line is blank."""


class DatasetPrompts:
    """Captions from a file, or from a data set of the hub.

    By the file's name: .txt holds a prompt a line; .jsonl, or .json, an object a line or one list of objects; .csv and
    .tsv a header and rows; .parquet columns; the first three also as .gz. These are read here, row by row, so that no
    library guesses at their content, and nothing is cached. Anything else is a data set's name or folder, for
    ``datasets.load_dataset``. ``image_column``, images or paths of image files (relative to the file that names them),
    is needed for cache.source=images.

    Rows without a prompt or a picture, null or blank, are left out but counted: a prompt's index is its row in the
    source, so that filling in a row changes no other sample. Raises ValueError with file, row, column and the mend.
    """

    def __init__(self, path: str, column: str = "text", image_column: str | None = None, split: str = "train"):
        if not path.strip():
            raise ValueError(f"model.prompts.path is empty; {MEND}")
        self.path, self.image_column, self.split = path, image_column, split
        names = Path(path).name.lower().removesuffix(".gz")
        self.read = next((read for suffix, read in READERS.items() if names.endswith(suffix)), None)
        self.column = "text" if self.read is _lines else column  # the lines of a text file have no other name

    def __repr__(self) -> str:
        return f"DatasetPrompts({self.path!r})"

    def __iter__(self) -> Iterator[Prompt]:
        blank, count = 0, 0
        try:
            for index, (place, row) in enumerate(self._rows()):
                count = index + 1
                text = None if row is None else self._value(place, row, self.column)
                if not isinstance(text, str | None):
                    raise ValueError(f"{self.path}, {place}: column {self.column!r} holds {text!r}; expected text")
                if len(text or "") > LONGEST:
                    raise ValueError(
                        f"{self.path}, {place}: a prompt of {len(text)} characters; expected at most {LONGEST}"
                    )
                image = None
                if text and text.strip() and self.image_column:
                    value = self._value(place, row, self.image_column)
                    image = Picture(value, Path(self.path).parent, f"{self.path}, {place}") if value else None
                if text and text.strip() and (image or not self.image_column):
                    yield Prompt(index, text, image)
                else:
                    blank += 1
        finally:
            if blank:
                what = "prompt or picture" if self.image_column else "prompt"
                _log_once(f"{self.path}: {blank} of the first {count} rows have no {what} and are left out")

    def _value(self, place: str, row: dict[str, Any], column: str) -> Any:
        if column not in row:
            raise ValueError(
                f"{self.path}, {place}: there are columns {sorted(row)}, not {column!r}; set model.prompts.column or "
                "model.prompts.image_column"
            )
        return row[column]

    def _rows(self) -> Iterator[Row]:
        if self.read is None:
            return self._data_set()
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"no prompts to be had from {self.path}: there is no such file; {MEND}")
        if not path.stat().st_size:
            raise ValueError(f"{self.path} is empty; expected a prompt a line")
        return self._read(path)

    def _read(self, path: Path) -> Iterator[Row]:
        try:
            yield from self.read(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}); save it as such") from error
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            raise ValueError(f"{path} cannot be read to its end ({error}); make it again") from error

    def _data_set(self) -> Iterator[Row]:
        if Path(self.path).is_file():
            raise ValueError(f"{self.path} is a file of another kind than {', '.join(READERS)}; {MEND}")
        import datasets
        from datasets.exceptions import DatasetsError

        try:
            rows = datasets.load_dataset(self.path, split=self.split)
        except (OSError, ValueError, DatasetsError) as error:
            raise ValueError(
                f"no prompts to be had from {self.path} ({error.__cause__ or error}). A data set of the Hugging Face "
                "hub is downloaded once where there is a network; without one, bring the HF_HOME of such a machine "
                f"here. Or {MEND}"
            ) from error
        if self.image_column in rows.column_names:
            rows = rows.cast_column(self.image_column, datasets.Image(decode=False))
        columns = [name for name in (self.column, self.image_column) if name in rows.column_names]
        for index, row in enumerate(rows.select_columns(columns) if columns else rows):
            yield f"row {index + 1}", row


MEND = (
    "set model.prompts.path to a file of your own: prompts.txt with a prompt a line, or prompts.jsonl with an object a "
    "line and model.prompts.column=NAME"
)


def _lines(path: Path) -> Iterator[Row]:
    for place, line in _numbered(path):
        yield place, {"text": line.rstrip("\r\n")}


def _numbered(path: Path) -> Iterator[tuple[str, str]]:
    with _text(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_ROW + 1), ""), 1):
            _require_length(path, f"line {number}", line, LONGEST_ROW)
            yield f"line {number}", line


def _require_length(path: Path, place: str, text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"{path}, {place}: more than {most} characters; expected a prompt a line; {MEND}")


def _objects(path: Path) -> Iterator[Row]:
    if ".jsonl" not in path.name.lower():
        with _text(path) as file:
            if file.read(4096).lstrip().startswith("["):
                file.seek(0)
                text = file.read(LONGEST_LIST + 1)
                _require_length(path, "the list", text, LONGEST_LIST)
                for number, row in enumerate(_parse(path, "the list", text), 1):
                    yield f"object {number}", _object(path, f"object {number}", row)
                return
    for place, line in _numbered(path):
        yield place, _object(path, place, _parse(path, place, line)) if line.strip() else None


def _parse(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, {place}: no JSON ({error}); {MEND}") from error


def _object(path: Path, place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{path}, {place}: {str(row)[:80]!r} is no object; expected one with a column of prompts")
    return row


def _table(path: Path) -> Iterator[Row]:
    with _text(path, newline="") as file:
        csv.field_size_limit(LONGEST_ROW)
        rows = csv.DictReader(file, delimiter="\t" if ".tsv" in path.name.lower() else ",")
        for row in rows:
            if None in row:
                raise ValueError(f"{path}, line {rows.line_num}: more fields than the header's {rows.fieldnames}")
            yield f"line {rows.line_num}", row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise OSError(f"row {number + 1}: {error}") from error


READERS = {
    ".txt": _lines, ".jsonl": _objects, ".json": _objects, ".csv": _table, ".tsv": _table, ".parquet": _parquet
}  # fmt: skip


def _text(path: Path, newline: str | None = None):
    """Opened for reading as UTF-8, with or without a byte-order mark."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8-sig", newline=newline)


@cache
def _log_once(message: str) -> None:
    """A run reads its prompts several times."""
    log.warning(message)
