"""Decoders compared on the same prompts and seeds, with the heads as exported."""

import copy
import logging
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import safetensors.torch
import torch
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from torch import Tensor
from tqdm import tqdm

from ssd_train import metrics, plots, report
from ssd_train.backbones.base import PromptBatch
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.parts import Trace
from ssd_train.draws import sample_seed
from ssd_train.export import load_heads, read_config, write_card
from ssd_train.files import write_atomically
from ssd_train.prompts import Prompt, Split
from ssd_train.run import Run

log = logging.getLogger(__name__)


def check(run: Run) -> None:
    """Raises ValueError if there are too few prompts, a decoder cannot be built, or decode.heads are not there."""
    run.prompts([Split.TEST], run.cfg.decode.prompts)
    configured_decoders(run)
    _optional(run, "scorer"), _optional(run, "category")
    if run.cfg.decode.heads:
        read_config(run.heads_dir)


def run(run: Run) -> None:
    cfg, backbone = run.cfg.decode, run.backbone
    prompts = run.prompts([Split.TEST], cfg.prompts)
    decoders = make_decoders(run)
    seconds, drafting = _time(run, decoders, prompts[: cfg.timed_images])
    directory = run.output / "decode"
    (directory / "tokens").mkdir(parents=True, exist_ok=True)
    scorer = _optional(run, "scorer")
    entries, pictures = {}, {}
    first = {prompt.text: i for i, prompt in reversed(list(enumerate(prompts)))}
    shown = sorted(first.values())[: cfg.pictures]  # a caption once
    for name, decoder in decoders.items():
        tokens, traces, nll = _decode(run, decoder, prompts, name)
        write_atomically(directory / "tokens" / f"{name}.safetensors", safetensors.torch.save({"tokens": tokens}))
        images = _pixels(run, tokens)
        pictures[name] = None if images is None else images[shown]
        score = by_category = None
        if scorer is not None and images is not None:
            right = torch.as_tensor(scorer(images.numpy(), [p.text for p in prompts]))
            score = metrics.wilson(int(right.sum()), len(prompts))
            by_category = _by_category(run, prompts, right)
        entries[name] = report.DecoderReport(
            passes=metrics.mean_passes(traces),
            wall_seconds=seconds[name],
            draft_fraction=drafting[name],
            acceptance=metrics.acceptance(traces, backbone.grid),
            nll=nll,
            exact=decoder.exact(backbone),
            scene_score=score,
            scene_score_by_category=by_category,
            texture=None if images is None else metrics.texture(images),
            code_entropy=metrics.code_entropy(tokens, backbone.vocabulary),
        )
    _draw(run, entries, pictures, [prompts[i].text for i in shown])
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
    log.info("report in %s\n%s%s", directory / "report.md", f"{run.cfg.note}\n\n" if run.cfg.note else "", table)


def configured_decoders(run: Run) -> dict[str, Decoder]:
    """The configured decoders and their variations. Raises ValueError naming the one that cannot be built."""
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
    decoders = {}
    for name, node in nodes.items():
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


def _time(run: Run, decoders: dict[str, Decoder], prompts: list[Prompt]) -> tuple[dict, dict]:
    """Median seconds an image at batch 1, and the share spent drafting, by decoder. Decoders take turns on each image,
    so that a slow spell of the machine hits all of them; the first image warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    traces: dict[str, list[Trace]] = {name: [] for name in decoders}
    warm_up = prompts[:1]
    for number, prompt in enumerate(tqdm([*warm_up, *prompts], desc="timing", unit="image")):
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


def _decode(run: Run, decoder: Decoder, prompts: list[Prompt], name: str) -> tuple[Tensor, list[Trace], float]:
    """tokens [N, h, w] int64 on the CPU, a trace a batch, mean nats a token."""
    tokens, traces, nll = [], [], []
    for batch in tqdm(list(_batches(prompts, run.cfg.decode.batch_size)), desc=name, unit="batch"):
        context, seeds = _context(run, batch)
        decoded = decoder(run.backbone, context, seeds, run.sampling)
        tokens.append(decoded.tokens.cpu())
        traces.append(decoded.trace)
        nll.append(metrics.negative_log_likelihood(run.backbone, context, decoded.tokens, run.sampling))
    return torch.cat(tokens), traces, float(torch.cat(nll).mean())


def _batches(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _pixels(run: Run, tokens: Tensor) -> Tensor | None:
    """Images [N, H, W, 3] uint8, or None with a warning where the backbone cannot make pixels: the tokens are kept."""
    try:
        return torch.cat([run.backbone.decode_pixels(part) for part in tokens.split(run.cfg.decode.batch_size)])
    except FileNotFoundError as error:
        log.warning("no pictures: %s", error)
        return None


def _by_category(run: Run, prompts: list[Prompt], right: Tensor) -> dict | None:
    category = _optional(run, "category")
    if category is None:
        return None
    groups: dict[str, list[bool]] = {}
    for prompt, ok in zip(prompts, right.tolist(), strict=True):
        groups.setdefault(category(prompt.text), []).append(ok)
    return {name: metrics.wilson(sum(oks), len(oks)) for name, oks in sorted(groups.items())}


def _draw(run: Run, entries: dict, pictures: dict, captions: list[str]) -> None:
    directory = run.output / "decode"
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
        for name, entry in entries.items():
            score, low, high = entry.scene_score or (None, None, None)
            points.append({
                "name": name, "series": name.split(" ")[0], "speedup": entries["ar"].passes / entry.passes,
                "score": score, "low": low, "high": high, "nll": entry.nll,
            })  # fmt: skip
        plots.speed_fidelity(points, directory / "speed_fidelity.png")
