"""Does an image show what its caption says? A strict, classical scene checker. Pure numpy.

Objects are the connected patches of saturated pixels. Each is compared with the three shapes, fitted to its
area and centre; what overlaps none of them well enough is *broken*, and an image with a broken, missing or
surplus object is wrong. So an object that a lossy decoder melted or tore costs the point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from .scenes import CATEGORIES, COLOURS, SHAPES, Item, Requirement, parse_caption, related, signed_distance

MIN_CHROMA = 55  # grey levels between the largest and the smallest channel of an object's pixels
MIN_AREA = 10  # pixels; smaller saturated specks are no objects
MIN_OVERLAP = 0.90  # intersection over union with the fitted shape
MIN_PURITY = 0.9  # share of an object's pixels that have its colour
SLACK = 2.0  # pixels by which a relation may fall short of the renderer's own margin

# Area in units of radius squared, and how far the centroid lies below the centre in units of radius.
_AREA = {"circle": np.pi, "square": 1.8**2, "triangle": 3 * 3**0.5 * 0.65**2}
_DROP = {"circle": 0.0, "square": 0.0, "triangle": 0.325}
_REFINE = [(0.0, 0.0, 1.0)] + [(dx, dy, s) for s in (0.96, 1.0, 1.04) for dx in (-0.5, 0, 0.5) for dy in (-0.5, 0, 0.5)]


@dataclass(frozen=True)
class Found:
    """An object in an image: shape (None: broken), colour, centre in pixels, overlap with the shape, area in pixels,
    and how far its mean colour is from the nominal one, in grey levels."""

    shape: str | None
    colour: str
    x: float
    y: float
    overlap: float
    area: int = 0
    colour_error: float = 0.0


def _directions(rgb: np.ndarray) -> np.ndarray:
    """Unit vectors of hue: RGB [...,3] less its grey part."""
    hue = rgb - rgb.mean(-1, keepdims=True)
    return hue / np.maximum(np.linalg.norm(hue, axis=-1, keepdims=True), 1e-6)


_HUES = _directions(np.array(list(COLOURS.values()), dtype=np.float64))


def _grow(labels: np.ndarray) -> np.ndarray:
    """The largest label within one pixel, diagonals included; int [B,H,W]."""
    for axis in (1, 2):
        wide = np.pad(labels, [(1, 1) if a == axis else (0, 0) for a in range(3)])
        n = labels.shape[axis]
        labels = np.maximum.reduce([np.take(wide, range(k, k + n), axis) for k in range(3)])
    return labels


def _components(mask: np.ndarray) -> np.ndarray:
    """Connected components of bool [B,H,W]: int labels, 0 outside, equal within a component."""
    labels = np.arange(1, mask[0].size + 1).reshape(mask[0].shape) * mask
    while True:
        grown = _grow(labels) * mask
        if (grown == labels).all():
            return labels
        labels = grown


def _fit(mask: np.ndarray) -> Found:
    """The shape that overlaps a component bool [64,width] best; its colour is yet to be filled in."""
    area = mask.sum()
    y, x = (c.mean() + 0.5 for c in np.nonzero(mask))
    best = Found(None, "", x, y, 0.0)
    for shape in SHAPES:
        r = (area / _AREA[shape]) ** 0.5
        for dx, dy, scale in _REFINE:
            cx, cy = float(x + dx), float(y + dy - _DROP[shape] * r)
            inside = signed_distance(shape, cx, cy, r * scale, mask.shape[1]) < 0
            overlap = (inside & mask).sum() / (inside | mask).sum()
            if overlap > best.overlap:
                best = Found(shape, "", cx, cy, float(overlap))
    return best


def find_objects(images: np.ndarray) -> list[list[Found]]:
    """The objects of each image of uint8 [B,64,width,3]."""
    pixels = images.astype(np.float64)
    saturated = np.ptp(pixels, axis=-1) > MIN_CHROMA
    hue = (_directions(pixels) @ _HUES.T).argmax(-1)
    out = []
    for image, labels, hues in zip(pixels, _components(saturated), hue, strict=True):
        found = []
        for label, area in zip(*np.unique(labels[labels > 0], return_counts=True), strict=True):
            if area < MIN_AREA:
                continue
            mask = labels == label
            votes = np.bincount(hues[mask], minlength=len(COLOURS))
            best = _fit(mask)
            whole = best.overlap >= MIN_OVERLAP and votes.max() >= MIN_PURITY * area
            colour = list(COLOURS)[votes.argmax()]
            error = float(np.linalg.norm(image[mask].mean(0) - COLOURS[colour]))
            shape = best.shape if whole else None
            found.append(replace(best, shape=shape, colour=colour, area=int(area), colour_error=error))
        out.append(found)
    return out


def _fits(found: Found, item: Item) -> bool:
    return found.shape == item.shape and item.colour in (None, found.colour)


def satisfies(found: list[Found], requirement: Requirement) -> bool:
    """Whether the objects of an image are exactly the ones required."""
    wanted = [item for item in requirement.items for _ in range(item.count)]
    if len(found) != len(wanted) or any(f.shape is None for f in found):
        return False
    return any(
        all(_fits(f, item) for f, item in zip(order, wanted, strict=True))
        and (
            requirement.relation is None
            or related(requirement.relation, (order[0].x, order[0].y), (order[1].x, order[1].y), SLACK)
        )
        for order in permutations(found)
    )


def check_batch(images: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """bool [B]: whether each image of uint8 [B,64,width,3] shows what its caption says."""
    requirements = [parse_caption(c) for c in captions]
    return np.array([satisfies(f, r) for f, r in zip(find_objects(images), requirements, strict=True)], bool)


def features(images: np.ndarray) -> np.ndarray:
    """What an energy distance compares of each image of uint8 [B,64,width,3], float64 [B,12]. Of its objects, 0 if
    there are none: number, overlap with the fitted shapes on average and at worst, mean area, mean x and y, spread,
    colour error, and how rough the colour within them is. Of all pixels: mean and deviation of the luma, and the
    energy of its finest detail outside the objects."""
    luma = images.mean(-1)
    detail = np.abs(
        4 * luma[:, 1:-1, 1:-1] - luma[:, :-2, 1:-1] - luma[:, 2:, 1:-1] - luma[:, 1:-1, :-2] - luma[:, 1:-1, 2:]
    )
    saturated = _grow((np.ptp(images.astype(np.int64), axis=-1) > MIN_CHROMA).astype(np.int64)) > 0
    rows = []
    for found, grey, fine, inside in zip(find_objects(images), luma, detail, saturated[:, 1:-1, 1:-1], strict=True):
        x, y, overlap, area, error = (
            np.array([getattr(f, name) for f in found] or [0.0])
            for name in ("x", "y", "overlap", "area", "colour_error")
        )
        rows.append([
            len(found), overlap.mean(), overlap.min(), area.mean(), x.mean(), y.mean(), x.std() + y.std(), error.mean(),
            fine[inside].mean() if inside.any() else 0.0, grey.mean(), grey.std(), fine[~inside].mean(),
        ])  # fmt: skip
    return np.array(rows)


def check(image: np.ndarray, caption: str) -> bool:
    """Whether one image, uint8 [64,width,3], shows what its caption says."""
    return bool(check_batch(image[None], [caption])[0])


def category(caption: str) -> str:
    """The category, one of `CATEGORIES`, that a caption belongs to."""
    return parse_caption(caption).category


def score(images: np.ndarray, captions: Sequence[str]) -> dict[str, float]:
    """Share of right images by category, and `overall`: the mean over the categories present."""
    right = check_batch(images, captions)
    categories = np.array([category(c) for c in captions])
    by = {c: float(right[categories == c].mean()) for c in CATEGORIES if (categories == c).any()}
    return {**by, "overall": float(np.mean(list(by.values())))}
