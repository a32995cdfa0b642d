"""Decoders compared on the same prompts and seeds, with the heads as exported.

What was decoded is kept under ``parts`` (see :mod:`ssd_train.runs.decoders`).
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from ssd_train.config import Stage
from ssd_train.decoding.engine import Decoded
from ssd_train.decoding.trace import Trace
from ssd_train.draws import sample_seed
from ssd_train.evaluation import metrics, plots, report
from ssd_train.heads.export import read_config, write_card
from ssd_train.processes.files import load_tensors, write_atomically
from ssd_train.prompts import Prompt, Split
from ssd_train.runs import tracking
from ssd_train.runs.decoders import (
    Sample,
    configured_decoders,
    decode_parts,
    decoder_nodes,
    identity,
    make_decoders,
    picture_shape,
    time_decoders,
)
from ssd_train.runs.run import Run

log = logging.getLogger(__name__)


def check(run: Run) -> None:
    """Raises ValueError if there are too few prompts, a decoder cannot be built, or decode.heads are not there,
    InstantiationException for a logger that is not."""
    tracking.check(run.cfg)
    run.prompts([Split.TEST], run.cfg.decode.prompts)
    configured_decoders(run)
    _optional(run, "scorer"), _optional(run, "category"), _optional(run, "features")
    if run.cfg.decode.heads or (Stage.export not in run.cfg.stages and (run.heads_dir / "config.json").exists()):
        read_config(run.heads_dir)


def run(run: Run, folder: str = "decode") -> None:
    """Leaves the report in this folder of the output."""
    run.remove_strays()
    cfg, backbone = run.cfg.decode, run.backbone
    prompts = run.prompts([Split.TEST], cfg.prompts)
    samples = [Sample(p.text, sample_seed(run.cfg.seed, p.index)) for p in prompts]
    decoders = make_decoders(run)
    directory = run.output / folder
    drawn = picture_shape(run) is not None
    content = drawn, run.cfg.model.get("scorer"), run.cfg.model.get("features"), [[p.index, p.text] for p in prompts]
    parts = {name: run.output / "parts" / identity(run, name, d, *content) for name, d in decoders.items()}
    seconds, drafting = time_decoders(run, decoders, samples[: cfg.timed_images])
    scorer, features = _optional(run, "scorer"), _optional(run, "features")

    def measure(batch: Sequence[Sample], decoded: Decoded) -> dict[str, Tensor]:
        """The trace and, of images that are drawn, their texture [B] and, if there are such settings, features [B, D]
        and whether they are right [B]."""
        tensors = {f"trace.{key}": tensor for key, tensor in decoded.trace.tensors().items()}
        if drawn:
            images = backbone.decode_pixels(decoded.tokens)
            tensors |= {f"texture.{key}": tensor for key, tensor in metrics.texture(images).items()}
            if features is not None:
                tensors["features"] = torch.as_tensor(features(images.numpy()))
            if scorer is not None:
                tensors["right"] = torch.as_tensor(scorer(images.numpy(), [sample.text for sample in batch]))
        return tensors

    files = {name: decode_parts(run, d, samples, name, parts[name], measure) for name, d in decoders.items()}
    again = None
    if features is not None and drawn and "ar" in decoders and len(decoders) > 1 and len(samples) > 1:
        # How far apart two sets of AR's pictures are, which no decoder can be told to be better than.
        others = [Sample(sample.text, sample_seed(sample.seed, 1)) for sample in samples]
        folder = parts["ar"].with_name(f"{parts['ar'].name}-again")
        again = decode_parts(run, decoders["ar"], others, "ar, other seeds", folder, measure)
    run.meet()
    if run.world.rank > 0:
        return
    (directory / "tokens").mkdir(parents=True, exist_ok=True)
    entries, pictures = {}, {}
    first = {prompt.text: i for i, prompt in reversed(list(enumerate(prompts)))}
    shown = sorted(first.values())[: cfg.pictures]  # a caption once
    of_ar = _gather(files["ar"])[0] if again else None
    if again and all(prompt.image for prompt in prompts):
        real = torch.as_tensor(features(np.stack([prompt.image() for prompt in prompts])))
    else:
        real = None
    for name, decoder in decoders.items():
        found, traces = _gather(files[name])
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
            distance=None if of_ar is None else _distance(of_ar, _gather(again)[0] if name == "ar" else found, real),
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


def _optional(run: Run, name: str) -> Callable | None:
    """What model.<name> says, where the model has it."""
    return instantiate(run.cfg.model[name]) if run.cfg.model.get(name) else None


def _gather(files: list[Path]) -> tuple[dict[str, Tensor], list[Trace]]:
    """What the parts hold of each image, [N, ...], and a trace a batch."""
    loaded = [load_tensors(file, "run the same command again to make it again") for file in files]
    traces = [Trace.of_tensors(_under("trace.", part)) for part in loaded]
    images = {key: torch.cat([part[key] for part in loaded]) for key in loaded[0] if not key.startswith("trace.")}
    return images, traces


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _distance(of_ar: dict[str, Tensor], found: dict[str, Tensor], real: Tensor | None) -> dict[str, float | None]:
    """Of the pictures' features to AR's, and to the ``real`` ones."""
    to_ar, p = metrics.energy_distance(of_ar["features"], found["features"])
    return {
        "to_ar": to_ar, "p": p, "to_real": None if real is None else metrics.energy_distance(real, found["features"])[0]
    }  # fmt: skip


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
