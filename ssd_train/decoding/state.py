"""The batch being decoded: what stands where, what the backbone has seen, what each draft was drawn from.

B samples, S streams (both of CFG, or the conditional one alone where guidance is 1), L image tokens, V vocabulary, d
width, N items, (sample, position) pairs of a batch laid end to end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.backbones.kv_cache import Slots
from ssd_train.decoding.trace import Trace
from ssd_train.distributions import Sampling, Verdict, sound
from ssd_train.draws import Purpose, uniform


class Items(NamedTuple):
    """(sample, position) pairs, sample after sample; each [N], on the host and on the device."""

    host_sample: np.ndarray
    host_position: np.ndarray
    sample: Tensor
    position: Tensor
    bounds: list[int]  # items of sample b are bounds[b]..bounds[b+1]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing, as a copy from memory that is not pinned would."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def same_for_all(lists: Sequence[Sequence[int]]) -> bool:
    """Whether all samples have the very same list: then it is looked at once."""
    return all(one is lists[0] for one in lists)


class State:
    """``tokens`` [B, L+1] int64 as they stand (-1: none yet; column L is the end-of-line token); ``fed``, the same when
    the backbone last consumed them; ``hidden`` [S, B, L+2, d], the last state for each position (column L is what
    follows the image, L+1 takes the states that predict end-of-line tokens); ``q`` [B, window, V], the distribution
    a standing token was drawn from, by position modulo window.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptBatch,
        seeds: Sequence[int],
        sampling: Sampling,
        window: int = 0,
        timed: bool = False,
        sweeps: int = 0,
    ):
        """``window`` is the longest run of positions that hold drafts at any time; ``sweeps``, how often at most drafts
        are revised after a judgement. ``timed`` fills trace.seconds, which costs device synchronisations."""
        self.backbone, self.grid, self.sampling = backbone, backbone.grid, sampling
        self.prompts = prompts = prompts.guided(sampling.guidance)
        self.streams = prompts.streams
        batch, size, device = len(seeds), self.grid.size, backbone.device
        if prompts.ids.shape[1] != batch:
            raise ValueError(f"{prompts.ids.shape[1]} prompts but {batch} seeds; expected one seed a prompt")
        self.batch, self.device, self.window = batch, device, window
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self.tokens = torch.full((batch, size + 1), -1, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(self.streams, batch, size + 2, backbone.width, dtype=backbone.dtype, device=device)
        self.fed = self.tokens.clone()
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        self.q = torch.zeros(batch, window, backbone.vocabulary if window else 0, dtype=dtype, device=device)
        self.cache = backbone.new_cache(prompts)
        self._drafted = np.zeros((batch, size), dtype=bool)
        self._visits = np.zeros((batch, size), dtype=np.int64)  # judgements so far: part of a draw's key
        self._round = np.zeros((batch, size), dtype=np.int64)
        self._offset = np.zeros((batch, size, 2), dtype=np.int64)
        self._purposes = torch.arange(len(Purpose) * max(1, sweeps), device=device)
        self._draws = self.seeds.new_zeros(0)  # [visits, B, L, purposes]
        self._unsound, self._blind = torch.zeros(2, dtype=torch.int64, device=device)  # draft, target distributions
        self._timed = timed
        self._trace = Trace(passes=[0] * batch)
        self._events: list[tuple] = []

    # -- the backbone's passes ----------------------------------------------------------------------------------

    def prefill(self) -> None:
        """The prompt's pass: the state that predicts position 0."""
        self.hidden[:, :, 0] = self.backbone.prefill(self.prompts, self.cache).view(self.streams, self.batch, -1)
        self._trace.passes = [1] * self.batch
        self._trace.fed.append(self.cache.prompt_length)

    def feed(self, positions: Sequence[Sequence[int]]) -> None:
        """Feeds a list of positions a sample: their tokens' KV cache entries and the states after them are new."""
        for b, sample in enumerate(positions):
            self._trace.passes[b] += bool(sample)
        hidden, predicts = self._pass(positions)
        self._trace.fed.append(predicts.shape[-1])
        if len(predicts) == 1:
            self.hidden[:, :, predicts[0]] = hidden
        else:
            self.hidden[:, torch.arange(self.batch, device=self.device)[:, None], predicts] = hidden

    def last_states(self, items: Items, layers: int | None = None) -> Tensor:
        """Feeds the items through the backbone's first ``layers`` (None: all): of each, the state [S, N, d] that
        follows its sample's last one, by these layers. Their KV cache entries are the ones that a full pass would
        write."""
        positions: list[list[int]] = [[] for _ in range(self.batch)]
        for b, position in zip(items.host_sample.tolist(), items.host_position.tolist(), strict=True):
            positions[b].append(position)
        hidden, _ = self._pass(positions, layers)
        return hidden[:, items.sample, -1]

    def _pass(self, positions: Sequence[Sequence[int]], layers: int | None = None) -> tuple[Tensor, Tensor]:
        """States [S, B, n, d] after the positions, and the positions that they predict: [B, n], or [1, n] if all
        samples feed the same."""
        base, size = self.cache.prompt_length, self.grid.size
        # A sample with nothing to feed repeats its first token: writing the same entry again changes nothing.
        positions = positions[:1] if same_for_all(positions) else positions
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
            slots = Slots(slot.repeat(self.streams, 1), width)
            tokens = self.tokens.gather(1, token)
        self.fed.scatter_(1, token.expand_as(tokens), tokens)
        embedded = self.backbone.embed(tokens).repeat(self.streams, 1, 1)
        hidden = self.backbone(embedded, slots, self.cache, layers)
        return hidden.view(self.streams, *tokens.shape, -1), predicts

    # -- drafts and judgements ----------------------------------------------------------------------------------

    def items(self, positions: Sequence[Sequence[int]]) -> Items:
        """Of a list of positions a sample."""
        lengths = [len(sample) for sample in positions]
        if same_for_all(positions):
            host_position = np.tile(np.asarray(positions[0], dtype=np.int64), self.batch)
        else:
            host_position = np.concatenate([np.asarray(sample, dtype=np.int64) for sample in positions])
        host_sample = np.repeat(np.arange(self.batch), lengths)
        sample, position = upload(np.stack([host_sample, host_position]), self.device)
        return Items(host_sample, host_position, sample, position, [0, *np.cumsum(lengths).tolist()])

    def put(self, items: Items, token: Tensor, q: Tensor) -> None:
        """Tokens [N], drawn from q [N, V], stand from now on; what is judged next is they, against it."""
        self.stand(items.sample, items.position, token, q)
        self._drafted[items.host_sample, items.host_position] = True

    def stand(self, sample: Tensor, position: Tensor, token: Tensor, q: Tensor) -> None:
        """The same where drafts are already."""
        self.tokens[sample, position] = token
        if self.window:
            self.q[sample, position % self.window] = q

    def usable(self, q: Tensor) -> Tensor:
        """Draft distributions [N, V], uniform where NaN or infinite logits left none. Whatever is broken, a draft is
        then a draw from the q that it is judged against, so exact decoders stay exact."""
        good = sound(q)
        self._unsound += (~good).sum()
        return torch.where(good[:, None], q, 1 / q.shape[1])

    def enter(self, items: Items, offset: Sequence[tuple[int, int]]) -> None:
        """Items are new drafts, at these (rows, columns) from their sources."""
        host = items.host_sample, items.host_position
        self._round[host] = 0
        self._offset[host] = offset

    def forget(self, positions: Sequence[Sequence[int]]) -> None:
        """What stands there is no draft any more."""
        for b, sample in enumerate(positions):
            if sample:
                self._drafted[b, list(sample)] = False

    def drafted(self, items: Items) -> np.ndarray:
        """[N] bool: which of them hold drafts."""
        return self._drafted[items.host_sample, items.host_position]

    def settle(self, items: Items, drafted: np.ndarray, verdict: Verdict, p: Tensor) -> None:
        """Takes a judgement down. Whatever stands now was accepted or re-drawn under p [N, V], so p is what it must be
        judged against next."""
        self.put(items, verdict.token, p)
        self._blind += (~sound(p)).sum()
        host = items.host_sample, items.host_position
        self._visits[host] += 1
        self._round[host] += 1
        self._events.append((len(self._trace.fed) - 1, host, self._round[host], drafted, self._offset[host], verdict))

    def follows(self, items: Items, drafted: np.ndarray) -> Tensor:
        """[N] bool: whether an item and the one before it are drafts side by side in a row."""
        beside = (np.diff(items.host_sample) == 0) & (np.diff(items.host_position) == 1)
        beside &= drafted[1:] & drafted[:-1] & (items.host_position[1:] % self.grid.width > 0)
        return upload(np.concatenate([[False], beside]), self.device)

    def noise(self, sample: Tensor, position: Tensor) -> Tensor:
        """Uniform numbers [N, V] for races, the same at every visit."""
        token = torch.arange(self.backbone.vocabulary, device=self.device)
        return uniform(self.seeds[sample, None], position[:, None], 0, Purpose.RACE, token)

    def draw(self, items: Items) -> Tensor:
        """Uniform numbers [N, len(Purpose)] for the items' present visit, a column a purpose; and as many more columns
        for each sweep after the first."""
        visit = self._visits[items.host_sample, items.host_position]
        while visit.size and len(self._draws) <= visit.max():
            position = torch.arange(self.grid.size, device=self.device)[:, None]
            fresh = uniform(self.seeds[:, None, None], position, len(self._draws), self._purposes)
            self._draws = torch.cat([self._draws.view(-1, *fresh.shape), fresh[None]])
        return self._draws[upload(visit, self.device), items.sample, items.position]

    # -- the trace ----------------------------------------------------------------------------------------------

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
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
        """Raises ValueError if the backbone's distributions were none."""
        if self._blind:
            raise ValueError(
                f"{int(self._blind)} target distributions of {self.backbone.name} were NaN or infinite: its states "
                f"overflow in {self.backbone.dtype}; use model.backbone.dtype=float32"
            )
        trace = self._trace
        passes, hosts, rounds, drafted, offsets, verdicts = zip(*self._events, strict=True)
        counts = [len(r) for r in rounds]
        trace.pass_index = torch.tensor(np.repeat(passes, counts))
        trace.sample = torch.from_numpy(np.concatenate([sample for sample, _ in hosts]))
        trace.position = torch.from_numpy(np.concatenate([position for _, position in hosts]))
        trace.round = torch.from_numpy(np.concatenate(rounds))
        trace.drafted = torch.from_numpy(np.concatenate(drafted))
        trace.offset = torch.from_numpy(np.concatenate(offsets))
        trace.unsound = int(self._unsound)
        trace.token = torch.cat([verdict.token for verdict in verdicts]).cpu()
        trace.accepted = torch.cat([verdict.accepted for verdict in verdicts]).cpu()
        return trace
