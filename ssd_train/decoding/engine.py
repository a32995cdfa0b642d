"""The block-decoding engine: runs any drafter x rule x schedule on any backbone.

B samples, R = 2B rows (both CFG streams), L image tokens, V vocabulary, d width, N items (see parts.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.backbones.kv_cache import Slots
from ssd_train.decoding.parts import (
    Drafter,
    JointRule,
    Outcome,
    Rule,
    Schedule,
    Script,
    Step,
    Trace,
    judges_neighbours,
    rehearse,
)
from ssd_train.decoding.rules.strict import Strict
from ssd_train.distributions import Sampling, Verdict, accept_and_redraw, guided_probabilities, race, sample
from ssd_train.draws import Purpose, uniform


class Items(NamedTuple):
    """(sample, position) pairs, sample after sample; each [N], on the host and on the device."""

    host_sample: np.ndarray
    host_position: np.ndarray
    sample: Tensor
    position: Tensor
    bounds: list[int]  # items of sample b are bounds[b]..bounds[b+1]


@dataclass(frozen=True)
class Decoded:
    """tokens [B, h, w] int64; hidden [2, B, L, d], the last state seen for each position (exact for AR); trace."""

    tokens: Tensor
    hidden: Tensor
    trace: Trace


class Decoder:
    """A drafter, a rule and a schedule, bound to a backbone.

    With ``common_noise`` each position has one vector of random numbers, the same in every round: drafts and re-draws
    are the winners of the same race, run with q and with p, and a draft is accepted if it wins again. An exact schedule
    then gives, bit for bit but for rounding, the image that token by token gives with that noise.
    """

    def __init__(
        self,
        schedule: Schedule,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        common_noise: bool = False,
    ):
        self.schedule = schedule
        self.drafter = drafter
        self.rule = rule
        self.common_noise = common_noise

    def bind(self, backbone: Backbone, heads=None) -> "Decoder":
        """Checks that the parts fit the backbone and each other. Raises ValueError with the reason if not."""
        drafts, schedule = self.schedule.window(backbone.grid) > 0, type(self.schedule).__name__
        if drafts and (self.drafter is None or not (self.rule or self.common_noise)):
            raise ValueError(f"{schedule} drafts: it needs a drafter and a rule")
        if not drafts and (self.drafter or self.rule):
            raise ValueError(f"{schedule} never drafts; expected drafter=null and rule=null")
        if self.common_noise and self.rule is not None and not self.rule.lossless:
            raise ValueError(
                f"with common_noise the race decides about drafts, so {type(self.rule).__name__} would not be asked; "
                "expected rule=null, or common_noise=false"
            )
        steps = list(rehearse(self.schedule, backbone.grid))
        if self.drafter is not None:
            self.drafter = self.drafter.bind(backbone, heads)
            for position, source in {pair for step in steps for pair in step.draft}:
                self.drafter.require(source, position, backbone.grid)
        if self.rule is not None:
            self.rule = self.rule.bind(backbone)
        if isinstance(self.rule, JointRule) and not judges_neighbours(steps, backbone.grid):
            raise ValueError(
                f"{type(self.rule).__name__} judges runs of drafts, but {schedule} with these "
                "settings never judges two neighbouring drafts of a row in one pass; expected another rule or schedule"
            )
        return self

    def exact(self, backbone: Backbone) -> bool:
        return self.schedule.exact(backbone.grid) and (self.rule is None or self.rule.lossless)

    @torch.inference_mode()
    def __call__(
        self, backbone: Backbone, prompts: PromptBatch, seeds: Sequence[int], sampling: Sampling, timed: bool = False
    ) -> Decoded:
        """Decodes one image a prompt. ``timed`` fills trace.seconds, which costs device synchronisations."""
        state = State(backbone, prompts, seeds, sampling, self, timed)
        state.prefill()
        batch = len(seeds)
        # Without feedback all samples do the same at the same time, and one script serves them all.
        scripts = [self.schedule.script(backbone.grid) for _ in range(batch if self.schedule.adaptive else 1)]
        outcomes: list[Outcome | None] = [None] * len(scripts)
        while True:
            steps = [_advance(script, outcome) for script, outcome in zip(scripts, outcomes, strict=True)]
            if all(step is None for step in steps):
                break
            outcomes = state.run([step or Step() for step in steps])
        return Decoded(
            state.tokens[:, :-1].view(batch, backbone.grid.height, backbone.grid.width),
            state.hidden[:, :, : backbone.grid.size],
            state.finish_trace(),
        )


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing, as a copy from memory that is not pinned would."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def after_first(flags: Tensor, group: np.ndarray) -> Tensor:
    """Whether an item comes after the first flagged one of its group: flags [N] bool, group [N] sorted -> [N] bool."""
    count = flags.cumsum(0) - flags.long()
    start = upload(np.searchsorted(group, group), flags.device)
    return count > count[start]


def _advance(script: Script, outcome: Outcome | None) -> Step | None:
    try:
        return script.send(outcome)
    except StopIteration:
        return None


class State:
    """A batch being decoded: what drafters see, and the three things a step can do."""

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptBatch,
        seeds: Sequence[int],
        sampling: Sampling,
        decoder: Decoder,
        timed: bool,
    ):
        self.backbone, self.grid, self.sampling = backbone, backbone.grid, sampling
        self.prompts, self.decoder = prompts, decoder
        batch, size, device = len(seeds), self.grid.size, backbone.device
        if prompts.ids.shape[1] != batch:
            raise ValueError(f"{prompts.ids.shape[1]} prompts but {batch} seeds; expected one seed a prompt")
        self.batch, self.device = batch, device
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        # Column ``size`` is the end-of-line token (-1).
        self.tokens = torch.full((batch, size + 1), -1, dtype=torch.int64, device=device)
        # Column ``size`` is what follows the image, ``size + 1`` the states that predict an end-of-line token.
        self.hidden = torch.zeros(2, batch, size + 2, backbone.width, dtype=backbone.dtype, device=device)
        self.fed = self.tokens.clone()  # what each position's token was when the backbone last consumed it
        self.window = 0 if decoder.common_noise else decoder.schedule.window(self.grid)
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        self.q = torch.zeros(batch, self.window, backbone.vocabulary if self.window else 0, dtype=dtype, device=device)
        self.cache = backbone.new_cache(prompts)
        self._drafted = np.zeros((batch, size), dtype=bool)
        self._visits = np.zeros((batch, size), dtype=np.int64)  # judgements so far: part of a draw's key
        self._round = np.zeros((batch, size), dtype=np.int64)
        self._offset = np.zeros((batch, size, 2), dtype=np.int64)
        self._draws = uniform(self.seeds[:0, None, None], 0, 0).view(0, 0, 0, 0)
        self._timed = timed
        self._trace = Trace(passes=[0] * batch)
        self._events: list[tuple] = []

    # -- one step -----------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """The prompt's pass; draws position 0."""
        with self._clock("prompt"):
            first = self.backbone.prefill(self.prompts, self.cache)
            self.hidden[:, :, 0] = first.view(2, self.batch, -1)
        self._trace.passes = [1] * self.batch
        self._trace.fed.append(self.cache.prompt_length)
        self._judge(self._items([[0]]))

    def run(self, steps: list[Step]) -> list[Outcome]:
        """One step a sample, or one for all of them."""
        if any(step.draft for step in steps):
            with self._clock("draft"):
                self._draft([step.draft for step in steps])
        if any(step.feed for step in steps):
            with self._clock("pass"):
                self._feed([step.feed for step in steps])
        for b, step in enumerate(steps):
            if step.anew:
                self._drafted[b if len(steps) > 1 else slice(None), list(step.anew)] = False
        items = self._items([step.judge for step in steps])
        accepted = None
        if len(items.host_sample):
            with self._clock("judge"):
                accepted = self._judge(items, any(step.fresh for step in steps)).accepted
            if self.decoder.drafter is not None and self.decoder.drafter.revise:
                with self._clock("draft"):
                    self._revise(items)
        bounds, read = items.bounds, cache(lambda: [] if accepted is None else accepted.tolist())
        return [Outcome(read, bounds[b], bounds[b + 1]) for b in range(len(steps))]

    def _draft(self, drafts: list[Sequence[tuple[int, int]]]) -> None:
        if not self.decoder.drafter.sequential:
            return self._draft_at_once(drafts)
        for i in range(max(map(len, drafts))):
            self._draft_at_once([sample[i : i + 1] for sample in drafts])

    def _draft_at_once(self, drafts: list[Sequence[tuple[int, int]]]) -> None:
        items = self._items([[position for position, _ in sample] for sample in drafts])
        source = self._items([[source for _, source in sample] for sample in drafts])
        pairs = zip(source.host_position.tolist(), items.host_position.tolist(), strict=True)
        offset = [self.grid.offset(*pair) for pair in pairs]
        q = self.decoder.drafter.propose(self, items, source, offset)
        if self.decoder.common_noise:
            token = race(q, self._noise(items))
        else:
            token = sample(q, self._draw(items)[:, Purpose.DRAFT])
        self._put(items, token, q)
        host = (items.host_sample, items.host_position)
        self._round[host] = 0
        self._offset[host] = offset

    def _feed(self, positions: list[Sequence[int]]) -> None:
        for b in range(self.batch):
            self._trace.passes[b] += bool(positions[b if len(positions) > 1 else 0])
        hidden, predicts = self._pass(positions)
        self._trace.fed.append(predicts.shape[-1])
        if len(positions) == 1:
            self.hidden[:, :, predicts[0]] = hidden
        else:
            self.hidden[:, torch.arange(self.batch, device=self.device)[:, None], predicts] = hidden

    def last_states(self, items: Items, layers: int | None = None) -> Tensor:
        """Feeds the items through the backbone's first ``layers`` (None: all): of each, the state [2, N, d] that
        follows its sample's last one, by these layers. Their KV cache entries are the ones that a full pass would
        write."""
        positions: list[list[int]] = [[] for _ in range(self.batch)]
        for b, position in zip(items.host_sample.tolist(), items.host_position.tolist(), strict=True):
            positions[b].append(position)
        hidden, _ = self._pass(positions, layers)
        return hidden[:, items.sample, -1]

    def _pass(self, positions: list[Sequence[int]], layers: int | None = None) -> tuple[Tensor, Tensor]:
        """Feeds positions (a list a sample, or one for all): states [2, B, n, d] and what they predict, [B or 1, n]."""
        base, size = self.cache.prompt_length, self.grid.size
        # A sample with nothing to feed repeats its first token: writing the same entry again changes nothing.
        plans = [self.grid.feed_plan(sample or [0]) for sample in positions]
        longest = max(len(index) for index, _, _ in plans)
        rows = []
        for index, token, predicts in plans:
            row = [
                [base + i for i in index],
                [size if t < 0 else t for t in token],
                [size + 1 if p < 0 else p for p in predicts],
            ]
            rows.append([column + column[-1:] * (longest - len(index)) for column in row])
        slot, token, predicts = upload(np.array(rows), self.device).unbind(1)
        width = 1 + max(max(index) for index, _, _ in rows)
        if len(rows) == 1:
            slots = Slots(slot[0], width, contiguous=rows[0][0][-1] - rows[0][0][0] == longest - 1)
            tokens = self.tokens[:, token[0]]
        else:
            slots = Slots(slot.repeat(2, 1), width)
            tokens = self.tokens.gather(1, token)
        self.fed.scatter_(1, token.expand_as(tokens), tokens)
        embedded = self.backbone.embed(tokens).repeat(2, 1, 1)
        hidden = self.backbone(embedded, slots, self.cache, layers)
        return hidden.view(2, *tokens.shape, -1), predicts

    def _judge(self, items: Items, fresh: bool = False) -> Verdict:
        at = (items.sample, items.position)
        host = (items.host_sample, items.host_position)
        p = guided_probabilities(self.backbone.readout(self.hidden[:, *at]), self.sampling)
        drafted = self._drafted[host]
        u = None if self.decoder.common_noise else self._draw(items)
        if u is None:
            token = race(p, self._noise(items))
            verdict = Verdict(token, (token == self.tokens[at]) & upload(drafted, self.device))
        elif drafted.any():
            draft = self.tokens[at].clamp_min(0)  # -1 where there is none
            q = self.q[items.sample, items.position % self.window]
            rule = self.decoder.rule
            accept, weight = rule(p, q, draft)
            if isinstance(rule, JointRule):
                accept = rule.together(accept, p, q, draft, self._follows(items, drafted), u[:, Purpose.ACCEPT])
            if not drafted.all():
                has_draft = upload(drafted, self.device)
                accept = torch.where(has_draft, accept, 0)
                weight = torch.where(has_draft[:, None], weight, p)
            verdict = accept_and_redraw(draft, accept, weight, u[:, Purpose.ACCEPT], u[:, Purpose.REDRAW])
            if fresh:
                late = after_first(~verdict.accepted, items.host_sample)
                token = torch.where(late, sample(p, u[:, Purpose.REDRAW]), verdict.token)
                verdict = Verdict(token, verdict.accepted & ~late)
        else:
            token = sample(p, u[:, Purpose.REDRAW])
            verdict = Verdict(token, torch.zeros_like(token, dtype=torch.bool))
        # Whatever stands now was accepted or re-drawn under p, so p is what it must be judged against next.
        self._put(items, verdict.token, p)
        self._visits[host] += 1
        self._round[host] += 1
        self._events.append((len(self._trace.fed) - 1, host, self._round[host], drafted, self._offset[host], verdict))
        return verdict

    def _revise(self, judged: Items) -> None:
        """Judged positions whose left neighbour now stands otherwise than it was fed: brings their drafts to where the
        drafter expects p to go, re-drawing as few as possible. What such a draft becomes depends on what stands before
        it only, so an exact schedule stays exact."""
        b, left = judged.sample, judged.position - 1
        stale = (judged.position % self.grid.width > 0) & (self.tokens[b, left] != self.fed[b, left])
        chosen = stale.nonzero().squeeze(1)
        if not len(chosen):
            return
        host = chosen.cpu().numpy()
        items = Items(judged.host_sample[host], judged.host_position[host], b[chosen], judged.position[chosen], [])
        q = self.decoder.drafter.revise(self, items)
        if self.decoder.common_noise:
            token = race(q, self._noise(items))
        else:
            draft, u = self.tokens[items.sample, items.position], self._draw(items)
            accept, weight = Strict()(q, self.q[items.sample, items.position % self.window], draft)
            u_accept, u_redraw = u[:, Purpose.REVISE_ACCEPT], u[:, Purpose.REVISE_REDRAW]
            token = accept_and_redraw(draft, accept, weight, u_accept, u_redraw).token
        self._put(items, token, q)

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _follows(self, items: Items, drafted: np.ndarray) -> Tensor:
        """[N] bool: whether an item and the one before it are drafts side by side in a row."""
        beside = (np.diff(items.host_sample) == 0) & (np.diff(items.host_position) == 1)
        beside &= drafted[1:] & drafted[:-1] & (items.host_position[1:] % self.grid.width > 0)
        return upload(np.concatenate([[False], beside]), self.device)

    def _items(self, positions: list[Sequence[int]]) -> Items:
        """One list of positions a sample, or a single one for all."""
        if len(positions) == 1:
            n = len(positions[0])
            host_position = np.tile(np.asarray(positions[0], dtype=np.int64), self.batch)
            host_sample = np.repeat(np.arange(self.batch), n)
            bounds = [0, n]
        else:
            host_position = np.concatenate([np.asarray(sample, dtype=np.int64) for sample in positions])
            host_sample = np.repeat(np.arange(self.batch), [len(sample) for sample in positions])
            bounds = [0, *np.cumsum([len(sample) for sample in positions]).tolist()]
        sample, position = upload(np.stack([host_sample, host_position]), self.device)
        return Items(host_sample, host_position, sample, position, bounds)

    def _put(self, items: Items, token: Tensor, q: Tensor) -> None:
        """Tokens [N], drawn from q [N, V], stand from now on; what is judged next is they, against it."""
        self.tokens[items.sample, items.position] = token
        if self.window:
            self.q[items.sample, items.position % self.window] = q
        self._drafted[items.host_sample, items.host_position] = True

    def _noise(self, items: Items) -> Tensor:
        """Uniform numbers [N, V] for races, the same at every visit."""
        token = torch.arange(self.backbone.vocabulary, device=self.device)
        return uniform(self.seeds[items.sample, None], items.position[:, None], 0, Purpose.RACE, token)

    def _draw(self, items: Items) -> Tensor:
        """Uniform numbers [N, len(Purpose)], a column a purpose, for the items' present visit."""
        visit = self._visits[items.host_sample, items.host_position]
        while visit.size and len(self._draws) <= visit.max():
            position = torch.arange(self.grid.size, device=self.device)[:, None]
            purpose = torch.arange(len(Purpose), device=self.device)
            fresh = uniform(self.seeds[:, None, None], position, len(self._draws), purpose)
            self._draws = torch.cat([self._draws.view(-1, *fresh.shape), fresh[None]])
        return self._draws[upload(visit, self.device), items.sample, items.position]

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        if not self._timed:
            yield
            return
        start = self._now()
        yield
        self._trace.seconds[part] = self._trace.seconds.get(part, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def finish_trace(self) -> Trace:
        trace = self._trace
        passes, hosts, rounds, drafted, offsets, verdicts = zip(*self._events, strict=True)
        counts = [len(r) for r in rounds]
        trace.pass_index = torch.tensor(np.repeat(passes, counts))
        trace.sample = torch.from_numpy(np.concatenate([sample for sample, _ in hosts]))
        trace.position = torch.from_numpy(np.concatenate([position for _, position in hosts]))
        trace.round = torch.from_numpy(np.concatenate(rounds))
        trace.drafted = torch.from_numpy(np.concatenate(drafted))
        trace.offset = torch.from_numpy(np.concatenate(offsets))
        trace.token = torch.cat([verdict.token for verdict in verdicts]).cpu()
        trace.accepted = torch.cat([verdict.accepted for verdict in verdicts]).cpu()
        return trace
