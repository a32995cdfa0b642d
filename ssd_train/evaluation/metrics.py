"""From traces, tokens and images to figures. B samples, h x w grid, L = h * w, V image vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.decoding.trace import Trace
from ssd_train.distributions import Sampling, guide, probabilities
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Direction, name

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class Tally:
    """How many drafts were judged and how many of them accepted."""

    accepted: int = 0
    judged: int = 0

    @property
    def rate(self) -> float:
        """accepted / judged, NaN if nothing was judged."""
        return self.accepted / self.judged if self.judged else math.nan

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.accepted + other.accepted, self.judged + other.judged)


@dataclass(frozen=True)
class Acceptance:
    """How drafts fared, as counts, so that the acceptances of separate traces can be added.

    ``total`` counts every judgement of a drafted item, ``rounds`` the same by round: from round 2 on what is
    judged is the token that the round before left. ``offsets``, by (rows, columns), and ``places``, [2, h, w]
    int64 (accepted, judged), count each draft's first judgement only, which shows the quality of the drafter.
    """

    total: Tally
    rounds: dict[int, Tally]
    offsets: dict[tuple[int, int], Tally]
    places: Tensor

    @property
    def rate(self) -> float:
        return self.total.rate

    @property
    def by_round(self) -> dict[int, float]:
        return {key: tally.rate for key, tally in self.rounds.items()}

    @property
    def by_offset(self) -> dict[str, float]:
        """By head name, "horizontal_1"."""
        return {_head(*pair): tally.rate for pair, tally in self.offsets.items()}

    @property
    def map(self) -> Tensor:
        """[h, w] float64, NaN where nothing was ever drafted."""
        return self.places[0].double() / self.places[1]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.total + other.total,
            _merge(self.rounds, other.rounds),
            _merge(self.offsets, other.offsets),
            self.places + other.places,
        )

    def to_dict(self) -> dict:
        """For JSON: rates, None where nothing was judged, and the counts [accepted, judged] behind them."""
        return {
            "rate": _or_none(self.rate),
            "by_round": {str(r): rate for r, rate in self.by_round.items()},
            "by_offset": self.by_offset,
            "map": [[_or_none(rate) for rate in row] for row in self.map.tolist()],
            "counts": {
                "total": _counts(self.total),
                "by_round": {str(r): _counts(tally) for r, tally in self.rounds.items()},
                "by_offset": {_head(*pair): _counts(tally) for pair, tally in self.offsets.items()},
                "map": self.places.tolist(),
            },
        }


def acceptance(traces: Sequence[Trace], grid: Grid) -> Acceptance:
    """Counts over all drafted, judged items of the traces."""
    drafted, accepted, rounds, position, offset = (
        torch.cat([getattr(trace, field) for trace in traces])
        for field in ("drafted", "accepted", "round", "position", "offset")
    )
    accepted, rounds, position, offset = (x[drafted] for x in (accepted, rounds, position, offset))
    first = rounds == 1
    return Acceptance(
        total=_tally(accepted),
        rounds={r: _tally(accepted[rounds == r]) for r in rounds.unique().tolist()},
        offsets={
            tuple(pair.tolist()): _tally(accepted[first & (offset == pair).all(1)])
            for pair in offset[first].unique(dim=0)
        },
        places=torch.stack(
            [position[chosen].bincount(minlength=grid.size) for chosen in (first & accepted, first)]
        ).view(2, grid.height, grid.width),
    )


def mean_passes(traces: Sequence[Trace]) -> float:
    """Backbone passes an image, the prompt's included."""
    passes = [count for trace in traces for count in trace.passes]
    return sum(passes) / len(passes)


def draft_fraction(traces: Sequence[Trace]) -> float:
    """The share of decoding time that drafting took, from timed traces."""
    total = sum(sum(trace.seconds.values()) for trace in traces)
    if not total:
        raise ValueError("these traces hold no times; decode with timed=True")
    return sum(trace.seconds.get("draft", 0.0) for trace in traces) / total


@torch.inference_mode()
def negative_log_likelihood(
    backbone: Backbone, prompts: PromptBatch, tokens: Tensor, sampling: Sampling, elements: int = 2**24
) -> Tensor:
    """Mean nats a token [B] (float64) of the finished tokens [B, h, w] under p, the distribution that AR
    samples from (guided, with temperature, top-k and top-p), by teacher forcing.

    A token that p excludes, which lossy decoders can leave behind, is charged its cost without top-k and
    top-p (under greedy sampling: at temperature 1). That is finite, and dearer than any token p allows.
    At most about ``elements`` logits exist at a time.
    """
    flat = tokens.flatten(1).to(backbone.device)
    hidden = backbone.teacher_force(prompts.guided(sampling.guidance), flat)
    batch, size = flat.shape
    chunk = max(1, elements // (2 * batch * backbone.vocabulary))
    nats = torch.zeros(batch, dtype=torch.float64, device=backbone.device)
    for start in range(0, size, chunk):
        part = slice(start, start + chunk)
        logits = guide(backbone.readout(hidden[:, :, part]), sampling.guidance)
        chosen = flat[:, part, None]
        p = probabilities(logits, sampling).gather(-1, chosen)
        untruncated = (logits / (sampling.temperature or 1.0)).log_softmax(-1).gather(-1, chosen)
        nats -= torch.where(p > 0, p.log(), untruncated).double().sum((1, 2))
    return nats / size


def texture(images: Tensor) -> dict[str, Tensor]:
    """How much happens in each of the pictures [B, H, W, 3] uint8: statistics of the luma (0 to 255), float64 [B].

    ``laplacian_variance`` is the variance of the discrete Laplacian, the energy of the finest detail;
    ``luma_deviation`` the standard deviation, contrast at any scale. Washed-out pictures, whose NLL can be
    *below* AR's, show as a drop against AR on the same prompts; speckle shows as a rise of the first.
    """
    luma = images.double() @ images.new_tensor(LUMA, dtype=torch.float64)
    kernel = luma.new_tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0]])[None, None]
    laplacian = F.conv2d(luma[:, None], kernel).flatten(1)
    return {
        "laplacian_variance": laplacian.var(1, correction=0),
        "luma_deviation": luma.flatten(1).std(1, correction=0),
    }


def energy_distance(a: Tensor, b: Tensor, permutations: int = 999, seed: int = 0) -> tuple[float, float]:
    """Between features [N, D] of two decoders' pictures of the same N prompts, and the p of a permutation test: how
    often it is at least as large if each prompt's two pictures change sides at random.

    The energy coefficient (Szekely & Rizzo, "Energy statistics", 2013) of each feature's ranks among both sets, so that
    neither units nor outliers rule it: 0 for the same pictures, at most 1. Above 0 for two samples of one distribution,
    the more the fewer they are. Raises ValueError unless there are as many of both, at least two.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{len(a)} and {len(b)} images; expected a pair a prompt, and two at least")
    columns = torch.cat([a, b]).double().T.contiguous()
    ordered = columns.sort(1).values
    ranks = (torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)).T.double() / 2
    apart = torch.cdist(ranks, ranks)
    sign = torch.randint(2, (permutations, len(a)), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    sign = torch.cat([torch.ones(1, len(a)), sign]).double()  # the first: as they are
    weight = torch.cat([sign, -sign], 1) / len(a)
    energy = -(weight @ apart * weight).sum(1)  # 2 E|a - b| - E|a - a'| - E|b - b'|
    between = apart[: len(a), len(a) :].mean()
    p = (energy >= energy[0] * (1 - 1e-9)).double().mean()
    return float(energy[0].clamp_min(0) / (2 * between).clamp_min(1e-12)), float(p)


def code_entropy(tokens: Tensor, vocabulary: int) -> float:
    """Entropy in nats of the histogram of all tokens [...], at most log V. A decoder that falls back on a few
    likely codes shows as a drop. Biased low for few tokens: compare equal numbers of images only."""
    share = tokens.flatten().bincount(minlength=vocabulary).double() / tokens.numel()
    return float(torch.special.entr(share).sum())


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float, float]:
    """(value, low, high): a proportion and its Wilson score interval, 95 % at z = 1.96."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}; expected 0 <= successes <= n and n >= 1")
    value = successes / n
    centre = (value + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(value * (1 - value) / n + z * z / (4 * n * n))
    # At 0 or n successes an end of the interval is the value itself, but for rounding.
    return value, max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half))


def _tally(accepted: Tensor) -> Tally:
    return Tally(int(accepted.sum()), accepted.numel())


def _merge(a: dict, b: dict) -> dict:
    return {key: a.get(key, Tally()) + b.get(key, Tally()) for key in sorted({*a, *b})}


def _head(rows: int, columns: int) -> str:
    if rows == 0 and columns > 0:
        return name(Direction.HORIZONTAL, columns)
    if columns == 0 and rows > 0:
        return name(Direction.VERTICAL, rows)
    return f"rows_{rows}_columns_{columns}"


def _or_none(x: float) -> float | None:
    return None if math.isnan(x) else x


def _counts(tally: Tally) -> list[int]:
    return [tally.accepted, tally.judged]
