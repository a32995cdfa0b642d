"""SJD-PV's phrase rule (arXiv 2603.06666)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ssd_train.decoding import phrases
from ssd_train.decoding.parts import JointRule, Rule


class JointPhrases(JointRule):
    """A run of drafts that matches a phrase is accepted as one with min(1, exp(sum(log p - log q))), and where that
    fails, as everywhere else, judged token by token by ``rule``. In a match a draft t may stand for any token v with
    |p(v) - p(t)| <= ``tau``. Published: tau 0.01.

    Not published, so settled here: matches are made from left to right without overlaps, of several phrases the longest
    (of at most ``longest`` tokens). Where p is below tau everywhere, every phrase matches. ``library`` is the file that
    the phrases stage leaves, or the phrases themselves.
    """

    def __init__(
        self,
        rule: Rule,
        library: str | Path | Sequence[Sequence[int]],
        tau: float = 0.01,
        longest: int | None = None,
    ):
        if isinstance(rule, JointRule):
            raise ValueError(f"rule is {type(rule).__name__}; expected one that judges token by token")
        if not 0 <= tau <= 1:
            raise ValueError(f"tau is {tau}; expected a difference of probabilities, between 0 and 1")
        if longest is not None and longest < 2:
            raise ValueError(f"longest is {longest}; expected at least 2 tokens, or null for no limit")
        self.rule, self.source, self.tau, self.longest = rule, library, tau, longest
        self.table: phrases.Table | None = None

    def bind(self, backbone) -> "JointPhrases":
        """Raises PhrasesError if there is no library, or it is of another backbone's tokens."""
        self.rule = self.rule.bind(backbone)
        runs = self.source
        if isinstance(runs, str | Path):
            library = phrases.load(Path(runs))
            for key in "fingerprint", "vocabulary":
                if getattr(library, key) != getattr(backbone, key):
                    raise phrases.PhrasesError(
                        f"the phrases in {runs} were learned from tokens of {key} {getattr(library, key)} (backbone "
                        f"{library.backbone}), but {backbone.name} has {getattr(backbone, key)}; run "
                        "stages=[cache,phrases] for it"
                    )
            runs = library.phrases
        self.table = phrases.table([run for run in runs if len(run) <= (self.longest or len(run))], backbone.device)
        return self

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        return self.rule(p, q, draft)

    def together(self, accept: Tensor, p: Tensor, q: Tensor, draft: Tensor, follows: Tensor, u: Tensor) -> Tensor:
        at = draft[:, None]
        p_draft = p.gather(1, at)
        length = phrases.match((p - p_draft).abs() <= self.tau, follows, self.table)
        first = phrases.first_of_run(length)
        p_draft, q_draft = p_draft.squeeze(1).double(), q.gather(1, at).squeeze(1).double()
        # A q of 0 counts as 1e-308, which accepts, but cannot cancel the -inf of a p of 0.
        ratio = p_draft.log() - q_draft.clamp_min(torch.finfo(torch.float64).tiny).log()
        joint = torch.zeros_like(ratio).index_add_(0, first, ratio).clamp_max(0).exp()
        joint = torch.where(length > 1, joint, 0)[first]
        # A run shares its first item's number. In a refused run that one is uniform above ``joint``, so the first item
        # has its own probability of acceptance left if its threshold lies as far up what remains.
        leads = first == torch.arange(len(first), device=first.device)
        alone = accept.clamp_max(1)
        return torch.where(u[first] < joint, 1, torch.where(leads, joint + (1 - joint) * alone, alone))
