"""A smaller backbone drafts, as in speculative sampling (arXiv 2211.17192; 2302.01318)."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.decoding.parts import NextTokenDrafter
from ssd_train.decoding.state import Items, State
from ssd_train.distributions import guided_probabilities

_loaded: WeakValueDictionary[str, Backbone] = WeakValueDictionary()
"""By how they were loaded, so that variations of a decoder share one."""


class DraftModel(NextTokenDrafter):
    """One token a step from a whole model of its own: another backbone with the same image tokens on the same grid.

    It reads the same prompts, both CFG streams, and keeps a KV cache of its own; its guided distribution is q. Entries
    whose token has been re-drawn since are fed again, which is all that a rejection takes.
    """

    def __init__(self, backbone: Callable[..., Backbone]):
        """``backbone`` loads the draft model when it is called with ``name`` and ``device``."""
        self.load = backbone
        self.backbone: Backbone | None = None
        self._ids: dict[int, int] | None = None
        # By decoding: the draft model's own state of it, and the tokens [B, L] that its KV cache holds, -1 for none.
        self._states: WeakKeyDictionary = WeakKeyDictionary()

    def bind(self, backbone, heads) -> "DraftModel":
        key = f"{self.load!r} on {backbone.device}"
        mine = _loaded.get(key)
        if mine is None:
            mine = _loaded[key] = self.load(name="the draft model", device=str(backbone.device))
        for what in "grid", "vocabulary":
            found, expected = getattr(mine, what), getattr(backbone, what)
            if found != expected:
                raise ValueError(
                    f"the draft model's {what} is {found}, but {backbone.name}'s is {expected}; expected the same "
                    "image tokens on the same grid; name another checkpoint as the decoder's drafter.backbone"
                )
        self.backbone, self._ids = mine, prompt_ids(backbone, mine)
        return self

    def propose(self, state, items, source, offset: Sequence[tuple[int, int]]) -> Tensor:
        if state not in self._states:
            self._states[state] = self._begin(state)
        mine, fed = self._states[state]
        mine.tokens = state.tokens
        unchanged = (fed == state.tokens[:, :-1]).long().cumprod(1).sum(1).tolist()
        runs = [
            range(min(unchanged[b], position), position + 1)
            for b, position in zip(source.host_sample.tolist(), source.host_position.tolist(), strict=True)
        ]
        lengths = [len(run) for run in runs]
        host = np.stack([np.repeat(source.host_sample, lengths), np.concatenate(runs)])
        at = torch.from_numpy(host).to(state.device)
        hidden = mine.last_states(Items(*host, *at, [0, len(host[0])]))
        fed[at[0], at[1]] = state.tokens[at[0], at[1]]
        last = np.cumsum(lengths) - 1
        return guided_probabilities(self.backbone.readout(hidden[:, last]), state.sampling).to(state.q.dtype)

    def _begin(self, state: State) -> tuple[State, Tensor]:
        prompts = state.prompts
        if self._ids is not None:
            there, inverse = prompts.ids.unique(return_inverse=True)
            missing = sorted(set(there.tolist()) - self._ids.keys())
            if missing:
                raise ValueError(f"the draft model's tokenizer lacks what the prompts' ids {missing} stand for")
            prompts = PromptBatch(torch.tensor([self._ids[i] for i in there.tolist()])[inverse], prompts.attend)
        mine = State(self.backbone, prompts, state.seeds.tolist(), state.sampling)
        self.backbone.prefill(prompts, mine.cache)
        return mine, torch.full_like(state.tokens[:, :-1], -1)


def prompt_ids(backbone: Backbone, draft: Backbone) -> dict[int, int] | None:
    """From the backbone's text ids to the draft model's of the same names: one family's sizes may number their special
    tokens differently. None if all are the same, or one of the two has no tokenizer."""
    tokenizers = getattr(backbone, "tokenizer", None), getattr(draft, "tokenizer", None)
    if None in tokenizers:
        return None
    theirs, mine = (tokenizer.get_vocab() for tokenizer in tokenizers)
    return None if theirs == mine else {i: mine[token] for token, i in theirs.items() if token in mine}
