"""Counter-based uniform draws: each number is a pure function of what it is for.

A draw is keyed by (sample seed, position, visit, purpose), so it depends neither on the batch a sample
is in, nor on the order of decoding, nor on the device or the world size. The generator is the
finaliser of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) applied as a chain over the key.
"""

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw decides; part of its key."""

    DRAFT = 0
    ACCEPT = 1
    REDRAW = 2
    REVISE_ACCEPT = 3
    REVISE_REDRAW = 4
    RACE = 5


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MULTIPLY_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLY_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, *key: Tensor | int) -> Tensor:
    """Uniform numbers in (0, 1), float64, in the broadcast shape of ``seed`` and the ``key`` parts.

    ``seed`` and tensor key parts are int64. The result is a multiple of 2**-33 and never 0 or 1, so that
    ``u < 1`` always holds and an inverse-CDF look-up stays inside the distribution.
    """
    state = _mix(seed + _GOLDEN)
    for part in key:
        state = _mix((state ^ part) + _GOLDEN)
    return (_shift_right(state, 32).double() + 0.5) * 2.0**-32


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` in a run seeded with ``seed``: a non-negative 63-bit integer."""
    state = _mix(_mix(torch.tensor(seed) + _GOLDEN) ^ torch.tensor(index))
    return int(_shift_right(_mix(state + _GOLDEN), 1))
