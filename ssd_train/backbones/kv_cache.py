"""A KV cache that writes by slot, for block decoding with repairs in place."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Where one pass writes: ``index`` is [n] (shared by all rows) or [R, n] int64; ``width`` is one more than
    the largest slot, known to the host, so that attention reads no further and nothing waits for a device;
    ``contiguous`` says that the index is shared and a run of n consecutive slots."""

    index: Tensor
    width: int
    contiguous: bool = False

    @classmethod
    def span(cls, start: int, stop: int, device: torch.device | str = "cpu") -> "Slots":
        return cls(torch.arange(start, stop, device=device), stop, contiguous=True)


class KVCache:
    """Keys and values [R, heads, slots, head_dim] per layer, passed to transformers as ``past_key_values``.

    Writing a slot again replaces its entry, which is how a repaired token is re-fed. A query at slot s attends
    to the slots <= s that have been written and not rolled back; left padding never is. R rows are both CFG
    streams of a batch.
    """

    def __init__(self, padding: Tensor, prompt_length: int, slots: int, layers: int):
        """``padding`` [R] int64: slots of left padding in each row's prompt."""
        self.padding = padding
        self.slots = slots
        device = padding.device
        self._slot = torch.arange(slots, device=device)
        self._written = torch.zeros(padding.shape[0], slots, dtype=torch.bool, device=device)
        self._padded = bool(padding.any())
        self._contiguous = 0  # slots [0, contiguous) are written in every row
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._target: Slots | None = None
        self.prompt_length = prompt_length

    def begin(self, slots: Slots) -> Tensor:
        """Announce a pass over ``slots``; returns its attention mask, bool [R or 1, 1, n, width] (True = attend)."""
        index, width = slots.index, slots.width
        if width > self.slots:
            raise ValueError(f"the pass writes up to slot {width}, but the KV cache was made for {self.slots} slots")
        self._target = slots
        if index.ndim == 1:
            self._written.index_fill_(1, index, True)
        else:
            self._written.scatter_(1, index, True)
        n = index.shape[-1]
        if slots.contiguous and width - n <= self._contiguous:
            self._contiguous = max(self._contiguous, width)
            if not self._padded:
                return (self._slot[:width] <= index[:, None])[None, None]
        causal = self._slot[:width] <= index[..., None]  # [n, width] or [R, n, width]
        visible = self._written[:, :width] & (self._slot[:width] >= self.padding[:, None])
        # A padding slot sees itself: a query that sees nothing would be NaN, and so would 0 * NaN for all others.
        itself = self._slot[:width] == index[..., None]
        return (causal & visible[:, None] | itself)[:, None]

    def positions(self) -> Tensor:
        """Position ids [R, n] of the announced pass: slots counted from each row's first real token."""
        return (self._target.index - self.padding[:, None]).clamp_min(0)

    def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """transformers' hook: store key and value [R, heads, n, head_dim], return all up to ``width``."""
        index, width = self._target.index, self._target.width
        if self._layers[layer] is None:
            rows, heads, _, head_dim = key.shape
            self._layers[layer] = tuple(key.new_zeros(rows, heads, self.slots, head_dim) for _ in range(2))
        keys, values = self._layers[layer]
        if index.ndim == 1:
            keys.index_copy_(2, index, key)
            values.index_copy_(2, index, value)
        else:
            where = index[:, None, :, None].expand_as(key)
            keys.scatter_(2, where, key)
            values.scatter_(2, where, value)
        return keys[:, :, :width], values[:, :, :width]

    def roll_back(self, length: int) -> None:
        """Forget every slot from ``length`` on."""
        self._written[:, length:] = False
        self._contiguous = min(self._contiguous, length)

    def get_seq_length(self, layer: int = 0) -> int:
        """transformers' hook; the number of slots written in every row, without gaps."""
        return self._contiguous
