"""The three parts of a decoder, as interfaces.

A schedule is a *script*: a generator that yields steps for one sample and is sent their outcomes. It speaks of grid
positions only; the engine knows slots, end-of-line tokens, streams, batches and random numbers. N is the number of
items, (sample, position) pairs of a batch laid end to end; V the image vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ssd_train.backbones.base import Backbone
from ssd_train.decoding.state import Items, State
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Heads


@dataclass(frozen=True)
class Step:
    """Draft, then feed, then judge; each may be empty. Only a step that feeds is a backbone pass.

    ``draft`` holds (position, source) pairs: the source is the position whose state and token the draft is made from.
    ``feed`` runs the backbone over these positions' current tokens, which overwrites their KV cache entries and
    yields the states of the positions after them. ``judge`` settles positions whose state is known: a drafted one is
    accepted or re-drawn by the rule, one without a draft is drawn from p. With ``fresh``, every judged position after
    the first rejection is drawn from p, whatever its draft was; and so is what is judged ``anew``, whatever stands
    there.
    """

    draft: Sequence[tuple[int, int]] = ()
    feed: Sequence[int] = ()
    judge: Sequence[int] = ()
    fresh: bool = False
    anew: Sequence[int] = ()


class Outcome:
    """What a step's judgement did to one sample; reading it waits for the device. ``read`` gives all samples' verdicts
    laid end to end, of which the sample's are those from ``start`` to ``stop``."""

    def __init__(self, read: Callable[[], list[bool]], start: int, stop: int):
        self._read, self._start, self._stop = read, start, stop

    @property
    def accepted(self) -> list[bool]:
        """For each judged position, in the step's order, whether its draft was accepted."""
        return self._read()[self._start : self._stop]


Script = Generator[Step, Outcome, Any]


class Schedule(ABC):
    """Parameters of a schedule. Position 0 has been drawn when a script starts."""

    adaptive: bool = False
    """Whether scripts look at outcomes, so that samples of a batch may part ways."""

    @abstractmethod
    def script(self, grid: Grid) -> Script: ...

    @abstractmethod
    def window(self, grid: Grid) -> int:
        """The longest run of positions that hold drafts at any time; 0 if there never is a draft."""

    def exact(self, grid: Grid) -> bool:
        """Whether, with a lossless rule, whole images have the distribution of AR sampling."""
        return False


class Drafter(ABC):
    """Makes draft distributions."""

    sequential: bool = False
    """Whether a draft may depend on the one before it: then they are proposed and sampled one at a time."""

    uses_heads: bool = True
    """Whether other heads may make other drafts. What was decoded without any outlives them."""

    def bind(self, backbone: Backbone, heads: Heads | None) -> "Drafter":
        """Gives the drafter what it drafts with. Raises ValueError if something it needs is not there."""
        return self

    def require(self, source: int, position: int, grid: Grid) -> None:
        """Raises ValueError if the bound drafter cannot draft this position from this source."""
        return

    @abstractmethod
    def propose(self, state: State, items: Items, source: Items, offset: Sequence[tuple[int, int]]) -> Tensor:
        """q [N, V] for N items, from as many ``source`` items at (rows, columns) ``offset``; drafts are sampled
        from it."""


class CorrectingDrafter(Drafter):
    """Can also revise drafts whose neighbours were re-drawn."""

    sweeps: int = 0
    """How often, at most, after a judgement; 0 if it never does."""

    context: Tensor
    """Where there are sweeps: each position's neighbours that a revision looks at, all before it in raster order and
    the left one first, [L, C] int64 on the backbone's device; L stands for none."""

    @abstractmethod
    def revision(
        self, state: State, judged: Items, hidden: Tensor, left: Tensor, fed: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Of N judged positions, whose states are ``hidden`` [S, N, d], with ``left`` [S, N, d] those of the left
        neighbours, and whose neighbours were ``fed`` as these tokens [N, C] (-1 is none): a function from n of their
        indices [n] and these ones' neighbours as they stand now [n, C] to what their states become [S, n, d]."""


class NextTokenDrafter(Drafter):
    """A language model of some kind: each draft comes from the position before it."""

    sequential = True
    uses_heads = False

    def require(self, source: int, position: int, grid: Grid) -> None:
        if source != position - 1:
            raise ValueError(
                "a draft model goes from one position to the next; use the Prefix schedule with source: left"
            )


class Rule(ABC):
    """Decides about drafts. Pure: no state, no randomness."""

    lossless: bool = False
    """Whether accept-and-redraw with this rule leaves the marginal exactly p."""

    def bind(self, backbone: Backbone) -> "Rule":
        return self

    @abstractmethod
    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        """(p [N, V], q [N, V], draft [N]) -> acceptance probability [N] (values above 1 mean 1) and the unnormalised
        distribution [N, V] to re-draw a rejected draft from."""


class JointRule(Rule):
    """A rule that may also judge runs of neighbouring drafts as one."""

    @abstractmethod
    def together(self, accept: Tensor, p: Tensor, q: Tensor, draft: Tensor, follows: Tensor, u: Tensor) -> Tensor:
        """The acceptance probabilities [N] that replace those judged alone, ``accept`` [N]. ``follows`` [N] bool: an
        item and the one before it are drafts side by side in a row; ``u`` [N] in (0, 1): an item is accepted where it
        is below the result."""


def rehearse(schedule: Schedule, grid: Grid) -> Iterator[Step]:
    """The steps of a script when everything is accepted."""
    script, outcome = schedule.script(grid), None
    with suppress(StopIteration):
        while True:
            step = script.send(outcome)
            yield step
            accepted = [True] * len(step.judge)
            outcome = Outcome(lambda accepted=accepted: accepted, 0, len(accepted))


def judges_neighbours(steps: Iterable[Step], grid: Grid) -> bool:
    """Whether any step judges two drafts side by side in a row."""
    drafts: set[int] = set()
    for step in steps:
        drafts.update(position for position, _ in step.draft)
        judged = drafts.intersection(step.judge)
        if any(position % grid.width and position - 1 in judged for position in judged):
            return True
        drafts.update(step.judge)
    return False
