"""The block-decoding engine: runs any drafter x rule x schedule on any backbone.

B samples, L image tokens, V vocabulary, d width, N items (see state.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.decoding.parts import (
    CorrectingDrafter,
    Drafter,
    JointRule,
    Outcome,
    Rule,
    Schedule,
    Script,
    Step,
    judges_neighbours,
    rehearse,
)
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.state import Items, State, upload
from ssd_train.decoding.trace import Trace
from ssd_train.distributions import Sampling, Verdict, accept_and_redraw, guided_probabilities, race, sample
from ssd_train.draws import Purpose


@dataclass(frozen=True)
class Decoded:
    """tokens [B, h, w] int64; hidden [S, B, L, d], the last state seen for each position (exact for AR); trace."""

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
        window = 0 if self.common_noise else self.schedule.window(backbone.grid)
        sweeps = self.drafter.sweeps if isinstance(self.drafter, CorrectingDrafter) else 0
        state = State(backbone, prompts, seeds, sampling, window, timed, sweeps)
        batch = len(seeds)
        with state.clock("prompt"):
            state.prefill()
        self._judge(state, [[0]] * batch)
        # Without feedback all samples do the same at the same time, and one script serves them all.
        scripts = [self.schedule.script(backbone.grid) for _ in range(batch if self.schedule.adaptive else 1)]
        outcomes: list[Outcome | None] = [None] * batch
        while True:
            steps = [_advance(script, outcome) for script, outcome in zip(scripts, outcomes, strict=False)]
            if all(step is None for step in steps):
                break
            steps = [step or Step() for step in steps]
            outcomes = self._run(state, steps * (batch // len(steps)))
        return Decoded(
            state.tokens[:, :-1].view(batch, backbone.grid.height, backbone.grid.width),
            state.hidden[:, :, : backbone.grid.size],
            state.finish_trace(),
        )

    # -- one step, of each sample -------------------------------------------------------------------------------

    def _run(self, state: State, steps: Sequence[Step]) -> list[Outcome]:
        if any(step.draft for step in steps):
            with state.clock("draft"):
                self._draft(state, [step.draft for step in steps])
        if any(step.feed for step in steps):
            with state.clock("pass"):
                state.feed([step.feed for step in steps])
        state.forget([step.anew for step in steps])
        accepted, bounds = None, [0] * (len(steps) + 1)
        if any(step.judge for step in steps):
            with state.clock("judge"):
                items, accepted = self._judge(state, [step.judge for step in steps], any(s.fresh for s in steps))
            bounds = items.bounds
            if isinstance(self.drafter, CorrectingDrafter) and self.drafter.sweeps:
                with state.clock("draft"):
                    self._revise(state, items)
        read = cache(lambda: [] if accepted is None else accepted.tolist())
        return [Outcome(read, bounds[b], bounds[b + 1]) for b in range(len(steps))]

    def _draft(self, state: State, drafts: Sequence[Sequence[tuple[int, int]]]) -> None:
        if not self.drafter.sequential:
            return self._draft_at_once(state, drafts)
        for i in range(max(map(len, drafts))):
            self._draft_at_once(state, [sample[i : i + 1] for sample in drafts])

    def _draft_at_once(self, state: State, drafts: Sequence[Sequence[tuple[int, int]]]) -> None:
        items = state.items([[position for position, _ in sample] for sample in drafts])
        source = state.items([[source for _, source in sample] for sample in drafts])
        pairs = zip(source.host_position.tolist(), items.host_position.tolist(), strict=True)
        offset = [state.grid.offset(*pair) for pair in pairs]
        q = state.usable(self.drafter.propose(state, items, source, offset))
        if self.common_noise:
            token = race(q, state.noise(items.sample, items.position))
        else:
            token = sample(q, state.draw(items)[:, Purpose.DRAFT])
        state.put(items, token, q)
        state.enter(items, offset)

    def _judge(self, state: State, positions: Sequence[Sequence[int]], fresh: bool = False) -> tuple[Items, Tensor]:
        """The judged items, and whether each one's draft was accepted, [N] bool."""
        items = state.items(positions)
        at = (items.sample, items.position)
        p = guided_probabilities(state.backbone.readout(state.hidden[:, *at]), state.sampling)
        drafted = state.drafted(items)
        u = None if self.common_noise else state.draw(items)
        if u is None:
            token = race(p, state.noise(items.sample, items.position))
            verdict = Verdict(token, (token == state.tokens[at]) & upload(drafted, state.device))
        elif drafted.any():
            draft = state.tokens[at].clamp_min(0)  # -1 where there is none
            q = state.q[items.sample, items.position % state.window]
            accept, weight = self.rule(p, q, draft)
            if isinstance(self.rule, JointRule):
                follows = state.follows(items, drafted)
                accept = self.rule.together(accept, p, q, draft, follows, u[:, Purpose.ACCEPT])
            if not drafted.all():
                has_draft = upload(drafted, state.device)
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
        state.settle(items, drafted, verdict, p)
        return items, verdict.accepted

    def _revise(self, state: State, judged: Items) -> None:
        """Sweeps over the judged positions: where neighbours stand otherwise than a position last saw them, its draft
        is brought to the distribution that the drafter then expects, from the backbone's own state, re-drawing as few
        as possible. A revised draft is a function of what stands before it and of numbers that nothing else has seen,
        so an exact schedule stays exact whatever the drafter expects. Stops when nothing moves."""
        near, u = self.drafter.context[judged.position], state.draw(judged)
        hidden, left = (state.hidden[:, judged.sample, at] for at in (judged.position, near[:, 0]))
        b, fed = judged.sample[:, None], state.fed[judged.sample[:, None], near]
        corrected, seen = self.drafter.revision(state, judged, hidden, left, fed), fed
        for sweep in range(self.drafter.sweeps):
            now = state.tokens[b, near]
            moved = (now != seen).any(1).nonzero().squeeze(1)
            if not len(moved):
                break
            seen, at = now, (judged.sample[moved], judged.position[moved])
            state.hidden[:, *at] = expected = corrected(moved, now[moved])
            q = state.usable(guided_probabilities(state.backbone.readout(expected), state.sampling))
            if self.common_noise:
                token = race(q, state.noise(*at))
            else:
                draft = state.tokens[at]
                accept, weight = Strict()(q, state.q[at[0], at[1] % state.window], draft)
                mine = u[moved, sweep * len(Purpose) :]
                token = accept_and_redraw(
                    draft, accept, weight, mine[:, Purpose.REVISE_ACCEPT], mine[:, Purpose.REVISE_REDRAW]
                ).token
            state.stand(*at, token, q)


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
