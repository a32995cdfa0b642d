"""How much memory and disk a run takes: arithmetic on a backbone that need not be loaded.

B images a batch, R = 2B rows (both CFG streams), S slots of the KV cache, L image tokens, d width, m width of a head's
hidden layer, V image vocabulary. Everything is in bytes; GB are 10^9. What the formulas leave out (scratch space of
kernels, fragmentation, the CUDA context) is why cards are counted at a little less than they have.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ssd_train.backbones.base import Backbone
from ssd_train.backbones.sketches import sketch
from ssd_train.config import Config, Space
from ssd_train.grid import Grid
from ssd_train.heads import Direction, Heads, HeadSpec, source_rectangle
from ssd_train.shards import CacheDtype, sample_bytes

log = logging.getLogger(__name__)

GB = 10**9
CARDS = {"H200": 141 * GB, "A100": 80 * GB, "RTX 4090": 24 * GB}
PROMPT = 128  # slots that a prompt is taken to need; the longest of a batch counts
CHECKED = 4  # samples that the cache stage compares with the class's own logits
ADAM = 4 * 4  # a parameter: float32 weight, gradient and two moments
NLL_ELEMENTS = 2**24  # logits that metrics.negative_log_likelihood makes at a time


@dataclass(frozen=True)
class Sizes:
    """What memory depends on in a backbone. ``value`` is the bytes of a number, ``weights`` those of all parameters
    and of the tables that adapters keep beside them, ``output`` the numbers in the layers that training copies."""

    grid: Grid
    parameters: int
    weights: int
    output: int
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
    )


def head_parameters(spec: HeadSpec) -> dict[str, int]:
    """By head, with its vocabulary projection if it has one."""
    with torch.device("meta"):
        heads = Heads(spec)
    parts = {name: [predictor] for name, predictor in heads.predictors.items()}
    for name, projection in heads.vocabulary_projections.items():
        parts[name].append(projection)
    return {name: sum(p.numel() for part in group for p in part.parameters()) for name, group in parts.items()}


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


def activations(s: Sizes, spec: HeadSpec, images: int, loss: dict[str, float], precision: str) -> int:
    """What the graph of all heads keeps until the backward pass, and that pass's own largest step.

    A head keeps z (2d, times its context) of the whole grid and, where its target is on the grid, z's projection and
    norm, four hidden tensors (m), and up to three d around the loss. KL and total variation need both streams of that,
    and tensors of V. Mixed precision halves z and the hidden ones.
    """
    m, d, v = spec.hidden, spec.width, spec.vocabulary
    narrow = 2 if "16" in precision else 4
    if spec.space == Space.token.name:
        streams, around, logits, step = 1, 3, v * narrow, 3 * v * 4
    else:
        through_readout = bool(loss["kl"]) + bool(loss["total_variation"])
        streams, around = bool(loss["smooth_l1"]) + 2 * bool(through_readout), 5
        logits = (1 + through_readout) * v * 4 if through_readout else 0
        step = 4 * max(3 * m, 6 * d, 4 * v * bool(through_readout))
    kept = largest = 0
    for direction, offset in spec.offsets():
        rows, columns = source_rectangle(s.grid, direction, offset)
        context = spec.context if direction is Direction.VERTICAL else 1
        kept += s.grid.size * streams * 2 * context * d * narrow
        kept += rows * columns * (streams * (4 * m * narrow + around * d * 4) + logits)
        largest = max(largest, rows * columns * step)
    return images * (kept + largest)


def train_stage(cfg: Config, s: Sizes, images: int, world: int = 1, sharded: bool = False) -> int:
    """A GPU's share: the heads with their optimiser (whole, and buckets to exchange gradients, with DDP over
    ``world`` GPUs; a part of it, and two heads gathered, when ``sharded`` by FSDP), the backbone, the float32 copy of
    its output layers, a batch, activations."""
    spec = head_spec(cfg, s)
    by_head = head_parameters(spec)
    parameters = sum(by_head.values())
    if sharded:
        optimiser = ADAM * parameters // world + 2 * 4 * max(by_head.values())
    else:
        optimiser = (ADAM + 4 * (world > 1)) * parameters
    if cfg.head.ema is not None:
        optimiser += 4 * parameters // (world if sharded else 1)
    batch = 2 * images * s.grid.size * s.width * 4
    kept = activations(s, spec, images, dict(cfg.head.loss), cfg.train.precision)
    return s.weights + 4 * s.output + optimiser + batch + kept


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
    by_head = head_parameters(head_spec(cfg, s))
    published = cfg.model.get("published")
    samples = {"cache.samples": cfg.cache.samples}
    trainings = {(1, cfg.train.batch_size), (gpus, cfg.train.batch_size)}
    if published:
        samples["published"] = published.samples
        trainings.add((published.gpus, published.batch_size))
    batches = {setting: batch for setting, (batch, _) in needs(cfg, s).items()}
    cards = {}
    for card, memory in CARDS.items():
        cards[card] = {"memory": memory, "weights_fit": s.weights <= memory}
        for setting, (batch, need) in needs(cfg, s).items():
            needed = need(batch)
            cards[card][setting] = {"needs": needed, "fits": needed <= memory, "largest": largest(need, memory)}
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
        "cache": {
            name: {str(dtype): count * sample_bytes(s.grid.size, s.width, dtype) for dtype in CacheDtype}
            | {"samples": count}
            for name, count in samples.items()
        },
        "heads": {"count": len(by_head), "largest": max(by_head.values()), "parameters": sum(by_head.values())},
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
    for name, entry in contents["cache"].items():
        sizes = ", ".join(f"{_size(entry[dtype])} as {dtype}" for dtype in CacheDtype)
        rows[f"cache on disk, {entry['samples']} samples ({name})"] = sizes
    for entry in contents["training"]:
        shares = f"{_size(entry['ddp'])} with DDP, {_size(entry['fsdp'])} with FSDP"
        rows[f"training, a GPU of {entry['gpus']}, {entry['batch_size']} images each"] = (
            shares if entry["gpus"] > 1 else _size(entry["ddp"])
        )
    height, width = contents["grid"]
    lines = [f"# {contents['model']}: {height} x {width} tokens{', end-of-line tokens' * contents['end_of_line']}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())]
    settings = " | ".join(f"{key}={n}" for key, n in batch.items())
    lines += ["", f"| one card | {settings} |", "|---" * (1 + len(batch)) + "|"]
    for card, entry in contents["cards"].items():
        cells = " | ".join(_verdict(entry[key], entry["weights_fit"]) for key in batch)
        lines.append(f"| {card}, {_size(entry['memory'])} | {cells} |")
    return "\n".join(lines)


def _verdict(entry: dict, weights_fit: bool) -> str:
    if not weights_fit:
        return "the weights alone do not fit"
    what = f"at most {entry['largest']}" if entry["largest"] else "not even 1"
    return f"{'fits' if entry['fits'] else 'does not fit'}: {_size(entry['needs'])}; {what}"


def _size(n: int) -> str:
    return f"{n / GB:,.{1 if n < 100 * GB else 0}f} GB" if n >= GB else f"{n / 1e6:,.0f} MB"


def device_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, but for a twentieth that fragments; or the machine's memory."""
    if device.type == "cuda":
        return int(0.95 * torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_fit(cfg: Config, device: torch.device) -> None:
    """Raises ValueError if a stage of this run needs more memory than the device has, with what would fit. Does
    nothing for a backbone whose size is not known before it is loaded."""
    try:
        backbone = sketch(cfg.model)
    except ValueError as error:
        log.info("memory is not checked: %s", error)
        return
    check_fit(cfg, Sizes.of(backbone), device_memory(device), str(device))


def check_fit(cfg: Config, s: Sizes, memory: int, device: str) -> None:
    have = f"{memory / GB:.1f} GB on {device}"
    if s.weights > memory:
        raise ValueError(
            f"{cfg.model.name} does not fit: its weights alone are {s.weights / GB:.1f} GB, and there are "
            f"{have}; use another device, or a narrower model.backbone.dtype"
        )
    stages = {stage.name for stage in cfg.stages}
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
