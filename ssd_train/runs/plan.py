"""How much memory, disk and time a run takes: arithmetic on a backbone that need not be loaded.

B images a batch, R = 2B rows (both CFG streams), S slots of the KV cache, L image tokens, d width, m width of a head's
hidden layer, V image vocabulary. Memory is in bytes; GB are 10^9. What the formulas leave out (scratch space of
kernels, fragmentation, the CUDA context) is why cards are counted at a little less than they have.

Times are what a card cannot go below: all weights of a pass and its KV cache are read once at full bandwidth, or its
multiplications take longer at full speed. Left out are what keeps kernels from that, launching them, drawing tokens and
drafts, loading, and reading shards.
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from hydra.utils import instantiate

from ssd_train.backbones.base import Backbone
from ssd_train.backbones.sketches import UnknownSize, sketch
from ssd_train.cache.shards import CacheDtype, sample_bytes
from ssd_train.config import Config, Space, Stage, corrector_spec
from ssd_train.decoding.parts import Schedule
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Direction, Heads, HeadSpec, name, source_rectangle

log = logging.getLogger(__name__)

GB = 10**9


@dataclass(frozen=True)
class Card:
    """``memory`` in bytes, its ``bandwidth`` in bytes a second; FLOP a second of dense products in 16 bits (tensor
    cores, float32 sums) and in float32 (none: torch's default)."""

    memory: int
    bandwidth: float
    flops_16: float
    flops_32: float

    def flops(self, value: int) -> float:
        """For numbers of ``value`` bytes."""
        return self.flops_16 if value <= 2 else self.flops_32


CARDS = {  # NVIDIA's data sheets of H200 SXM and A100 80GB SXM, and its Ada architecture paper
    "H200": Card(141 * GB, 4.8e12, 989e12, 67e12),
    "A100": Card(80 * GB, 2.039e12, 312e12, 19.5e12),
    "RTX 4090": Card(24 * GB, 1.008e12, 165.2e12, 82.6e12),
}
PROMPT = 128  # slots that a prompt is taken to need; the longest of a batch counts
CHECKED = 4  # samples that the cache stage compares with the class's own logits
ADAM = 4 * 4  # a parameter: float32 weight, gradient and two moments
NLL_ELEMENTS = 2**24  # logits that metrics.negative_log_likelihood makes at a time
SCALED = 32  # samples that the scales of a head's inputs are measured on
PREFETCHED = 3  # batches of a worker: one in the making, and DataLoader's two that wait
TRAINING = 8 / 9  # of the samples: prompts are for training, validation and test 8 : 1 : 1, and no test ones are cached


@dataclass(frozen=True)
class Sizes:
    """What memory depends on in a backbone. ``value`` is the bytes of a number, ``weights`` those of all parameters
    and of the tables that adapters keep beside them, ``output`` the numbers in the layers that training copies,
    ``readout`` those of them that are no table of embeddings, ``decoder`` those of all layers before."""

    grid: Grid
    parameters: int
    weights: int
    output: int
    readout: int
    decoder: int
    width: int
    vocabulary: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    value: int

    @classmethod
    def of(cls, backbone: Backbone) -> "Sizes":
        config = backbone.decoder.config
        tensors = [*backbone.parameters(), *backbone.buffers()]
        output = [*backbone.output.parameters(), *backbone.output.buffers()]
        with backbone.intact() as model:
            parameters = sum(p.numel() for p in model.parameters())
        return cls(
            grid=backbone.grid,
            parameters=parameters,
            weights=sum(t.numel() * t.element_size() for t in tensors),
            output=sum(t.numel() for t in output),
            readout=sum(p.numel() for p in backbone.output.parameters()),
            decoder=sum(p.numel() for p in backbone.decoder.layers.parameters()),
            width=backbone.width,
            vocabulary=backbone.vocabulary,
            layers=config.num_hidden_layers,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            value=backbone.dtype.itemsize,
        )

    @property
    def slots(self) -> int:
        return PROMPT + self.grid.sequence_length

    @property
    def kv_token(self) -> int:
        """Keys and values of one token in one row."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value


# -- heads --------------------------------------------------------------------------------------------------------


def head_spec(cfg: Config, s: Sizes) -> HeadSpec:
    head = cfg.head
    return HeadSpec(
        width=s.width,
        vocabulary=s.vocabulary,
        k_horizontal=head.k_horizontal,
        k_vertical=head.k_vertical,
        hidden=head.hidden or 0,
        space=head.space.name,
        context=head.context,
        corrector=corrector_spec(head),
    )


@cache
def head_parameters(spec: HeadSpec) -> dict[str, int]:
    """By head, with its vocabulary projection if it has one; the corrector's, if there is one."""
    with torch.device("meta"):
        parts = Heads(spec).parts()
    return {part: sum(p.numel() for module in group for p in module.parameters()) for part, group in parts.items()}


# -- sampling and decoding ----------------------------------------------------------------------------------------


def kv_cache(s: Sizes, images: int) -> int:
    return 2 * images * s.slots * s.kv_token


def states(s: Sizes, images: int) -> int:
    """H of both streams."""
    return 2 * images * (s.grid.size + 2) * s.width * s.value


def one_pass(s: Sizes, images: int, tokens: int, width: int) -> int:
    """The most that lives at a time beside the KV cache while ``tokens`` a row are fed that see ``width`` slots: in
    the feed-forward layer, or, where query heads share keys, in the attention, for which transformers repeats them."""
    rows = 2 * images
    feed_forward = rows * tokens * (3 * s.inner + 3 * s.width) * s.value
    attention = rows * tokens * 8 * s.width * s.value
    if s.kv_heads < s.heads and tokens > 1:
        attention += 2 * rows * width * s.heads * s.head_dim * s.value
    mask = rows * tokens * width * (1 + s.value)  # once as bool and once as the kernel wants it
    return max(feed_forward, attention) + mask


def judgement(s: Sizes, images: int, items: int) -> int:
    """Distributions of ``items`` positions an image: logits of both streams, p, what top-k sorts, a cumulative sum
    in float64, a residual."""
    return images * items * s.vocabulary * (2 * (s.value + 4) + 4 * 4 + 8)


def sampling(s: Sizes, images: int) -> int:
    """AR, which feeds an end-of-line token with the token before it."""
    token = one_pass(s, images, 1 + s.grid.end_of_line, s.slots)
    step = max(one_pass(s, images, PROMPT, PROMPT), token, judgement(s, images, 1))
    return kv_cache(s, images) + states(s, images) + step


def drafting(s: Sizes, images: int) -> int:
    """SSD with a row a block, whose draft distributions stay until it is done."""
    row = s.grid.width + 1
    step = max(one_pass(s, images, row, s.slots), judgement(s, images, row))
    return max(sampling(s, images), kv_cache(s, images) + states(s, images) + step) + images * row * s.vocabulary * 4


def teacher_forcing(s: Sizes, images: int, tokens: int | None = None) -> int:
    """A whole image, or ``tokens`` of it, in one pass."""
    tokens = tokens or s.grid.sequence_length
    return kv_cache(s, images) + one_pass(s, images, tokens, PROMPT + tokens)


def cache_stage(s: Sizes, images: int) -> int:
    """Sampling; its estimate's pass over half an image; its check of a few samples' logits."""
    checked = min(CHECKED, images)
    logits = 2 * checked * s.grid.size * s.vocabulary
    check = 2 * states(s, checked) + max(
        teacher_forcing(s, checked),
        logits * s.value + 4 * logits // (2 * checked) * 8,  # the class's, and ours row by row in float64
        judgement(s, checked, s.grid.size),
    )
    return s.weights + max(sampling(s, images), teacher_forcing(s, images, s.grid.sequence_length // 2), check)


def decode_stage(s: Sizes, images: int, heads: int) -> int:
    """``heads`` parameters that draft, in the backbone's dtype; then the likelihood of the finished images."""
    elements = min(NLL_ELEMENTS, 2 * images * s.grid.size * s.vocabulary)
    likelihood = states(s, images) + max(teacher_forcing(s, images), 2 * states(s, images) + 16 * elements)
    return s.weights + heads * s.value + max(drafting(s, images), likelihood)


# -- training -----------------------------------------------------------------------------------------------------


def guides(loss: dict[str, float]) -> bool:
    """Whether a loss needs both streams and the readout."""
    return bool(loss["kl"] or loss["total_variation"])


def activations(s: Sizes, spec: HeadSpec, images: int, loss: dict[str, float], precision: str) -> int:
    """What a training step keeps beside the batch: the chosen streams; one head's graph at a time, with the largest
    step of its backward pass, or in mixed precision the heads' 16-bit copies if these are larger.

    At each position that has a target, a head keeps z (2d, times its context), z's projection and norm, four hidden
    tensors (m), and three d around the loss. KL and total variation need both streams of that, two more d around the
    readout, and tensors of V. Mixed precision halves z and the hidden ones.
    """
    m, d, v = spec.hidden, spec.width, spec.vocabulary
    narrow = 2 if "16" in precision else 4
    guided = spec.space == Space.latent.name and guides(loss)
    streams = 1 + guided
    if spec.space == Space.token.name:
        logits, logits_step = v * narrow, 3 * v * 4
    else:
        logits, logits_step = guided * 3 * v * 4, guided * 4 * v * 4
    step = max(streams * 3 * m * narrow, streams * 3 * d * 4, logits_step)
    kept = at_once = 0
    for direction, offset in spec.offsets():
        rows, columns = source_rectangle(s.grid, direction, offset)
        z = 2 * d * (spec.context if direction is Direction.VERTICAL else 1)
        around = 3 + 2 * guided
        kept = max(kept, rows * columns * (streams * ((z + 4 * m) * narrow + around * d * 4) + logits))
        at_once = max(at_once, rows * columns * step)
    chosen = (not guided) * s.grid.size * d * 4
    copies = 2 * sum(head_parameters(spec).values()) if narrow == 2 else 0  # gone before the backward pass
    return images * (chosen + kept) + max(images * at_once, copies)


def corrected_images(cfg: Config, s: Sizes) -> int:
    """Of a training step's batch, those that the backbone is fed to train the corrector."""
    return min(cfg.train.batch_size, math.ceil(cfg.head.corrector.pairs / s.grid.size))


def correcting(cfg: Config, s: Sizes) -> tuple[int, int]:
    """What a training step keeps for the corrector, and the most that it takes: the pairs (three states in both
    streams, tokens); a pass over re-drawn images with all their states, or the corrector's graph, which holds
    embeddings and their differences (d, times its context), its input (2d), ten of its widths a layer, and what is
    around the loss."""
    c, d, v = cfg.head.corrector, s.width, s.vocabulary
    images, narrow, guided = corrected_images(cfg, s), 2 if "16" in cfg.train.precision else 4, guides(dict(c.loss))
    kept = c.pairs * (2 * 3 * d * 4 + 2 * c.context * 8)
    forced = teacher_forcing(s, images) + images * s.grid.size * 2 * d * (2 * s.value + 2 * 4)
    a_pair = (
        (1 + 3 * c.context) * d * 4 + 2 * ((2 * d + 10 * c.width * c.depth) * narrow + 6 * d * 4) + guided * 8 * v * 4
    )
    return kept, max(forced, c.pairs * a_pair)


def train_stage(cfg: Config, s: Sizes, images: int, world: int = 1, sharded: bool = False) -> int:
    """A GPU's share: the heads with their optimiser (whole, and buckets to exchange gradients, with DDP over
    ``world`` GPUs; a part of it, one head's weights and gradients, and the gradients of the one before, when
    ``sharded`` by FSDP), the backbone, the float32 copy of its output layers, a batch, activations."""
    spec = head_spec(cfg, s)
    by_head = head_parameters(spec)
    parameters = sum(by_head.values())
    if sharded:
        optimiser = ADAM * parameters // world + 3 * 4 * max(by_head.values())
    else:
        optimiser = (ADAM + 4 * (world > 1)) * parameters
    if cfg.head.ema is not None:
        optimiser += 4 * parameters // (world if sharded else 1)
    batch = 2 * images * s.grid.size * s.width * 4
    step = activations(s, spec, images, dict(cfg.head.loss), cfg.train.precision)
    if cfg.head.corrector:
        kept, most = correcting(cfg, s)
        step = max(step, most) + kept
    if "mixed" in cfg.train.precision:  # there the optimiser is not fused: it makes one more number a weight
        step = max(step, 4 * parameters // (world if sharded else 1))
    return s.weights + 4 * s.output + optimiser + batch + step


def host(cfg: Config, s: Sizes) -> dict[str, int]:
    """By stage, what a process keeps in the machine's memory, beside weights on their way to a GPU: a shard in the
    making; in training, validation samples (twice while they are batched), each worker's shuffle buffer and batches."""
    exact = 2 * s.grid.size * s.width * 4
    stored = sample_bytes(s.grid.size, s.width, cfg.cache.dtype)
    worker = cfg.train.shuffle_buffer * stored + PREFETCHED * cfg.train.batch_size * exact
    samples = min(cfg.train.validation_samples, cfg.cache.samples)
    training = max(
        2 * min(SCALED, cfg.cache.samples) * exact, 2 * samples * exact, samples * exact + cfg.train.workers * worker
    )
    shard = min(cfg.cache.shard_size, cfg.cache.samples) * 2 * s.grid.size * s.width * s.value + stored
    return {"cache": shard, "train": training}


# -- time ---------------------------------------------------------------------------------------------------------


def pass_seconds(s: Sizes, card: Card, images: int, tokens: int, width: int) -> float:
    """A pass that feeds ``tokens`` a row, which see ``width`` slots: two FLOP a weight and token, four a number of keys
    that a query meets."""
    rows, weights = 2 * images, s.decoder + s.readout
    read = weights * s.value + rows * width * s.kv_token
    flops = rows * tokens * (2 * weights + 4 * s.layers * s.heads * s.head_dim * width)
    return max(read / card.bandwidth, flops / card.flops(s.value))


def passes(schedule: Schedule, grid: Grid) -> list[tuple[int, int]]:
    """(tokens a row, slots they see) of each pass of a schedule that does not look at outcomes, the prompt's first."""
    made = [(PROMPT, PROMPT)]
    for step in schedule.script(grid):
        if step.feed:
            index, _, _ = grid.feed_plan(step.feed)
            made.append((len(index), PROMPT + max(index) + 1))
    return made


def image_seconds(s: Sizes, card: Card, images: int, made: list[tuple[int, int]]) -> float:
    """A batch of images by these passes."""
    return sum(pass_seconds(s, card, images, tokens, width) for tokens, width in made)


def training_flops(cfg: Config, s: Sizes) -> int:
    """A sample's: a head's every weight takes two FLOP a position forward, two when that is made again in the backward
    pass, and four backward, but those that read z two. KL and total variation take both streams, and the readout of the
    target (two, made again) and of the prediction (two, made again, and two backward: it is frozen). A corrector takes
    as much for each pair, in both streams, and a pass of the backbone over the images that the pairs come from."""
    spec = head_spec(cfg, s)
    guided = spec.space == Space.latent.name and guides(dict(cfg.head.loss))
    by_head, total = head_parameters(spec), 0
    for direction, offset in spec.offsets():
        rows, columns = source_rectangle(s.grid, direction, offset)
        z = 2 * s.width * (spec.context if direction is Direction.VERTICAL else 1)
        a_position = 8 * by_head[name(direction, offset)] - 2 * z * s.width + 10 * s.readout * guided
        total += rows * columns * a_position * (1 + guided)
    if corrector := cfg.head.corrector:
        table = s.width * corrector.width  # weights that read an input of d; tokens are the same in both streams
        layers = 2 * (8 * (by_head["corrector"] - (3 + corrector.context) * table) + 6 * 2 * table)
        a_pair = layers + 6 * (1 + corrector.context) * table + 2 * 10 * s.readout * guides(dict(corrector.loss))
        rows, seen = 2 * corrected_images(cfg, s), s.grid.sequence_length / 2
        a_token = 2 * (s.decoder + s.readout) + 4 * s.layers * s.heads * s.head_dim * seen
        total += round((corrector.pairs * a_pair + rows * s.grid.sequence_length * a_token) / cfg.train.batch_size)
    return total


def hours(cfg: Config, s: Sizes, card: Card, samples: dict[str, int], decoders: dict[str, list]) -> dict:
    """What one card takes no less than, for the cache of each number of ``samples``, training on it, and decoding with
    each of ``decoders`` (their passes). At the run's batch sizes, or the largest that fit; None where none does."""
    fit = {setting: min(batch, largest(need, card.memory)) for setting, (batch, need) in needs(cfg, s).items()}
    caching = training = None
    if batch := fit["cache.batch_size"]:
        caching = image_seconds(s, card, batch, passes(Autoregressive(), s.grid)) / batch
    if fit["train.batch_size"]:
        rate = card.flops(2 if "16" in cfg.train.precision else 4)
        training = TRAINING * cfg.train.epochs * training_flops(cfg, s) / rate
    decoding = {}
    for decoder, made in decoders.items():
        decoding[decoder] = None
        if batch := fit["decode.batch_size"]:
            batches = math.ceil(cfg.decode.prompts / batch)
            likelihood = pass_seconds(s, card, batch, s.grid.sequence_length, s.slots)
            single = image_seconds(s, card, 1, made)
            seconds = batches * (image_seconds(s, card, batch, made) + likelihood)
            decoding[decoder] = (seconds + (1 + 2 * cfg.decode.timed_images) * single) / 3600
    return {
        "cache": {key: caching and count * caching / 3600 for key, count in samples.items()},
        "train": {key: training and count * training / 3600 for key, count in samples.items()},
        "decode": decoding,
    }


# -- what fits ----------------------------------------------------------------------------------------------------


def largest(need: Callable[[int], int], memory: int) -> int:
    """The largest batch for which ``need`` is within ``memory``; 0 if none is."""
    low, high = 0, 1
    while need(high) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= memory else (low, middle)
    return low


def needs(cfg: Config, s: Sizes) -> dict[str, tuple[int, Callable[[int], int]]]:
    """By the setting that is a stage's batch size: its value, and the memory that the stage takes as its function."""
    heads = sum(head_parameters(head_spec(cfg, s)).values())
    return {
        "cache.batch_size": (cfg.cache.batch_size, lambda images: cache_stage(s, images)),
        "train.batch_size": (cfg.train.batch_size, lambda images: train_stage(cfg, s, images)),
        "decode.batch_size": (cfg.decode.batch_size, lambda images: decode_stage(s, images, heads)),
    }


def plan(cfg: Config, s: Sizes, gpus: int = 1) -> dict:
    """Everything above for one run, as JSON; ``gpus`` train together."""
    by_head = dict(head_parameters(head_spec(cfg, s)))
    corrector = by_head.pop("corrector", None)
    published = cfg.model.get("published")
    samples = {"cache.samples": cfg.cache.samples}
    trainings = {(1, cfg.train.batch_size), (gpus, cfg.train.batch_size)}
    if published:
        samples["published"] = published.samples
        trainings.add((published.gpus, published.batch_size))
    batches = {setting: batch for setting, (batch, _) in needs(cfg, s).items()}
    schedules = {decoder: instantiate(node.schedule) for decoder, node in cfg.decoder.items()}
    decoders = {decoder: passes(made, s.grid) for decoder, made in schedules.items() if not made.adaptive}
    cards = {}
    for card, sheet in CARDS.items():
        cards[card] = {"memory": sheet.memory, "weights_fit": s.weights <= sheet.memory}
        for setting, (batch, need) in needs(cfg, s).items():
            needed, most = need(batch), largest(need, sheet.memory)
            cards[card][setting] = {"needs": needed, "fits": needed <= sheet.memory, "largest": most}
        cards[card]["hours"] = hours(cfg, s, sheet, samples, decoders)
    return {
        "model": cfg.model.name,
        "grid": [s.grid.height, s.grid.width],
        "end_of_line": s.grid.end_of_line,
        "parameters": s.parameters,
        "weights": s.weights,
        "kv_cache": {
            "token_a_row": s.kv_token,
            "image": kv_cache(s, 1),
            **{key: kv_cache(s, batches[key]) for key in ("cache.batch_size", "decode.batch_size")},
        },
        "batch_sizes": batches,
        "host": host(cfg, s),
        "cache": {
            key: {str(dtype): count * sample_bytes(s.grid.size, s.width, dtype) for dtype in CacheDtype}
            | {"samples": count}
            for key, count in samples.items()
        },
        "precision": cfg.train.precision,
        "heads": {"count": len(by_head), "largest": max(by_head.values()), "parameters": sum(by_head.values())},
        "corrector": corrector and {"parameters": corrector, "images_a_step": corrected_images(cfg, s)},
        "training": [
            {
                "gpus": world,
                "batch_size": batch,
                "ddp": train_stage(cfg, s, batch, world),
                "fsdp": train_stage(cfg, s, batch, world, sharded=True),
            }
            for world, batch in sorted(trainings)
        ],
        "cards": cards,
    }  # fmt: skip


def markdown(contents: dict) -> str:
    """The same for people."""
    kv, heads, batch = contents["kv_cache"], contents["heads"], contents["batch_sizes"]
    rows = {
        "parameters": f"{contents['parameters'] / 1e6:,.1f}M, {_size(contents['weights'])} in memory",
        "KV cache": f"{kv['token_a_row'] / 1024:.4g} KiB a token a row, {_size(kv['image'])} an image (both streams)",
    }
    for key in "cache.batch_size", "decode.batch_size":
        rows[f"KV cache, {key}={batch[key]}"] = _size(kv[key])
    rows["heads"] = (
        f"{heads['count']}, {heads['parameters'] / 1e6:.4g}M parameters, {heads['largest'] / 1e6:.4g}M the largest"
    )
    if corrector := contents["corrector"]:
        images = corrector["images_a_step"]
        rows["corrector"] = (
            f"{corrector['parameters'] / 1e6:.4g}M parameters; a training step feeds {images} image(s) more"
        )
    for key, entry in contents["cache"].items():
        sizes = ", ".join(f"{_size(entry[dtype])} as {dtype}" for dtype in CacheDtype)
        rows[f"cache on disk, {entry['samples']} samples ({key})"] = sizes
    for entry in contents["training"]:
        shares = f"{_size(entry['ddp'])} with DDP, {_size(entry['fsdp'])} with FSDP"
        rows[f"training, a GPU of {entry['gpus']}, {entry['batch_size']} images each"] = (
            shares if entry["gpus"] > 1 else _size(entry["ddp"])
        )
    rows["the machine's own memory, a process"] = ", ".join(
        f"{_size(n)} for the {stage} stage" for stage, n in contents["host"].items()
    )
    height, width = contents["grid"]
    lines = [f"# {contents['model']}: {height} x {width} tokens{', end-of-line tokens' * contents['end_of_line']}", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows.items())]
    settings = " | ".join(f"{key}={n}" for key, n in batch.items())
    lines += ["", f"| one card | {settings} |", "|---" * (1 + len(batch)) + "|"]
    for card, entry in contents["cards"].items():
        cells = " | ".join(_verdict(entry[key], entry["weights_fit"]) for key in batch)
        lines.append(f"| {card}, {_size(entry['memory'])} | {cells} |")
    columns = [f"cache, {entry['samples']} samples" for entry in contents["cache"].values()]
    columns += [f"train in {contents['precision']}, {entry['samples']} samples" for entry in contents["cache"].values()]
    columns += [f"decode by {decoder}" for decoder in next(iter(contents["cards"].values()))["hours"]["decode"]]
    lines += ["", f"| one card takes no less than | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for card, entry in contents["cards"].items():
        times = [_time(hours) for by_key in entry["hours"].values() for hours in by_key.values()]
        lines.append(f"| {card} | {' | '.join(times)} |")
    return "\n".join(lines)


def _verdict(entry: dict, weights_fit: bool) -> str:
    if not weights_fit:
        return "the weights alone do not fit"
    what = f"at most {entry['largest']}" if entry["largest"] else "not even 1"
    return f"{'fits' if entry['fits'] else 'does not fit'}: {_size(entry['needs'])}; {what}"


def _size(n: int) -> str:
    if n >= GB:
        return f"{n / GB:,.{1 if n < 100 * GB else 0}f} GB"
    return f"{n / 1e6:,.0f} MB" if n >= 1e6 else f"{n / 1e3:,.0f} kB"


def _time(hours: float | None) -> str:
    if hours is None:
        return "-"
    if hours < 1 / 3600:
        return "< 1 s"
    return f"{hours:,.{hours < 10:d}f} h" if hours >= 1 else f"{60 * hours:.2g} min"


def device_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, but for a twentieth that fragments; or the machine's memory."""
    if device.type == "cuda":
        return int(0.95 * torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_fit(cfg: Config, device: torch.device) -> None:
    """Raises ValueError if a stage of this run needs more memory than there is, with what would fit, or heads would
    have nothing to learn from. Does nothing for a backbone whose size is not known before it is loaded."""
    try:
        backbone = sketch(cfg.model)
    except UnknownSize as error:
        log.info("memory is not checked: %s", error)
        return
    s = Sizes.of(backbone)
    if Stage.train in cfg.stages:
        require_reach(cfg, s.grid)
    check_fit(cfg, s, device_memory(device), str(device))
    check_host(cfg, s, device_memory(torch.device("cpu")))


def require_reach(cfg: Config, grid: Grid) -> None:
    """Raises ValueError if there are heads without a neighbour to learn from."""
    head = cfg.head
    if head.k_horizontal >= grid.width or head.k_vertical >= grid.height:
        raise ValueError(
            f"head.k_horizontal={head.k_horizontal}, head.k_vertical={head.k_vertical}; expected less than the width "
            f"and height of {cfg.model.name}'s {grid.height}x{grid.width} grid"
        )


def check_fit(cfg: Config, s: Sizes, memory: int, device: str) -> None:
    have = f"{memory / GB:.1f} GB on {device}"
    if s.weights > memory:
        raise ValueError(
            f"{cfg.model.name} does not fit: its weights alone are {s.weights / GB:.1f} GB, and there are "
            f"{have}; use another device, or a narrower model.backbone.dtype"
        )
    stages = {"decode" if stage in (Stage.benchmark, Stage.evaluate) else stage.name for stage in cfg.stages}
    for setting, (value, need) in needs(cfg, s).items():
        if setting.split(".")[0] not in stages or need(value) <= memory:
            continue
        fits = largest(need, memory)
        mend = f"set {setting}={fits}" if fits else "it does not even at 1: use another device"
        if setting == "train.batch_size" and fits:
            steps = -(-value // fits)
            mend = f"set {setting}={-(-value // steps)} ++train.trainer.accumulate_grad_batches={steps}"
        needed = f"{need(value) / GB:.1f} GB"
        raise ValueError(f"{setting}={value} needs about {needed} for {cfg.model.name}, and there are {have}; {mend}")


def check_host(cfg: Config, s: Sizes, memory: int) -> None:
    mends = {
        "cache": "cache.shard_size",
        "train": "train.shuffle_buffer (samples, each worker's), train.workers or train.validation_samples",
    }
    stages = {stage.name for stage in cfg.stages}
    for stage, need in host(cfg, s).items():
        if stage in stages and need > memory:
            raise ValueError(
                f"the {stage} stage needs about {need / GB:.1f} GB of the machine's memory for {cfg.model.name}, and "
                f"there are {memory / GB:.1f} GB; lower {mends[stage]}"
            )
