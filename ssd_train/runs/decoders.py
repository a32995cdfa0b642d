"""The decoders of a run, bound to its backbone and heads, and what each makes of a list of samples.

The unit of work is a batch of samples by one decoder, a *part*: a file that processes share out among themselves, so
that a run that was cut off goes on with those that are missing.
"""

import copy
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from torch import Tensor

import ssd_train
from ssd_train import config
from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.decoding.engine import Decoded, Decoder
from ssd_train.decoding.trace import Trace
from ssd_train.evaluation import metrics
from ssd_train.heads.export import load_heads
from ssd_train.heads.predictors import Heads
from ssd_train.processes.files import Claims, DamagedFile, load_tensors, save_tensors, sha256, share_out
from ssd_train.runs.run import Run

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One image to be decoded; the seed decides all its draws."""

    text: str
    seed: int


def decoder_nodes(run: Run) -> dict[str, Any]:
    """The configured decoders and their variations, by name. Raises ValueError for a variation of nothing."""
    nodes = dict(run.cfg.decoder.items())
    for variation in run.cfg.decode.vary:
        key, values = variation.split("=", 1)
        name, setting = key.split(".", 1)
        for value in yaml.safe_load(f"[{values}]"):
            node = copy.deepcopy(run.cfg.decoder[name])
            if OmegaConf.select(node, setting, default=MISSING) is MISSING:
                raise ValueError(f"decode.vary: {name} has no setting {setting}; expected one that its yaml names")
            OmegaConf.update(node, setting, value)
            nodes[f"{name} {setting.rsplit('.', 1)[-1]}={value}"] = node
    return nodes


def configured_decoders(run: Run) -> dict[str, Decoder]:
    """The same, built. Raises ValueError naming the one that cannot be."""
    return {name: _built(name, node) for name, node in decoder_nodes(run).items()}


def make_decoders(run: Run) -> dict[str, Decoder]:
    """The decoders, bound to the backbone and the exported heads. Raises ValueError if one does not fit."""
    heads = load_heads(run.heads_dir, run.backbone) if (run.heads_dir / "config.json").exists() else None
    return {name: bound(name, node, run.backbone, heads) for name, node in decoder_nodes(run).items()}


def bound(name: str, node: Any, backbone: Backbone, heads: Heads | None) -> Decoder:
    """A decoder from its settings, bound. Raises ValueError that names it if it cannot be, or does not fit."""
    decoder = _built(name, node)
    try:
        return decoder.bind(backbone, heads)
    except ValueError as error:
        raise ValueError(f"decoder {name}: {error}") from error


def _built(name: str, node: Any) -> Decoder:
    try:
        return instantiate(node)
    except InstantiationException as error:
        raise ValueError(f"decoder {name}: {error}") from error


def picture_shape(run: Run) -> tuple[int, int] | None:
    """(height, width) in pixels; null if the backbone cannot make any. Then a warning says why; tokens are kept in any
    case."""
    grid = run.backbone.grid
    try:
        pictures = run.backbone.decode_pixels(torch.zeros(1, grid.height, grid.width, dtype=torch.int64))
    except FileNotFoundError as error:
        log.warning("no pictures: %s", error)
        return None
    return tuple(pictures.shape[1:3])


def identity(run: Run, name: str, decoder: Decoder, *content: Any) -> str:
    """Of everything that decides what one decoder makes of the ``content``, our own code included."""
    node = decoder_nodes(run)[name]
    files = _files(OmegaConf.to_container(node, resolve=True))
    if decoder.drafter is not None and decoder.drafter.uses_heads:
        files.append(run.heads_dir / "model.safetensors")
    files += sorted(Path(ssd_train.__file__).parent.rglob("*.py"))
    models = [run.backbone, *filter(None, [getattr(decoder.drafter, "backbone", None)])]
    return config.fingerprint(
        [model.fingerprint for model in models], run.cfg.model.backbone, vars(run.sampling), run.cfg.seed, node,
        run.cfg.decode.batch_size, *content, [sha256(path) for path in files if path.exists()],
    )  # fmt: skip


def _files(node: Any) -> list[Path]:
    """Those that a decoder's settings name."""
    if isinstance(node, dict | list):
        return [file for value in (node.values() if isinstance(node, dict) else node) for file in _files(value)]
    return [Path(node)] if isinstance(node, str) and os.sep in node and Path(node).is_file() else []


def time_decoders(
    run: Run, decoders: dict[str, Decoder], samples: Sequence[Sample]
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds an image at batch 1, and the share spent drafting, by decoder. Decoders take turns on each sample,
    so that a slow spell of the machine hits all of them; the first one warms up and is not counted. One process
    measures while the others wait; theirs are empty."""
    if run.world.rank > 0:
        run.meet()
        return {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    traces: dict[str, list[Trace]] = {name: [] for name in decoders}
    for number, sample in enumerate(run.progress([*samples[:1], *samples], desc="timing", unit="image")):
        for name, decoder in decoders.items():
            context, seeds = _context(run, [sample])
            start = perf_counter()
            decoded = decoder(run.backbone, context, seeds, run.sampling)
            decoded.tokens.cpu()
            elapsed = perf_counter() - start
            if number:
                seconds[name].append(elapsed)
                traces[name].append(decoder(run.backbone, context, seeds, run.sampling, timed=True).trace)
    run.meet()
    return (
        {name: median(values) for name, values in seconds.items()},
        {name: metrics.draft_fraction(values) for name, values in traces.items()},
    )


Measure = Callable[[Sequence[Sample], Decoded], dict[str, Tensor]]


def decode_parts(
    run: Run, decoder: Decoder, samples: Sequence[Sample], name: str, directory: Path, measure: Measure
) -> list[Path]:
    """Makes the parts of the samples that are not in the directory, shared with the other processes, and returns the
    files of all, in order. A part holds tokens [B, h, w] int64, nll [B] float64 and what ``measure`` finds in the
    decoded batch."""
    directory.mkdir(parents=True, exist_ok=True)
    size = run.cfg.decode.batch_size
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    files = [directory / f"{i * size:06d}-{i * size + len(batch):06d}.safetensors" for i, batch in enumerate(batches)]
    with Claims(directory / "claims.lock") as claims, run.progress(total=len(batches), desc=name, unit="batch") as bar:

        def is_there(i: int, again: bool) -> bool:
            there = _is_whole(files[i])
            bar.update(there)
            return there

        for i in share_out(claims, range(len(batches)), is_there):
            context, seeds = _context(run, batches[i])
            decoded = decoder(run.backbone, context, seeds, run.sampling)
            nll = metrics.negative_log_likelihood(run.backbone, context, decoded.tokens, run.sampling)
            tensors = {"tokens": decoded.tokens, "nll": nll} | measure(batches[i], decoded)
            tensors = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
            save_tensors(files[i], tensors)
            claims.release(i)
            bar.update()
    return files


def _is_whole(part: Path) -> bool:
    try:
        load_tensors(part, "it is made again")
    except FileNotFoundError:
        return False
    except DamagedFile as error:
        log.warning("%s", error)
        return False
    return True


def _context(run: Run, samples: Sequence[Sample]) -> tuple[PromptBatch, list[int]]:
    return run.backbone.encode_prompts([sample.text for sample in samples]), [sample.seed for sample in samples]
