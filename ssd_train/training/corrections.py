"""What a corrector learns from: cached images in which some tokens are re-drawn, and the backbone's states of both.

A window of drafts is a picture some of whose tokens are other draws from p than those that will stand in the end. So is
a cached picture after re-drawing a random share of its tokens; one teacher-forced pass gives the states that the
backbone has for it, and the cache those of the picture as it was: L pairs a pass, without decoding.
S streams, B images, L positions, N pairs, C neighbours, d width.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_train.distributions import Sampling, guided_probabilities, sample
from ssd_train.draws import uniform

SHARE = 0.1, 0.7  # of an image's tokens that are re-drawn: uniform between these


class Corrections(NamedTuple):
    """What a corrector is called with, and the state that it should return."""

    hidden: Tensor  # [S, N, d]
    left: Tensor  # [S, N, d]
    fed: Tensor  # [N, C]
    now: Tensor  # [N, C]
    target: Tensor  # [S, N, d]


def redraw(hidden: Tensor, tokens: Tensor, index: Tensor, key: tuple[int, int], readout: Callable[[Tensor], Tensor],
           sampling: Sampling) -> Tensor:  # fmt: skip
    """Tokens [B, h, w], of each image a random share replaced by other draws from the p that its states
    [S, B, h, w, d] predict. A function of ``key`` and the samples' ``index`` [B]. Without a temperature p is that of
    temperature 1: the likeliest token again would be no other draw."""
    if sampling.temperature == 0:
        sampling = replace(sampling, temperature=1.0)
    size = tokens[0].numel()
    position = torch.arange(size, device=tokens.device)
    seed, low, high = torch.full_like(index, key[0]), *SHARE
    share = low + (high - low) * uniform(seed, index, key[1], size, 0)
    chosen, draw = (
        uniform(seed[:, None], index[:, None], key[1], position, purpose).view_as(tokens) for purpose in (0, 1)
    )
    # Row by row: of 8,100 tokens the distributions over 32,768 do not fit beside a backbone.
    rows = zip(hidden.unbind(2), draw.unbind(1), strict=True)
    others = torch.stack([sample(guided_probabilities(readout(h), sampling), u) for h, u in rows], 1)
    return torch.where(chosen < share[:, None, None], others, tokens)


def corrections(stale: Tensor, fed: Tensor, hidden: Tensor, tokens: Tensor, near: Tensor, most: int) -> Corrections:
    """At most so many positions of images, spread evenly over those that have a neighbour that differs (one, if none
    has). ``stale`` and ``hidden`` [S, B, h, w, d] are the states with the tokens ``fed`` and ``tokens`` [B, h, w];
    ``near`` [L, C] is :func:`ssd_train.heads.corrector.neighbours`."""
    was, now = (F.pad(t.flatten(1), (0, 1), value=-1)[:, near].flatten(0, 1) for t in (fed, tokens))
    changed = (was != now).any(1).nonzero().squeeze(1)
    changed = changed if len(changed) else changed.new_zeros(1)
    count = min(most, len(changed))
    changed = changed[torch.arange(count, device=changed.device) * len(changed) // count]
    stale, hidden = stale.flatten(1, 3), hidden.flatten(1, 3)
    return Corrections(stale[:, changed], stale[:, changed - 1], was[changed], now[changed], hidden[:, changed])
