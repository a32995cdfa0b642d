"""Figures, each written to a PNG file whole or not at all. N prompts, h x w token grid, H x W pixels."""

import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from torch import Tensor

from ssd_train.evaluation.metrics import Acceptance
from ssd_train.processes.files import write_atomically

DPI = 150
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito: colour-blind safe
MARKERS = "osD^v"
GREY = "#555555"


def image_grid(columns: Mapping[str, Tensor], captions: Sequence[str], path: Path | str) -> None:
    """Decoders side by side, {decoder: images [N, H, W, 3] uint8}; a row a prompt, caption on the left."""
    for name, images in columns.items():
        if len(images) != len(captions):
            raise ValueError(f"{name}: {len(images)} images for {len(captions)} captions; expected one each")
    cells = torch.stack([_resize(images.cpu()) for images in columns.values()], 1)  # [N, columns, H, W, 3]
    gap, label, head = 8, 230, 40  # pixels
    height, width = cells.shape[2] + gap, cells.shape[3] + gap
    canvas = F.pad(cells, (0, 0, 0, gap, 0, gap), value=255).permute(0, 2, 1, 3, 4)
    canvas = canvas.reshape(len(captions) * height, len(columns) * width, 3).numpy()
    total = np.array([label + canvas.shape[1], head + canvas.shape[0]])
    figure = Figure(total / DPI, dpi=DPI)
    figure.figimage(canvas, label, 0, origin="upper")
    for column, name in enumerate(columns):
        at = (label + column * width + (width - gap) / 2, canvas.shape[0] + head / 2) / total
        figure.text(*at, name, ha="center", va="center", size=9, weight="bold")
    for row, caption in enumerate(captions):
        at = (label - 14, canvas.shape[0] - row * height - (height - gap) / 2) / total
        lines = textwrap.wrap(caption, 22, max_lines=height // 24, placeholder=" …")
        figure.text(*at, "\n".join(lines), ha="right", va="center", size=8, parse_math=False)
    _save(figure, path)


def acceptance_map(rates: Tensor, title: str, path: Path | str) -> None:
    """Acceptance rates [h, w] over the token grid, NaN where nothing is ever drafted."""
    figure = _figure(5.2, 4.4)
    axes = figure.add_subplot(facecolor="#DDDDDD")
    image = axes.imshow(np.ma.masked_invalid(rates.cpu().numpy()), vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes, label="accepted at first judgement")
    axes.set_title(title, size=10)
    axes.set(xlabel="column" + ("  (grey: never drafted)" if rates.isnan().any() else ""), ylabel="row")
    for axis in axes.xaxis, axes.yaxis:
        axis.get_major_locator().set_params(integer=True)
    _save(figure, path)


def acceptance_bars(acceptances: Mapping[str, Acceptance], path: Path | str) -> None:
    """Acceptance by offset and by round, a bar a decoder; decoders that never draft are left out."""
    shown = {name: acceptance for name, acceptance in acceptances.items() if acceptance.total.judged}
    offsets = sorted({pair for acceptance in shown.values() for pair in acceptance.offsets})
    rounds = sorted({r for acceptance in shown.values() for r in acceptance.rounds})
    figure = _figure(9, 3.6)
    ratios = [max(2, len(offsets)), max(2, len(rounds))]
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=ratios)
    _bars(left, {name: [a.offsets.get(pair) for pair in offsets] for name, a in shown.items()})
    left.set_xticks(range(len(offsets)), [_arrow(*pair) for pair in offsets])
    left.set(xlabel="offset of the draft, at its first judgement", ylabel="accepted", ylim=(0, 1.05))
    _bars(right, {name: [a.rounds.get(r) for r in rounds] for name, a in shown.items()})
    right.set_xticks(range(len(rounds)), map(str, rounds))
    right.set(xlabel="round of verification")
    _legend(figure, left)
    _save(figure, path)


def speed_fidelity(points: Sequence[Mapping], path: Path | str) -> None:
    """Fidelity against step speed-up, a curve a series.

    A point is {series, label, speedup, score, low, high, nll}: its label on the curve, "" for none, the scene score
    with its interval, or None, and nats a token. The series "ar" becomes a horizontal band. Without scores there is
    only the NLL panel.
    """
    scored = [point for point in points if point["score"] is not None]
    series = dict.fromkeys(point["series"] for point in points if point["series"] != "ar")
    crowd = len(series) > 6
    figure = _figure((1.4 if crowd else 1) * (10 if scored else 5.6), 6.4 if crowd else 4.2)
    panels = figure.subplots(1, 2 if scored else 1, squeeze=False)[0]
    if scored:
        _curves(panels[0], scored, series, "score")
        panels[0].set_ylabel("scene score" if crowd else "scene score, 95 % interval")
    _curves(panels[-1], points, series, "nll")
    panels[-1].set_ylabel("NLL, nats a token")
    _legend(figure, panels[-1])
    _save(figure, path)


def _curves(axes: Axes, points: Sequence[Mapping], series: Sequence[str], key: str) -> None:
    for point in points:
        if point["series"] == "ar":
            axes.axhline(point[key], color=GREY, linewidth=1.2, linestyle="--", label="ar")
            if key == "score":
                axes.axhspan(point["low"], point["high"], color=GREY, alpha=0.15, linewidth=0)
    for i, (name, colour, marker) in enumerate(zip(series, cycle(COLOURS), cycle(MARKERS), strict=False)):
        members = sorted((point for point in points if point["series"] == name), key=lambda point: point["speedup"])
        x, y = ([point[k] for point in members] for k in ("speedup", key))
        error = None
        if key == "score" and len(series) <= 6:  # of more, the bars hide the points; the band's width tells
            error = np.abs([[point[end] - point[key] for point in members] for end in ("low", "high")])
        style = {"color": colour, "marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.2, "elinewidth": 0.9}
        axes.errorbar(x, y, error, label=name, **style)
        # Scores fall to the right, NLL rises: labels go beside the curve, a second series' on the better side.
        left = i % 2 == 0
        up = left == (key == "nll")
        for point, at in zip(members, zip(x, y, strict=True), strict=True):
            text = axes.annotate(
                point["label"],
                at,
                (-5 if left else 5, 4 if up else -4),
                textcoords="offset points",
                ha="right" if left else "left",
                va="bottom" if up else "top",
                size=7,
                color=colour,
            )
            text.set_path_effects([withStroke(linewidth=2, foreground="white")])
    axes.margins(x=0.08, y=0.08)
    # Ratios; and most decoders crowd together at the lower ones.
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=min(1, axes.get_xlim()[0]))  # AR's own: a small difference shall look small
    axes.set_xlabel("step speed-up over AR")
    _frame(axes)


def _bars(axes: Axes, groups: Mapping[str, list]) -> None:
    """{decoder: tallies, None where it has none}."""
    width = 0.8 / max(1, len(groups))
    for i, ((name, tallies), colour) in enumerate(zip(groups.items(), cycle(COLOURS), strict=False)):
        heights = {j + (i - (len(groups) - 1) / 2) * width: t.rate for j, t in enumerate(tallies) if t}
        bars = axes.bar(heights.keys(), heights.values(), 0.92 * width, label=name, color=colour)
        axes.bar_label(bars, fmt="{:.2f}", size=6, padding=1, rotation=90 if len(groups) > 1 else 0)
    _frame(axes)


def _figure(width: float, height: float) -> Figure:
    """In inches."""
    figure = Figure((width, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    return figure


def _frame(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=8)


def _arrow(rows: int, columns: int) -> str:
    """(1, -1) -> '↓1 ←1'."""
    horizontal = f"{'→' if columns > 0 else '←'}{abs(columns)}" if columns else ""
    return f"{f'↓{rows}' if rows else ''} {horizontal}".strip()


def _resize(images: Tensor) -> Tensor:
    """[N, H, W, 3] uint8: small ones repeated to about 192 pixels, large ones reduced to 384."""
    width = images.shape[2]
    if width <= 384:
        factor = max(1, round(192 / width))
        return images.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    reduced = F.interpolate(images.permute(0, 3, 1, 2).float(), scale_factor=384 / width, mode="area")
    return reduced.round().to(torch.uint8).permute(0, 2, 3, 1)


def _save(figure: Figure, path: Path | str) -> None:
    png = BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    write_atomically(Path(path), png.getvalue())
