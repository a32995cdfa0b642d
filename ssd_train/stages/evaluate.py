"""A suite's prompts by every decoder: pictures in the layout of the official scorer, and what can be said of them here.

``evaluate/<suite>`` of the output holds a folder of pictures a decoder, README.md with the scorer's commands, the
result files that these leave in ``results``, and report.md and report.json. What was decoded is kept under ``parts``
(see :mod:`ssd_train.runs.decoders`); pictures are drawn from there, those only that are missing.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from hydra.utils import instantiate
from safetensors import safe_open
from torch import Tensor

from ssd_train.decoding.engine import Decoded
from ssd_train.evaluation import networks, report
from ssd_train.evaluation.suites.base import Interval, ScoredSuite, Suite, SuitePrompt, load_picture
from ssd_train.evaluation.suites.published import published
from ssd_train.heads.export import read_config
from ssd_train.processes.files import Claims, read_json, share_out, write_atomically, write_json
from ssd_train.prompts import Split, split_of
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
    """Raises ValueError for official files, networks, a reference or the scorer's results that cannot be read, and for
    decoders that cannot be built."""
    suite, decoders = instantiate(run.cfg.suite), decoder_nodes(run)
    prompts = suite.prompts()[0][: suite.limit]
    configured_decoders(run)
    if run.cfg.decode.heads:
        read_config(run.heads_dir)
    if suite.inception:
        networks.load_extractor(suite.inception, torch.device("cpu"))
        if suite.reference not in decoders and not _pictures_in(suite.reference):
            raise ValueError(
                f"suite.reference={suite.reference} is neither a decoder of this run ({', '.join(decoders)}) nor a "
                "folder of pictures"
            )
    for name in decoders:
        _scores(run, suite, name, prompts)


def run(run: Run) -> None:
    """Leaves evaluate/<suite> in the output."""
    run.remove_strays()
    suite: Suite = instantiate(run.cfg.suite)
    rows, blank = suite.prompts()
    prompts = rows[: suite.limit]
    samples = [Sample(p.text, p.seed(run.cfg.seed, i)) for p in prompts for i in range(suite.images_per_prompt)]
    decoders, shape = make_decoders(run), picture_shape(run)
    # Of all rows, so that what a smaller suite.limit has made is part of what a larger one needs.
    content = suite.images_per_prompt, [[p.row, p.id, p.text, p.metadata] for p in rows]
    keys = {name: identity(run, name, decoder, *content) for name, decoder in decoders.items()}
    directory = _directory(run, suite)
    for name, key in keys.items():
        _take_over(directory / f"{name}.json", key)
    seconds, _ = time_decoders(run, decoders, samples[: run.cfg.decode.timed_images])

    def measure(_: Sequence[Sample], decoded: Decoded) -> dict[str, Tensor]:
        return {"passes": torch.tensor(decoded.trace.passes)}

    files = {
        name: decode_parts(run, decoder, samples, name, run.output / "parts" / keys[name], measure)
        for name, decoder in decoders.items()
    }
    run.meet()
    if shape:
        for name in decoders:
            _draw(run, suite, directory / name, prompts, files[name])
        run.meet()
    if run.world.rank > 0:
        return
    entries = {
        name: {
            "passes": float(_tensor(files[name], "passes").double().mean()),
            "wall_seconds": seconds[name],
            "exact": decoder.exact(run.backbone),
            "nll": float(_tensor(files[name], "nll").mean()),
            "scores": _scores(run, suite, name, prompts),
        }
        for name, decoder in decoders.items()
    }
    if shape:
        for name in decoders:
            suite.finish(directory / name, prompts)
        _judge(run, suite, prompts, shape, entries)
        write_atomically(directory / "README.md", _readme(suite, directory, decoders, shape).encode())
    contents = {
        "suite": suite.name, "model": run.backbone.name, "prompts": len(prompts), "images": len(samples),
        "rows_without_prompt": blank, "training_prompts": _trained_on(run, prompts), "decoders": entries,
        "reference": suite.reference if suite.inception else None, "pictures": shape is not None, "note": run.cfg.note,
        "device": report.device_name(run.backbone.device), "versions": report.versions(),
        "published": [row._asdict() for row in published(suite.name)],
    }  # fmt: skip
    text = _markdown(contents)
    write_json(directory / "report.json", contents)
    write_atomically(directory / "report.md", text.encode())
    log.info("report in %s\n%s", directory / "report.md", text)


def _directory(run: Run, suite: Suite) -> Path:
    return run.output / "evaluate" / suite.name


def _take_over(path: Path, key: str) -> None:
    """Notes what a decoder's pictures are made of. Raises ValueError if those that are there are of something else."""
    there = read_json(path, f"move {path.parent} away, or set another output")
    if there not in (None, {"made_of": key}):
        raise ValueError(
            f"{path.with_suffix('')} holds pictures made with other settings, prompts or code; move {path.parent} "
            "away, or set another output"
        )
    write_json(path, {"made_of": key})


def _draw(run: Run, suite: Suite, folder: Path, prompts: Sequence[SuitePrompt], files: Sequence[Path]) -> None:
    """Writes the pictures that are not there, shared with the other processes."""

    def is_there(i: int, again: bool = False) -> bool:
        return all(path.exists() for path in suite.files(folder, prompts[i]))

    folder.mkdir(parents=True, exist_ok=True)
    missing = [i for i in range(len(prompts)) if not is_there(i)]
    if not missing:
        return
    tokens = _tensor(files, "tokens").unflatten(0, (len(prompts), -1))
    with Claims(files[0].parent / "pictures.lock") as claims:
        todo = share_out(claims, missing, is_there)
        for i in run.progress(todo, desc=f"{folder.name}: pictures", unit="prompt"):
            suite.save(folder, prompts[i], run.backbone.decode_pixels(tokens[i]).numpy())
            claims.release(i)


def _tensor(files: Sequence[Path], key: str) -> Tensor:
    """One of the parts' tensors, of all images."""
    found = []
    for path in files:
        with safe_open(path, "pt") as part:
            found.append(part.get_tensor(key))
    return torch.cat(found)


def _scores(run: Run, suite: Suite, name: str, prompts: Sequence[SuitePrompt]) -> dict[str, dict] | None:
    """The official scorer's, if it has been run."""
    if not isinstance(suite, ScoredSuite):
        return None
    path = _results(_directory(run, suite), suite, name)
    if not path.exists():
        return None
    with suite.explained(path):
        found: dict[str, Interval] = suite.scores(path, prompts)
    return {category: dict(zip(("value", "low", "high"), score, strict=True)) for category, score in found.items()}


def _results(directory: Path, suite: ScoredSuite, name: str) -> Path:
    return directory / "results" / f"{name}{suite.results}"


def _judge(run: Run, suite: Suite, prompts: Sequence[SuitePrompt], shape: tuple[int, int], entries: dict) -> None:
    """Adds clip_score, fid and kid to the entries, where their networks are configured."""
    device, directory = run.backbone.device, _directory(run, suite)

    def pictures(name: str) -> Iterator[Tensor]:
        return (torch.tensor(suite.load(directory / name, prompt, shape)) for prompt in prompts)

    if suite.clip:
        clip = networks.load_clip(suite.clip, device)
        texts = [[prompt.text] * suite.images_per_prompt for prompt in prompts]
        for name, entry in entries.items():
            entry["clip_score"] = networks.clip_score(clip, zip(pictures(name), texts, strict=True), device)
    if suite.inception:
        extractor = networks.load_extractor(suite.inception, device)
        features = {name: networks.features(extractor, pictures(name), device) for name in entries}
        if (real := features.get(suite.reference)) is None:
            paths = _pictures_in(suite.reference)
            real = networks.features(extractor, (torch.tensor(load_picture(path))[None] for path in paths), device)
        for name, entry in entries.items():
            if name != suite.reference and min(len(real), len(features[name])) > 1:
                entry["fid"] = networks.frechet_inception_distance(real, features[name])
                entry["kid"] = networks.kernel_inception_distance(real, features[name], run.cfg.seed)


def _pictures_in(folder: str) -> list[Path]:
    endings = ".png", ".jpg", ".jpeg", ".webp"
    return sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in endings)


def _trained_on(run: Run, prompts: Sequence[SuitePrompt]) -> int | None:
    """How many of the prompts this configuration's heads were trained on; null where its prompts are not to be had."""
    try:
        source = run.prompts([Split.TRAIN, Split.VALIDATION], run.cfg.cache.samples)
    except ValueError:
        return None
    trained = {prompt.text.strip() for prompt in source if split_of(prompt.text) is Split.TRAIN}
    return sum(prompt.text.strip() in trained for prompt in prompts)


def _readme(suite: Suite, directory: Path, names: Sequence[str], shape: tuple[int, int]) -> str:
    lines = [f"# {suite.name}: pictures of {', '.join(names)}", "Each folder is in the layout of the official scorer."]
    if isinstance(suite, ScoredSuite):
        place = directory.resolve()
        commands = [suite.command(place / name, _results(place, suite, name), shape) for name in names]
        (directory / "results").mkdir(exist_ok=True)
        lines += ["In a checkout of it:", "\n".join(f"    {command}" for command in commands)]
        lines.append("Then run the evaluate stage again: it puts these scores into its report.")
    else:
        lines[1] = (
            "captions.jsonl in each folder has a line a picture: its file_name, its prompt and what the suite says."
        )
    return "\n\n".join(lines) + "\n"


def _markdown(contents: dict) -> str:
    entries, ar = contents["decoders"], contents["decoders"].get("ar")
    categories = list(dict.fromkeys(key for entry in entries.values() for key in entry["scores"] or {}))
    measured = {"clip_score": ("CLIP score", "{:.2f}"), "fid": ("FID", "{:.2f}"), "kid": ("KID x 1000", "{:.2f}")}
    rows = []
    for name, entry in entries.items():
        row = {"decoder": name, "exact": "yes" if entry["exact"] else "no", "passes": f"{entry['passes']:.1f}"}
        for title, key in ("step speed-up", "passes"), ("wall speed-up", "wall_seconds"):
            row[title] = f"{ar[key] / entry[key]:.2f}x" if ar else "-"
        row["NLL"] = f"{entry['nll']:.3f}"
        for category in categories:
            row[category] = _score((entry["scores"] or {}).get(category))
        for key, (title, pattern) in measured.items():
            if any(key in other for other in entries.values()):
                scale = 1000 if key == "kid" else 1
                row[title] = pattern.format(entry[key] * scale) if key in entry else "-"
        rows.append(row)
    known, blank = contents["training_prompts"], contents["rows_without_prompt"]
    notes = [
        f"{contents['prompts']} prompts, {contents['images']} images a decoder; {contents['device']}.",
        "Which of them are training prompts is not known: those are not to be had here."
        if known is None
        else f"{known} of them are also training prompts.",
        f"{blank} rows without a prompt are left out." if blank else "",
        ""
        if contents["pictures"]
        else "Tokens only: this backbone has no weights to make pixels, so there are no pictures.",
        f"FID and KID are against {contents['reference']}." if contents["reference"] else "",
        "CLIP reads the first 77 tokens of a prompt." if any("clip_score" in e for e in entries.values()) else "",
    ]
    parts = [
        f"# {contents['suite']}: {contents['model']}",
        *([f"**{contents['note']}**"] if contents["note"] else []),
        " ".join(filter(None, notes)),
        report.markdown(rows, [":--", ":-:"]),
    ]
    if contents["published"]:
        rows = [
            {
                "published": f"{row['model']}, {row['method']}",
                "source": row["source"],
                "step speed-up": _times(row["step_speedup"]),
                "wall speed-up": _times(row["wall_speedup"]),
                "scores": ", ".join(f"{key} {value:.4g}" for key, value in row["scores"].items()) or "-",
            }
            for row in contents["published"]
        ]
        parts += ["What papers report, over their own AR:", report.markdown(rows, [":--", ":--"])]
    return "\n\n".join(parts) + "\n"


def _score(score: dict | None) -> str:
    if score is None:
        return "-"
    return f"{score['value']:.3f}" + ("" if score["low"] is None else f" [{score['low']:.3f}, {score['high']:.3f}]")


def _times(x: float | None) -> str:
    return "-" if x is None else f"{x:.4g}x"
