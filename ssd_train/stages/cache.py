"""Prompts -> tokens and states of both CFG streams, or of the only one without guidance -> shards."""

import hashlib
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import transformers
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image, ImageOps
from torch import Tensor

import ssd_train
from ssd_train.backbones.base import Backbone
from ssd_train.backbones.kv_cache import Slots
from ssd_train.backbones.sketches import UnknownSize, sketch
from ssd_train.cache.shards import (
    CacheDtype,
    CacheError,
    Sample,
    ShardCache,
    description,
    pack,
    sample_bytes,
    unpack,
)
from ssd_train.cache.writer import ShardWriter
from ssd_train.config import CacheSource, Stage
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.distributions import Sampling, acceptance_rate, guided_probabilities
from ssd_train.draws import sample_seed
from ssd_train.heads.export import load_heads
from ssd_train.pictures import Picture
from ssd_train.processes.files import Claims, claim, sha256, share_out
from ssd_train.prompts import Prompt, Split, split_of
from ssd_train.runs import plan
from ssd_train.runs.run import Run

log = logging.getLogger(__name__)

READOUT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative to the largest logit. Rounding stays far below these; states taken after the norm, or shifted by one
position, are off by order 1."""


def check(run: Run) -> None:
    """Raises ValueError if there are too few prompts, or cache.decoder cannot be built or is lossy."""
    _prompts(run)
    if run.cfg.cache.decoder:
        decoder = _configured(run)
        with suppress(UnknownSize):
            _require_exact(run, decoder, sketch(run.cfg.model))


def run(run: Run) -> None:
    cfg = run.cfg.cache
    run.remove_strays()
    prompts = _prompts(run)
    if Stage.train in run.cfg.stages:
        plan.require_reach(run.cfg, run.backbone.grid)
    cache = ShardCache(run.cache_dir)
    shards = [prompts[i : i + cfg.shard_size] for i in range(0, len(prompts), cfg.shard_size)]
    shards_there = not cache.remote and any(cache.directory.glob("*.tar"))  # looked for first: a manifest precedes them
    if cache.remote or cache.manifest_path.exists():
        cache.check(identity(run))
    elif shards_there:
        raise CacheError(
            f"{cache.directory} holds shards, but not the manifest.json that says what they were made with: copy that "
            "here as well, use another cache.dir, or remove this one if it is not needed"
        )
    world = run.world  # each process looks closely at its share, and the others rely on that
    missing = [
        i for i, shard in run.progress(list(enumerate(shards)), desc="checking", unit="shard", delay=2, leave=False)
        if not _is_there(run, cache, i, shard, cfg.verify and i % world.size == world.rank)
    ]  # fmt: skip
    if cache.remote and missing:
        raise CacheError(
            f"the cache at {cache.directory} lacks shards {missing[:8]} of {len(shards)}, and a URL is only read: make "
            "them with cache.dir=<directory> and copy them there, or lower cache.samples"
        )
    if not missing:
        log.info("cache %s is complete: %d samples in %d shards", cache.directory, len(prompts), len(shards))
        if not cache.remote:
            cache.write_index(len(shards))
        return
    decoder = _decoder(run)
    _estimate(run, cache, sum(len(shards[i]) for i in missing), prompts)
    with claim(cache.directory / "manifest.lock"):
        if not cache.manifest_path.exists():
            cache.pin(identity(run) | _checks(run, prompts))
    cache.check(identity(run))
    made, start = 0, time.perf_counter()
    with (
        run.progress(total=len(missing), desc="cache", unit="shard") as bar,
        Claims(cache.claims) as claims,
        ShardWriter(cache, cfg.batch_size, claims.release) as writer,
    ):

        def is_there(shard: int, again: bool) -> bool:
            # What another process has just made needs no hashing.
            there = _is_there(run, cache, shard, shards[shard], cfg.verify and not again)
            bar.update(there)
            return there

        for i in share_out(claims, missing, is_there, writer.finish):
            if cache.path(i).exists():
                log.warning("%s is incomplete, damaged or too short; it is made again", cache.path(i))
            writer.write(i, _samples(run, decoder, shards[i], f"shard {i}"))
            made += 1
            bar.update()
        writer.finish()
    waited = writer.waited / (time.perf_counter() - start)
    cache.write_index(len(shards))
    log.info(
        "cache %s is complete: %d samples in %d shards, %d of them made now; %.1f%% of the time went into waiting for "
        "the writer", cache.directory, len(prompts), len(shards), made, 100 * waited,
    )  # fmt: skip


def _prompts(run: Run) -> list[Prompt]:
    """Raises ValueError if heads are to be trained, but these prompts cannot both train and validate."""
    prompts = run.prompts([Split.TRAIN, Split.VALIDATION], run.cfg.cache.samples)
    for split in (Split.TRAIN, Split.VALIDATION) if Stage.train in run.cfg.stages else ():
        if not any(split_of(p.text) is split for p in prompts):
            raise ValueError(f"none of the first {len(prompts)} prompts is a {split} one; raise cache.samples")
    if run.cfg.cache.source is CacheSource.images and any(p.image is None for p in prompts):
        raise ValueError("cache.source=images, but model.prompts gives no images; set model.prompts.image_column")
    return prompts


def _is_there(run: Run, cache: ShardCache, shard: int, prompts: list[Prompt], verify: bool) -> bool:
    """Whether the shard is whole and holds these prompts, and perhaps more: runs with other cache.samples share it.
    Raises CacheError if it holds other ones."""
    entry = cache.entry(shard, verify)
    if entry is None:
        return False
    wanted = [description(p.index, p.text, sample_seed(run.cfg.seed, p.index), _picture(run, p)) for p in prompts]
    if any(a != b for a, b in zip(wanted, entry.samples, strict=False)):
        raise CacheError(
            f"{cache.url(shard)} holds other prompts than model.prompts gives now: the prompt source has changed. "
            "Use another cache.dir, or remove this cache if it is not needed."
        )
    return len(entry.samples) >= len(wanted)


def _picture(run: Run, prompt: Prompt) -> str:
    """The digest of the picture that the tokens are read off."""
    if run.cfg.cache.source is not CacheSource.images:
        return ""
    if isinstance(prompt.image, Picture):
        return prompt.image.digest()
    return hashlib.sha256(prompt.image().tobytes()).hexdigest()[:16]


def identity(run: Run) -> dict:
    """What every sample is made with."""
    backbone, cfg = run.backbone, run.cfg.cache
    return {
        "format": 2,
        "backbone": backbone.name,
        "fingerprint": backbone.fingerprint,
        "backbone_dtype": str(backbone.dtype),
        "norm_state": "pre",
        "grid": [backbone.grid.height, backbone.grid.width],
        "end_of_line": backbone.grid.end_of_line,
        "width": backbone.width,
        "vocabulary": backbone.vocabulary,
        "sampling": vars(run.sampling),
        "source": cfg.source.name,
        "seed": run.cfg.seed,
        "dtype": str(cfg.dtype.value),
        "shard_size": cfg.shard_size,
        "batch_size": cfg.batch_size,
        "decoder": _decoder_identity(run),
        "versions": {
            "torch": torch.__version__, "transformers": transformers.__version__, "ssd_train": ssd_train.__version__
        },
    }  # fmt: skip


def _decoder_identity(run: Run) -> dict | None:
    """Of cache.decoder and its heads; none for token by token, as before there were others."""
    if run.cfg.cache.decoder is None:
        return None
    settings = OmegaConf.to_container(run.cfg.decoder[run.cfg.cache.decoder], resolve=True, enum_to_str=True)
    heads = sha256(run.heads_dir / "model.safetensors") if run.cfg.decode.heads else None
    return {"name": run.cfg.cache.decoder, "settings": settings, "heads": heads}


def _checks(run: Run, prompts: list[Prompt]) -> dict:
    """Measured once, on the first few samples, and kept in the manifest. Raises CacheError if the readout of the
    states is not the model's own logits: the commonest silent failure, and heads trained on such states are useless."""
    backbone = run.backbone
    first = prompts[: min(4, run.cfg.cache.batch_size)]
    context = backbone.encode_prompts([p.text for p in first]).guided(run.sampling.guidance)
    generator = torch.Generator().manual_seed(run.cfg.seed)
    tokens = torch.randint(backbone.vocabulary, (len(first), backbone.grid.size), generator=generator)
    tokens = tokens.to(backbone.device)
    hidden = backbone.teacher_force(context, tokens)
    error = backbone.readout_error(context, tokens, hidden)
    if not error <= READOUT_TOLERANCE[backbone.dtype]:
        raise CacheError(
            f"readout(H) differs from the model's own logits by {error:.2g} of the largest logit; expected at most "
            f"{READOUT_TOLERANCE[backbone.dtype]:.0e} for {backbone.dtype}. The adapter of {backbone.name} does not "
            "capture the states before the final norm."
        )
    stored = storage_error(backbone, hidden, run.cfg.cache.dtype, run.sampling)
    log.info(
        "readout(H) is the model's own logits to %.0e; storing H as %s changes it by %.2g (relative RMS) and p by %.2g "
        "(total variation)", error, run.cfg.cache.dtype.value, stored["relative_rms"], stored["total_variation"],
    )  # fmt: skip
    return {"readout_error": error, "storage_error": stored}


def storage_error(backbone: Backbone, hidden: Tensor, dtype: CacheDtype, sampling: Sampling) -> dict[str, float]:
    """What the cache dtype does to states [2, B, L, d]: their relative RMS error, and the total variation distance
    between the distributions read out from the exact and the stored states."""
    stored = torch.stack([unpack(pack(h, dtype)) for h in hidden.unbind(1)], 1).to(hidden)
    relative = ((stored.double() - hidden.double()).square().mean() / hidden.double().square().mean()).sqrt()
    kept = []
    for exact, lossy in zip(hidden.split(64, 2), stored.split(64, 2), strict=True):  # or 32k tokens' logits fill a GPU
        p, q = (guided_probabilities(backbone.readout(h), sampling) for h in (exact, lossy))
        kept.append(acceptance_rate(p, q))
    return {
        "relative_rms": float(f"{relative.item():.3g}"),
        "total_variation": float(f"{1 - torch.cat(kept, 1).mean().item():.3g}"),
    }


def _estimate(run: Run, cache: ShardCache, samples: int, prompts: list[Prompt]) -> None:
    """Logs bytes and time of what is to be made. Raises CacheError if the disk cannot hold it."""
    backbone, cfg = run.backbone, run.cfg.cache
    size = samples * sample_bytes(backbone.grid.size, backbone.width, cfg.dtype)
    cache.directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache.directory).free
    batch = [p.text for p in prompts[: min(cfg.batch_size, cfg.shard_size, samples)]]
    seconds = _seconds_a_pass(backbone, batch, run.sampling.guidance) * math.ceil(samples / len(batch))
    if cfg.source is CacheSource.generated:
        seconds *= backbone.grid.size
    log.info(
        "cache: %d samples to make, %.2f GB (%.1f GB free) and about %.1f minutes%s",
        samples, size / 1e9, free / 1e9, seconds / 60, " if it were token by token" * bool(cfg.decoder),
    )  # fmt: skip
    if size > free:
        raise CacheError(
            f"{samples} samples need {size / 1e9:.1f} GB in {cache.directory}, where {free / 1e9:.1f} GB are free; "
            "lower cache.samples, use cache.dtype=int8, or another cache.dir"
        )


@torch.inference_mode()
def _seconds_a_pass(backbone: Backbone, texts: list[str], guidance: float) -> float:
    """Wall-clock of one single-token pass, half-way through an image, with some margin for sampling."""
    context = backbone.encode_prompts(texts).guided(guidance)
    cache = backbone.new_cache(context)
    hidden = backbone.prefill(context, cache)
    half = min(backbone.grid.size - 2, backbone.grid.size // 2)
    tokens = torch.zeros(len(texts), max(1, half), dtype=torch.int64, device=backbone.device)

    def pass_(start: int, stop: int) -> Tensor:
        slots = Slots.span(context.ids.shape[-1] + start, context.ids.shape[-1] + stop, backbone.device)
        return backbone(backbone.embed(tokens[:, : stop - start]).repeat(context.streams, 1, 1), slots, cache)

    if half > 0:
        hidden = pass_(0, half)
    start = time.perf_counter()
    for i in range(3):
        hidden = pass_(max(0, half - i - 1), max(1, half - i))
    float(hidden.sum())
    return (time.perf_counter() - start) / 3 * 1.15


def _samples(run: Run, decoder: Decoder, prompts: list[Prompt], what: str) -> Iterator[Sample]:
    batch_size = run.cfg.cache.batch_size
    make = _encode_images if run.cfg.cache.source is CacheSource.images else partial(_generate, decoder)
    for start in run.progress(range(0, len(prompts), batch_size), desc=what, unit="batch", leave=False):
        batch = prompts[start : start + batch_size]
        seeds = [sample_seed(run.cfg.seed, p.index) for p in batch]
        tokens, hidden = make(run, batch, seeds)
        for i, prompt in enumerate(batch):
            yield Sample.of(
                prompt.index, prompt.text, seeds[i], tokens[i], hidden[:, i], run.backbone.fingerprint,
                run.cfg.cache.dtype, _picture(run, prompt),
            )  # fmt: skip


def _configured(run: Run) -> Decoder:
    """What cache.decoder names. Raises ValueError if it cannot be built."""
    name = run.cfg.cache.decoder
    try:
        return instantiate(run.cfg.decoder[name])
    except InstantiationException as error:
        raise ValueError(f"cache.decoder={name}: {error}") from error


def _require_exact(run: Run, decoder: Decoder, backbone: Backbone) -> None:
    if not decoder.exact(backbone):
        raise ValueError(
            f"cache.decoder={run.cfg.cache.decoder} is lossy with these settings: heads would learn from images that "
            "the backbone does not draw; expected an exact decoder, such as ar or ssd_coupled"
        )


def _decoder(run: Run) -> Decoder:
    """What draws the samples. Raises ValueError if it is lossy, or does not fit the backbone or the heads."""
    name = run.cfg.cache.decoder
    if name is None:
        return Decoder(Autoregressive())
    decoder = _configured(run)
    _require_exact(run, decoder, run.backbone)
    try:
        return decoder.bind(run.backbone, load_heads(run.heads_dir, run.backbone) if run.cfg.decode.heads else None)
    except ValueError as error:
        raise ValueError(f"cache.decoder={name}, with decode.heads={run.cfg.decode.heads}: {error}") from error


def _generate(decoder: Decoder, run: Run, prompts: list[Prompt], seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Sampling with CFG; the states are those that an exact decoder leaves: of the passes that saw the final tokens."""
    context = run.backbone.encode_prompts([p.text for p in prompts])
    decoded = decoder(run.backbone, context, seeds, run.sampling)
    return decoded.tokens, decoded.hidden


def _encode_images(run: Run, prompts: list[Prompt], seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Captioned images, cropped to the backbone's shape, through the VQ encoder, then one teacher-forced pass."""
    backbone = run.backbone
    blank = torch.zeros(1, backbone.grid.height, backbone.grid.width, dtype=torch.int64)
    _, height, width, _ = backbone.decode_pixels(blank).shape
    images = [ImageOps.fit(Image.fromarray(p.image()), (width, height)) for p in prompts]
    tokens = backbone.encode_pixels(torch.from_numpy(np.stack(images)))
    context = backbone.encode_prompts([p.text for p in prompts]).guided(run.sampling.guidance)
    return tokens, backbone.teacher_force(context, tokens.flatten(1))
