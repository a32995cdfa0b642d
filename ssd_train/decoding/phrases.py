"""Phrases: runs of tokens that often stand side by side in a row (for SJD-PV, arXiv 2603.06666).

Byte-pair merges over the rows of a corpus, each expanded to the tokens it stands for. A phrase never goes round a row's
end: what stands there is no neighbour in the picture, and some families put an end-of-line token in between.
N items (tokens of a row end to end, row after row), V image vocabulary, M phrases.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from ssd_train.processes.files import read_json, write_json

FIRST_CHARACTER = 0xF0000
"""Token 0 as a character: Unicode's two private planes hold 131,072 of them, and nothing there is split or folded."""
LARGEST_VOCABULARY = 0x110000 - FIRST_CHARACTER
KIND = "phrases"
"""Of a library, whatever its file is called."""
MOST_PHRASES, LONGEST_PHRASE = 100_000, 1_000
"""Matching holds a table of phrases by ids, and a flag for each phrase and item."""


class PhrasesError(ValueError):
    """A phrase library is not there, or does not fit; the message says what, and how to mend it."""


# -- learning -----------------------------------------------------------------------------------------------------


def learn(rows: Iterable[np.ndarray], vocabulary: int, merges: int, least: int = 2) -> list[list[int]]:
    """Up to ``merges`` phrases from rows of token ids, each [w] integer, in the order in which they were merged, the
    most frequent pair first. A pair that stands side by side less than ``least`` times is not merged."""
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"the vocabulary has {vocabulary} ids; expected at most {LARGEST_VOCABULARY} to learn phrases")
    trainer = BpeTrainer(
        vocab_size=vocabulary + merges,
        min_frequency=least,
        initial_alphabet=[chr(FIRST_CHARACTER + token) for token in range(vocabulary)],
        show_progress=False,
    )
    tokenizer = Tokenizer(BPE())
    words = ((np.asarray(row) + FIRST_CHARACTER).astype("<u4").tobytes().decode("utf-32-le") for row in rows)
    tokenizer.train_from_iterator(words, trainer)
    merged = sorted((index, word) for word, index in tokenizer.get_vocab().items() if len(word) > 1)
    return [[ord(character) - FIRST_CHARACTER for character in word] for _, word in merged]


# -- a library on disk --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """``phrases`` are runs of at least two ids below ``vocabulary``; ``fingerprint`` is the backbone's whose tokens
    they are; ``learned_from`` and ``statistics`` say what from and with what result."""

    backbone: str
    fingerprint: str
    vocabulary: int
    learned_from: dict = field(default_factory=dict)
    statistics: dict = field(default_factory=dict)
    phrases: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.phrases) > MOST_PHRASES or max(map(len, self.phrases), default=0) > LONGEST_PHRASE:
            raise PhrasesError(
                f"{len(self.phrases)} phrases; expected at most {MOST_PHRASES}, none of more than {LONGEST_PHRASE} ids"
            )
        for phrase in self.phrases:
            if len(phrase) < 2 or not all(0 <= token < self.vocabulary for token in phrase):
                raise PhrasesError(f"{phrase} is no phrase; expected two or more ids from 0 to {self.vocabulary - 1}")


def save(path: Path, library: Library) -> None:
    """One JSON file, whole or not at all; the phrases come last in it."""
    write_json(path, asdict(library), KIND, indent=None)


def load(path: Path) -> Library:
    content = read_json(path, "run stages=[cache,phrases] to mend it", PhrasesError, KIND)
    if content is None:
        raise PhrasesError(f"there is no phrase library {path}; run stages=[cache,phrases] with these settings first")
    try:
        return Library(**content)
    except (ValueError, TypeError) as error:
        raise PhrasesError(
            f"{path} is not a phrase library that this version knows ({error}); run stages=[cache,phrases] to mend it"
        ) from error


# -- matching -----------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Phrases for matching, the longest first: tokens [M, longest] int64, padded with 0, and for each k how many
    phrases have more than k tokens."""

    tokens: Tensor
    longer: list[int]


def table(phrases: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Table:
    ordered = sorted(phrases, key=len, reverse=True)
    longest = max(map(len, phrases), default=0)
    tokens = torch.zeros(len(ordered), longest, dtype=torch.int64)
    for row, phrase in zip(tokens, ordered, strict=True):
        row[: len(phrase)] = torch.tensor(phrase)
    return Table(tokens.to(device), [sum(len(phrase) > k for phrase in ordered) for k in range(longest)])


def match(fits: Tensor, follows: Tensor, phrases: Table) -> Tensor:
    """[N] int64: how many tokens the longest phrase has that could start at each item, 0 where none could.

    ``fits`` [N, V] bool, whether an item may stand for a token; ``follows`` [N] bool, whether it is the right-hand
    neighbour of the item before. A phrase needs a neighbour for each of its tokens.
    """
    items = len(fits)
    length = torch.zeros(items, dtype=torch.int64, device=fits.device)
    alive = fits.new_ones(items, len(phrases.tokens))
    for k, (count, longer) in zip(range(items), pairwise([*phrases.longer, 0]), strict=False):
        there = fits[k:, phrases.tokens[:count, k]]
        alive = alive[: items - k, :count] & (there & follows[k:, None] if k else there)
        complete = alive[:, longer:].any(1)
        length[: items - k] = torch.where(complete, k + 1, length[: items - k])
    return length


def first_of_run(length: Tensor) -> Tensor:
    """[N] int64: the item with which each item's run starts; alone, an item is its own. Runs of ``length`` [N] (0 and 1
    are an item alone) are laid from left to right without overlaps."""
    items = len(length)
    here = torch.arange(items + 1, device=length.device)
    hop = torch.cat([here[:items] + length.clamp_min(1), here[items:]])
    starts = here == 0
    for _ in range(items.bit_length()):  # after k rounds, all starts less than 2 ** k hops from the first are known
        starts = starts | (torch.zeros_like(here).index_add_(0, hop, starts.long()) > 0)
        hop = hop[hop]
    return torch.where(starts, here, 0)[:items].cummax(0).values


# -- statistics ---------------------------------------------------------------------------------------------------


def coverage(tokens: Tensor, phrases: Table, vocabulary: int) -> float:
    """The share of the tokens of images [n, h, w] that stand in a phrase, word for word; NaN of no images."""
    covered = []
    for image in tokens:
        follows = (torch.arange(image.shape[1]) > 0).repeat(image.shape[0])
        length = match(F.one_hot(image.flatten().long(), vocabulary).bool(), follows, phrases)
        covered.append((length[first_of_run(length)] > 1).double().mean())
    return float(torch.stack(covered).mean()) if covered else float("nan")


def statistics(phrases: Sequence[Sequence[int]], validation: Tensor, vocabulary: int) -> dict:
    """How many there are, how many of each length, and the share of the tokens of validation images [n, h, w] that
    they cover."""
    lengths = Counter(map(len, phrases))
    return {
        "phrases": len(phrases),
        "by_length": {str(length): lengths[length] for length in sorted(lengths)},
        "validation_samples": len(validation),
        "validation_coverage": round(coverage(validation, table(phrases), vocabulary), 4),
    }
