"""Decoders compared on the same prompts and seeds, with the heads as exported.

The unit of work is a batch of prompts by one decoder, kept under ``parts``: processes share the batches, and a
run that was cut off goes on with those that are missing.
"""

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import safetensors.torch
import torch
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from torch import Tensor

import ssd_train
from ssd_train import config
from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.trace import Trace
from ssd_train.draws import sample_seed
from ssd_train.evaluation import metrics, plots, report
from ssd_train.heads.export import load_heads, read_config, write_card
from ssd_train.processes.files import sha256, share_out, write_atomically
from ssd_train.prompts import Prompt, Split
from ssd_train.runs import tracking
from ssd_train.runs.run import Run

log = logging.getLogger(__name__)


def check(run: Run) -> None:
    """Raises ValueError if there are too few prompts, a decoder cannot be built, or decode.heads are not there,
    InstantiationException for a logger that is not."""
    tracking.check(run.cfg)
    run.prompts([Split.TEST], run.cfg.decode.prompts)
    configured_decoders(run)
    _optional(run, "scorer"), _optional(run, "category")
    if run.cfg.decode.heads:
        read_config(run.heads_dir)


def run(run: Run, folder: str = "decode") -> None:
    """Leaves the report in this folder of the output."""
    cfg, backbone = run.cfg.decode, run.backbone
    prompts = run.prompts([Split.TEST], cfg.prompts)
    decoders = make_decoders(run)
    directory = run.output / folder
    drawn = _can_draw(run)
    parts = {name: run.output / "parts" / _identity(run, name, d, prompts, drawn) for name, d in decoders.items()}
    seconds, drafting = _time(run, decoders, prompts[: cfg.timed_images])
    run.meet()
    for name, decoder in decoders.items():
        _decode(run, decoder, prompts, name, parts[name], drawn)
    run.meet()
    if run.world.rank > 0:
        return
    (directory / "tokens").mkdir(parents=True, exist_ok=True)
    entries, pictures = {}, {}
    first = {prompt.text: i for i, prompt in reversed(list(enumerate(prompts)))}
    shown = sorted(first.values())[: cfg.pictures]  # a caption once
    for name, decoder in decoders.items():
        found, traces = _gather(parts[name], len(_batches(prompts, cfg.batch_size)))
        tokens, right = found["tokens"], found.get("right")
        if unsound := sum(trace.unsound for trace in traces):
            log.warning(
                "%s: %d draft distributions were NaN or infinite, and uniform ones stood in for them: what drafts is "
                "broken, and the speed of %s says nothing", name, unsound, name,
            )  # fmt: skip
        write_atomically(directory / "tokens" / f"{name}.safetensors", safetensors.torch.save({"tokens": tokens}))
        pictures[name] = backbone.decode_pixels(tokens[shown]) if drawn and shown else None
        entries[name] = report.DecoderReport(
            passes=metrics.mean_passes(traces),
            wall_seconds=seconds[name],
            draft_fraction=drafting[name],
            acceptance=metrics.acceptance(traces, backbone.grid),
            nll=float(found["nll"].mean()),
            exact=decoder.exact(backbone),
            scene_score=None if right is None else metrics.wilson(int(right.sum()), len(prompts)),
            scene_score_by_category=None if right is None else _by_category(run, prompts, right),
            texture={key: float(values.mean()) for key, values in _under("texture.", found).items()} or None,
            code_entropy=metrics.code_entropy(tokens, backbone.vocabulary),
        )
    _draw(run, directory, entries, pictures, [prompts[i].text for i in shown])
    heads = read_config(run.heads_dir) if (run.heads_dir / "config.json").exists() else None
    contents = report.write_report(
        report.Report(
            model=backbone.name,
            grid=(backbone.grid.height, backbone.grid.width),
            prompts=len(prompts),
            decoders=entries,
            device=report.device_name(backbone.device),
            note=run.cfg.note,
            extra={"sampling": vars(run.sampling), "fingerprint": backbone.fingerprint, "heads": heads},
        ),
        directory,
    )
    table = report.table_markdown(contents)
    if heads and not cfg.heads:
        write_card(run.heads_dir, heads, f"{len(prompts)} prompts, {contents['device']}.\n\n{table}")
    tracking.log_report(run.logger, contents, directory, heads["training"]["steps"] if heads else 0)
    log.info("report in %s\n%s%s", directory / "report.md", f"{run.cfg.note}\n\n" if run.cfg.note else "", table)


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
    decoders = {}
    for name, node in decoder_nodes(run).items():
        try:
            decoders[name] = instantiate(node)
        except InstantiationException as error:
            raise ValueError(f"decoder {name}: {error}") from error
    return decoders


def make_decoders(run: Run) -> dict[str, Decoder]:
    """The decoders, bound to the backbone and the exported heads. Raises ValueError if one does not fit."""
    heads = load_heads(run.heads_dir, run.backbone) if (run.heads_dir / "config.json").exists() else None
    decoders = configured_decoders(run)
    for name, decoder in decoders.items():
        try:
            decoder.bind(run.backbone, heads)
        except ValueError as error:
            raise ValueError(f"decoder {name}: {error}") from error
    return decoders


def _optional(run: Run, name: str) -> Callable | None:
    """What model.<name> says, where the model has it."""
    return instantiate(run.cfg.model[name]) if run.cfg.model.get(name) else None


def _context(run: Run, prompts: list[Prompt]) -> tuple[PromptBatch, list[int]]:
    context = run.backbone.encode_prompts([p.text for p in prompts])
    return context, [sample_seed(run.cfg.seed, p.index) for p in prompts]


def _identity(run: Run, name: str, decoder: Decoder, prompts: list[Prompt], drawn: bool) -> str:
    """Of everything that decides what one decoder makes of the prompts and how that scores, our own code included."""
    node = decoder_nodes(run)[name]
    files = [run.heads_dir / "model.safetensors", *_files(OmegaConf.to_container(node, resolve=True))]
    files += sorted(Path(ssd_train.__file__).parent.rglob("*.py"))
    models = [run.backbone, *filter(None, [getattr(decoder.drafter, "backbone", None)])]
    return config.fingerprint(
        [model.fingerprint for model in models], run.cfg.model.backbone, vars(run.sampling), run.cfg.seed, node,
        drawn, run.cfg.model.get("scorer"), run.cfg.decode.batch_size, [[p.index, p.text] for p in prompts],
        [sha256(path) for path in files if path.exists()],
    )  # fmt: skip


def _files(node: Any) -> list[Path]:
    """Those that a decoder's settings name."""
    if isinstance(node, dict | list):
        return [file for value in (node.values() if isinstance(node, dict) else node) for file in _files(value)]
    return [Path(node)] if isinstance(node, str) and os.sep in node and Path(node).is_file() else []


def _time(run: Run, decoders: dict[str, Decoder], prompts: list[Prompt]) -> tuple[dict, dict]:
    """Median seconds an image at batch 1, and the share spent drafting, by decoder. Decoders take turns on each image,
    so that a slow spell of the machine hits all of them; the first image warms up and is not counted. One process
    measures while the others wait."""
    if run.world.rank > 0:
        return {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    traces: dict[str, list[Trace]] = {name: [] for name in decoders}
    warm_up = prompts[:1]
    for number, prompt in enumerate(run.progress([*warm_up, *prompts], desc="timing", unit="image")):
        for name, decoder in decoders.items():
            context, seeds = _context(run, [prompt])
            start = perf_counter()
            decoded = decoder(run.backbone, context, seeds, run.sampling)
            decoded.tokens.cpu()
            elapsed = perf_counter() - start
            if number:
                seconds[name].append(elapsed)
                traces[name].append(decoder(run.backbone, context, seeds, run.sampling, timed=True).trace)
    return (
        {name: median(values) for name, values in seconds.items()},
        {name: metrics.draft_fraction(values) for name, values in traces.items()},
    )


def _decode(run: Run, decoder: Decoder, prompts: list[Prompt], name: str, directory: Path, drawn: bool) -> None:
    """Makes the parts of one decoder that are not there, shared with the other processes. A part holds tokens
    [B, h, w] int64, nll [B] float64, the trace and, of images that are ``drawn``, their texture [B] and, where there is
    a scorer, whether they are right [B]."""
    directory.mkdir(parents=True, exist_ok=True)
    batches, scorer = _batches(prompts, run.cfg.decode.batch_size), _optional(run, "scorer")
    with run.progress(total=len(batches), desc=name, unit="batch") as bar:

        def is_there(i: int, again: bool) -> bool:
            there = _part(directory, i).exists()
            bar.update(there)
            return there

        for i in share_out(directory / "claims.lock", range(len(batches)), is_there):
            context, seeds = _context(run, batches[i])
            decoded = decoder(run.backbone, context, seeds, run.sampling)
            nll = metrics.negative_log_likelihood(run.backbone, context, decoded.tokens, run.sampling)
            tensors = {"tokens": decoded.tokens, "nll": nll}
            tensors |= {f"trace.{key}": tensor for key, tensor in decoded.trace.tensors().items()}
            if drawn:
                images = run.backbone.decode_pixels(decoded.tokens)
                tensors |= {f"texture.{key}": tensor for key, tensor in metrics.texture(images).items()}
                if scorer is not None:
                    tensors["right"] = torch.as_tensor(scorer(images.numpy(), [p.text for p in batches[i]]))
            tensors = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
            write_atomically(_part(directory, i), safetensors.torch.save(tensors))
            bar.update()


def _gather(directory: Path, parts: int) -> tuple[dict[str, Tensor], list[Trace]]:
    """What the parts hold of each image, [N, ...], and a trace a batch."""
    loaded = [safetensors.torch.load_file(_part(directory, i)) for i in range(parts)]
    traces = [Trace.of_tensors(_under("trace.", part)) for part in loaded]
    images = {key: torch.cat([part[key] for part in loaded]) for key in loaded[0] if not key.startswith("trace.")}
    return images, traces


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _part(directory: Path, i: int) -> Path:
    return directory / f"{i:05d}.safetensors"


def _batches(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _can_draw(run: Run) -> bool:
    """Whether the backbone can make pixels. If not, a warning says why; tokens are kept in any case."""
    try:
        run.backbone.decode_pixels(torch.zeros(1, run.backbone.grid.height, run.backbone.grid.width, dtype=torch.int64))
    except FileNotFoundError as error:
        log.warning("no pictures: %s", error)
        return False
    return True


def _by_category(run: Run, prompts: list[Prompt], right: Tensor) -> dict | None:
    category = _optional(run, "category")
    if category is None:
        return None
    groups: dict[str, list[bool]] = {}
    for prompt, ok in zip(prompts, right.tolist(), strict=True):
        groups.setdefault(category(prompt.text), []).append(ok)
    return {name: metrics.wilson(sum(oks), len(oks)) for name, oks in sorted(groups.items())}


def _draw(run: Run, directory: Path, entries: dict, pictures: dict, captions: list[str]) -> None:
    main = [name for name in run.cfg.decoder if pictures[name] is not None]
    if main and captions:
        plots.image_grid({name: pictures[name] for name in main}, captions, directory / "images.png")
    drafting = {name: entries[name].acceptance for name in run.cfg.decoder if entries[name].acceptance.total.judged}
    for name, acceptance in drafting.items():
        plots.acceptance_map(acceptance.map, name, directory / f"acceptance_map_{name}.png")
    if drafting:
        plots.acceptance_bars(drafting, directory / "acceptance.png")
    if "ar" in entries and len(entries) > 1:
        points = []
        for entry, (series, label) in zip(entries.values(), curves(run), strict=True):
            score, low, high = entry.scene_score or (None, None, None)
            points.append({
                "series": series, "label": label, "speedup": entries["ar"].passes / entry.passes,
                "score": score, "low": low, "high": high, "nll": entry.nll,
            })  # fmt: skip
        plots.speed_fidelity(points, directory / "speed_fidelity.png")


def curves(run: Run) -> list[tuple[str, str]]:
    """(curve, label on it) of each decoder in a figure: a decoder and its variations are a curve, labelled by what
    varies."""
    dials: dict[str, list[str]] = {}
    for variation in run.cfg.decode.vary:
        name, setting = variation.split("=", 1)[0].split(".", 1)
        dials.setdefault(name, []).append(setting)
    found = []
    for name, node in decoder_nodes(run).items():
        family = name.split(" ")[0]
        settings = dials.get(family, [])
        short = [setting.rsplit(".", 1)[-1] for setting in settings]
        values = [str(OmegaConf.select(node, setting)) for setting in settings]
        found.append((f"{family} ({', '.join(short)})" if short else family, ", ".join(values)))
    return found
