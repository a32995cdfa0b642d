"""The comparison of decoders: ``report.json``, a contract for scripts, and ``report.md``, for people.

report.json is an object with the keys

    model       name of the backbone
    grid        [height, width] in tokens
    prompts     number of prompts; every decoder had the same ones, with the same seeds
    decoders    {name: decoder}; the baseline is the one called "ar"
    versions    {"python", "torch", "transformers", "ssd_train": version}
    device      what the times were measured on
    note        a caveat that readers must see, or null

and a decoder one with the keys

    passes          backbone passes an image, the prompt's included
    step_speedup    AR's passes over its own; null without AR, as is every comparison with AR
    wall_speedup    AR's wall_seconds over its own
    wall_seconds    seconds an image at batch 1, after warm-up: the median of several
    draft_fraction  share of the decoding time spent on drafting, 0 to 1
    acceptance      {"rate": of all judgements, or null, "by_round": {"1": rate, the table's},
                    "by_offset": {"vertical_1": rate at first judgement},
                    "map": [h][w] rates at first judgement, null where nothing was drafted,
                    "counts": [accepted, judged] behind each of these; may be absent}
    scene_score     {"value", "low", "high"}: share of images that show their caption, with its 95 % interval;
                    null where there is no checker
    nll             nats a token of the finished images under the backbone's own sampling distribution
    exact           whether its images have the distribution of AR's by construction
    nll_distance    |nll - AR's|: below AR's is no better than above, it may mean washed-out pictures
    pass_ratio      wall-clock time for each pass over AR's, step_speedup / wall_speedup
    scene_score_by_category   {category: scene score}, or null
    texture         {"laplacian_variance", "luma_deviation"} of the pictures (see metrics.texture), or null
    code_entropy    nats of the histogram of all tokens, or null
    distance        {"to_ar": energy distance of the pictures' features to AR's, 0 to 1 (see metrics.energy_distance);
                    of AR itself, to those of a second AR run with other seeds, the noise floor; "p": how often chance
                    alone makes it as large; "to_real": to the prompt source's own pictures, or null}, or null

The last six, and ``note``, may be absent. There may be further keys, such as which heads drafted.
"""

import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ssd_train
from ssd_train.evaluation.metrics import Acceptance
from ssd_train.processes.files import write_atomically

Interval = tuple[float, float, float]  # value, low, high

LEGEND = (
    "Speed-ups are against AR in the same loop; passes include the prompt's. Exact: images have AR's "
    "distribution by construction. Drafting: share of the decoding time. Accepted: drafts that passed their "
    "first judgement. Scene score: share of images that show their caption, with its 95 % interval. NLL: "
    "nats a token under the backbone (in brackets: minus AR's); below AR's is no better than above. Texture: "
    "variance of the pictures' Laplacian; well below AR's means washed out. Distance: energy distance "
    "of the pictures' features to AR's (AR's own: to a second AR run's, the noise floor), and in brackets the p of "
    "a permutation test: how often chance alone makes it as large."
)


class Kind(NamedTuple):
    """A single JSON value."""

    expected: str
    holds: Callable[[Any], bool]


class OrNull(NamedTuple):
    schema: "Schema"


Schema = Kind | OrNull | dict | list


def _number(low: float, high: float = sys.float_info.max) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, int | float) and not isinstance(x, bool) and low <= x <= high


TEXT = Kind("a string that is not empty", lambda x: isinstance(x, str) and x != "")
BOOLEAN = Kind("true or false", lambda x: isinstance(x, bool))
COUNT = Kind("an integer above 0", lambda x: isinstance(x, int) and _number(1)(x))
POSITIVE = Kind("a number above 0", _number(sys.float_info.min))
AMOUNT = Kind("a number of at least 0", _number(0))
SHARE = Kind("a number from 0 to 1", _number(0, 1))
SCORE = {"value": SHARE, "low": SHARE, "high": SHARE}
# A key that ends in "?" may be absent, "*" stands for every key, [x] is a list of x.
ACCEPTANCE = {
    "rate": OrNull(SHARE),
    "by_round": {"*": SHARE},
    "by_offset": {"*": SHARE},
    "map": [[OrNull(SHARE)]],
}
DECODER = {
    "passes": POSITIVE,
    "step_speedup": OrNull(POSITIVE),
    "wall_speedup": OrNull(POSITIVE),
    "wall_seconds": POSITIVE,
    "draft_fraction": SHARE,
    "acceptance": ACCEPTANCE,
    "scene_score": OrNull(SCORE),
    "nll": AMOUNT,
    "exact": BOOLEAN,
    "nll_distance?": OrNull(AMOUNT),
    "pass_ratio?": OrNull(POSITIVE),
    "scene_score_by_category?": OrNull({"*": SCORE}),
    "texture?": OrNull({"laplacian_variance": AMOUNT, "luma_deviation": AMOUNT}),
    "code_entropy?": OrNull(AMOUNT),
    "distance?": OrNull({"to_ar": SHARE, "p": SHARE, "to_real": OrNull(SHARE)}),
}
SCHEMA = {
    "model": TEXT,
    "grid": [COUNT],
    "prompts": COUNT,
    "decoders": {"*": DECODER},
    "versions": {"*": TEXT},
    "device": TEXT,
    "note?": OrNull(TEXT),
}


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "ssd_train": ssd_train.__version__,
    }


def device_name(device: torch.device | str = "cpu") -> str:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


@dataclass
class DecoderReport:
    """What was measured of one decoder. ``extra``: further keys; comparisons with AR are worked out."""

    passes: float
    wall_seconds: float
    draft_fraction: float
    acceptance: Acceptance
    nll: float
    exact: bool
    scene_score: Interval | None = None
    scene_score_by_category: dict[str, Interval] | None = None
    texture: dict[str, float] | None = None
    code_entropy: float | None = None
    distance: dict[str, float | None] | None = None
    extra: dict = field(default_factory=dict)

    def to_dict(self, ar: "DecoderReport | None") -> dict:
        categories = self.scene_score_by_category
        step, wall = (ar.passes / self.passes, ar.wall_seconds / self.wall_seconds) if ar else (None, None)
        measured = {key: value for key, value in vars(self).items() if key != "extra"}
        return (
            self.extra
            | measured
            | {
                "acceptance": self.acceptance.to_dict(),
                "scene_score": _interval(self.scene_score),
                "scene_score_by_category": categories and {key: _interval(x) for key, x in categories.items()},
                "step_speedup": step,
                "wall_speedup": wall,
                "pass_ratio": step / wall if ar else None,
                "nll_distance": abs(self.nll - ar.nll) if ar else None,
            }
        )


@dataclass
class Report:
    """One comparison. ``extra``: further top-level keys."""

    model: str
    grid: tuple[int, int]
    prompts: int
    decoders: dict[str, DecoderReport]
    device: str
    versions: dict[str, str] = field(default_factory=versions)
    note: str | None = None
    extra: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        ar = self.decoders.get("ar")
        own = {key: value for key, value in vars(self).items() if key != "extra"}
        decoders = {name: decoder.to_dict(ar) for name, decoder in self.decoders.items()}
        return self.extra | own | {"grid": list(self.grid), "decoders": decoders}


def write_report(report: Report, directory: Path | str) -> dict:
    """Writes report.md, which shows the PNGs that are in the directory, and then report.json, whose contents
    it returns. Raises ValueError, and writes nothing, if they break the contract."""
    directory = Path(directory)
    contents = report.to_dict()
    validate_report(contents)
    height, width = report.grid
    libraries = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    pictures = sorted(directory.glob("[!.]*.png"))
    parts = [
        f"# {report.model}: decoders compared",
        *([f"**{report.note}**"] if report.note else []),
        f"{report.prompts} prompts, {height} x {width} tokens an image; {report.device}; {libraries}.",
        table_markdown(contents),
        LEGEND,
        *(f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures),
    ]
    write_atomically(directory / "report.md", ("\n\n".join(parts) + "\n").encode())
    write_atomically(directory / "report.json", json.dumps(contents, indent=1, allow_nan=False).encode())
    return contents


def table_markdown(report: dict) -> str:
    """A row a decoder, from the contents of report.json."""
    ar = report["decoders"].get("ar")
    table = []
    for name, entry in report["decoders"].items():
        difference = f" ({entry['nll'] - ar['nll']:+.3f})" if ar and entry is not ar else ""
        table.append(
            {
                "decoder": name,
                "exact": "yes" if entry["exact"] else "no",
                "passes": f"{entry['passes']:.1f}",
                "tokens a pass": f"{math.prod(report['grid']) / entry['passes']:.2f}",
                "step speed-up": _format(entry["step_speedup"], "{:.2f}x"),
                "wall speed-up": _format(entry["wall_speedup"], "{:.2f}x"),
                "drafting": f"{entry['draft_fraction']:.1%}",
                "accepted": _format(entry["acceptance"]["by_round"].get("1"), "{:.1%}"),
                "scene score": _format(entry["scene_score"], "{0[value]:.3f} [{0[low]:.3f}, {0[high]:.3f}]"),
                "NLL": f"{entry['nll']:.3f}{difference}",
                "texture": _format(entry.get("texture"), "{0[laplacian_variance]:.0f}"),
                "distance (p)": _format(entry.get("distance"), "{0[to_ar]:.4f} ({0[p]:.3f})"),
            }
        )
    return markdown(table, [":--", ":-:"])


def markdown(table: Sequence[dict[str, str]], alignment: list[str]) -> str:
    """Rows of cells by column, all with the same columns; those beyond ``alignment`` are right-aligned."""
    alignment = alignment + ["--:"] * (len(table[0]) - len(alignment))
    rows = [table[0], alignment, *(row.values() for row in table)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def validate_report(report: dict) -> None:
    """Raises ValueError that names the first key that breaks the contract, its value and the expectation."""
    _check("report", report, SCHEMA)
    if not report["decoders"]:
        raise ValueError("report.decoders is {}; expected at least one decoder")
    if len(report["grid"]) != 2:
        raise ValueError(f"report.grid is {report['grid']}; expected [height, width]")
    height, width = report["grid"]
    ar = report["decoders"].get("ar")
    for name, entry in report["decoders"].items():
        where = f"report.decoders.{name}"
        shape = [len(row) for row in entry["acceptance"]["map"]]
        if shape != [width] * height:
            raise ValueError(f"{where}.acceptance.map has rows of {shape}; expected {height} rows of {width}")
        for key, measured in {"step_speedup": "passes", "wall_speedup": "wall_seconds"}.items():
            expected = ar[measured] / entry[measured] if ar else None
            if not _agree(entry[key], expected):
                source = f"AR's {measured} over its own" if ar else "there is no AR to compare with"
                raise ValueError(f"{where}.{key} is {entry[key]}; expected {expected}: {source}")


def _check(where: str, value: Any, schema: Schema, expected: str = "") -> None:
    expected = expected or _describe(schema)
    if isinstance(schema, OrNull):
        if value is not None:
            _check(where, value, schema.schema, expected)
        return
    if not (schema.holds(value) if isinstance(schema, Kind) else isinstance(value, type(schema))):
        raise ValueError(f"{where} is {_short(value)}; expected {expected}")
    if isinstance(schema, list):
        for i, each in enumerate(value):
            _check(f"{where}[{i}]", each, schema[0])
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            for name in value if key == "*" else [key.removesuffix("?")]:
                if name in value:
                    _check(f"{where}.{name}", value[name], inner)
                elif name == key:
                    raise ValueError(f"{where}.{name} is missing; expected {_describe(inner)}")
    if schema is SCORE and not value["low"] <= value["value"] <= value["high"]:
        raise ValueError(f"{where} is {_short(value)}; expected low <= value <= high")


def _describe(schema: Schema) -> str:
    if isinstance(schema, OrNull):
        return f"{_describe(schema.schema)}, or null"
    if isinstance(schema, Kind):
        return schema.expected
    return "a list" if isinstance(schema, list) else "an object"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _agree(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-3)


def _interval(x: Interval | None) -> dict | None:
    return x and dict(zip(("value", "low", "high"), x, strict=True))


def _format(x: Any, pattern: str) -> str:
    return "-" if x is None else pattern.format(x)
