"""Captioned scenes of plain shapes on textured backgrounds: grammar, sampling, drawing. Pure numpy.

The six categories follow GenEval. A caption says everything the checker needs: `parse_caption` turns it
back into a `Requirement`. Images are `SIZE` pixels high and, unless a scene's `width` says otherwise, as wide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

SIZE = 64  # image side in pixels
GRID = 16  # image side in tokens
PATCH = SIZE // GRID  # token side in pixels
SHAPES = ("circle", "square", "triangle")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (216, 40, 42),
    "green": (36, 168, 66),
    "blue": (44, 84, 218),
    "yellow": (240, 206, 36),
}
NUMBERS = {1: "a", 2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
CATEGORIES = ("single", "colour", "two", "counting", "position", "attribution")

_ITEM = re.compile(rf"(a|two|three|four) (?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)})(s?)")


@dataclass(frozen=True)
class Item:
    """`count` objects of one shape; colour None means any."""

    count: int
    shape: str
    colour: str | None = None

    def text(self) -> str:
        words = [NUMBERS[self.count], self.colour, self.shape + ("s" if self.count > 1 else "")]
        return " ".join(w for w in words if w)


@dataclass(frozen=True)
class Requirement:
    """What an image must show: exactly these items, the first standing in `relation` to the second."""

    items: tuple[Item, ...]
    relation: str | None = None

    @property
    def category(self) -> str:
        first = self.items[0]
        if len(self.items) == 1:
            return "counting" if first.count > 1 else "colour" if first.colour else "single"
        return "position" if self.relation else "attribution" if first.colour else "two"

    def text(self) -> str:
        return f" {self.relation or 'and'} ".join(item.text() for item in self.items)


@dataclass(frozen=True)
class Object:
    """A drawn shape: centre and radius in pixels, RGB in 0..255."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    rgb: tuple[float, float, float]


@dataclass(frozen=True)
class Background:
    """A greyish ground: two RGB ends of a gradient, a pattern, smooth noise and grain (in grey levels)."""

    start: tuple[float, float, float]
    end: tuple[float, float, float]
    angle: float
    pattern: str
    contrast: float
    period: float
    clouds: float
    grain: float


@dataclass(frozen=True)
class Scene:
    category: str
    caption: str
    objects: tuple[Object, ...]
    background: Background
    width: int = SIZE


def parse_caption(text: str) -> Requirement:
    """The requirement a caption of the grammar states; ValueError for any other text."""
    text = text.strip()
    for joint in (" and ", *(f" {r} " for r in RELATIONS)):
        if joint in text:
            parts, relation = text.split(joint), None if joint == " and " else joint.strip()
            break
    else:
        parts, relation = [text], None
    items = []
    for part in parts:
        match = _ITEM.fullmatch(part)
        if match is None:
            raise ValueError(f"not a caption of the scene grammar: {text!r}")
        number, colour, shape, _ = match.groups()
        items.append(Item({w: n for n, w in NUMBERS.items()}[number], shape, colour))
    requirement = Requirement(tuple(items), relation)
    if requirement.text() != text:
        raise ValueError(f"not a caption of the scene grammar: {text!r}")
    return requirement


def sample_requirement(rng: np.random.Generator, category: str) -> Requirement:
    """What a random caption of `category` asks for."""
    colours = [str(c) for c in rng.permutation(list(COLOURS))]
    shapes = [str(s) for s in rng.permutation(SHAPES)]
    if category == "single":
        return Requirement((Item(1, shapes[0]),))
    if category == "colour":
        return Requirement((Item(1, shapes[0], colours[0]),))
    if category == "two":
        return Requirement((Item(1, shapes[0]), Item(1, shapes[1])))
    if category == "counting":
        return Requirement((Item(int(rng.integers(2, 5)), shapes[0], colours[0]),))
    pair = (Item(1, shapes[0], colours[0]), Item(1, shapes[1], colours[1]))
    if category == "position":
        return Requirement(pair, RELATIONS[rng.integers(len(RELATIONS))])
    if category == "attribution":
        return Requirement(pair)
    raise ValueError(f"unknown category {category!r}")


def related(relation: str, a: tuple[float, float], b: tuple[float, float], slack: float = 0.0) -> bool:
    """Whether centre a = (x, y) stands in `relation` to centre b: along that axis, and mostly so."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    axes = {"left of": (dx, dy), "right of": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}
    along, across = axes[relation]
    return along > 10 - slack and along > abs(across) - slack


def _place(rng: np.random.Generator, n: int, relation: str | None, width: int) -> np.ndarray:
    """Centres and radii float64 [n,3] of objects that neither touch nor leave the image."""
    low, high = {1: (10.0, 13.5), 2: (9.5, 12.0), 3: (8.0, 9.5), 4: (7.5, 9.0)}[n]
    while True:
        r = rng.uniform(low, high, n)
        xy = rng.uniform(1.15 * r + 1, np.array([[width], [SIZE]]) - 1.15 * r - 1, (2, n))
        apart = all(np.hypot(*(xy[:, i] - xy[:, j])) > 1.2 * (r[i] + r[j]) + 3 for i in range(n) for j in range(i))
        if apart and (relation is None or related(relation, tuple(xy[:, 0]), tuple(xy[:, 1]))):
            return np.stack([*xy, r], 1)


def _sample_background(rng: np.random.Generator) -> Background:
    base, end = rng.uniform(80, 190), rng.uniform(80, 190)
    tint = rng.uniform(-8, 8, 3)
    return Background(
        start=tuple(base + tint),
        end=tuple(base + 0.6 * (end - base) + tint),
        angle=float(rng.uniform(0, 2 * np.pi)),
        pattern=("none", "stripes", "patches")[rng.integers(3)],
        contrast=float(rng.uniform(8, 18)),
        period=float(rng.uniform(8, 20)),
        clouds=float(rng.uniform(4, 10)),
        grain=float(rng.uniform(3, 6)),
    )


def sample_scene(
    rng: np.random.Generator,
    category: str | None = None,
    wanted: Callable[[str], bool] = lambda caption: True,
    width: int = SIZE,
) -> Scene:
    """A scene of `category` (uniformly random when None) with a wanted caption, `width` pixels wide."""
    category = category or CATEGORIES[rng.integers(len(CATEGORIES))]
    requirement = sample_requirement(rng, category)
    while not wanted(requirement.text()):
        requirement = sample_requirement(rng, category)
    items = [item for item in requirement.items for _ in range(item.count)]
    # Colours the caption leaves open still differ between objects.
    spare = iter(rng.permutation([c for c in COLOURS if c not in {i.colour for i in requirement.items}]))
    objects = []
    for item, (x, y, r) in zip(items, _place(rng, len(items), requirement.relation, width), strict=True):
        colour = item.colour or str(next(spare))
        rgb = tuple(np.clip(np.array(COLOURS[colour]) + rng.uniform(-10, 10, 3), 0, 255))
        objects.append(Object(item.shape, colour, float(x), float(y), float(r), rgb))
    return Scene(category, requirement.text(), tuple(objects), _sample_background(rng), width)


@cache
def _centres(width: int) -> np.ndarray:
    """y and x of the pixel centres, float64 [2,64,width]."""
    return np.mgrid[0:SIZE, 0:width] + 0.5


def signed_distance(shape: str, x: float, y: float, radius: float, width: int = SIZE) -> np.ndarray:
    """Pixels from each pixel centre to the outline of a shape, negative inside; float64 [64,width]."""
    yy, xx = _centres(width)
    dx, dy = xx - x, yy - y
    if shape == "circle":
        return np.hypot(dx, dy) - radius
    if shape == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - 0.9 * radius
    inner = 0.65 * radius  # the inscribed circle's radius; shifted down so that the bounding box is centred
    dy = dy - 0.5 * inner
    return np.maximum(dy, np.abs(dx) * 0.75**0.5 - 0.5 * dy) - inner


def _outline(obj: Object, width: int) -> np.ndarray:
    return signed_distance(obj.shape, obj.x, obj.y, obj.radius, width)


def object_patches(scene: Scene) -> np.ndarray:
    """bool [16,width/4]: the token patches that an object overlaps."""
    inside = np.any([_outline(o, scene.width) < 0.5 for o in scene.objects], axis=0)
    return inside.reshape(GRID, PATCH, scene.width // PATCH, PATCH).any((1, 3))


def _clouds(rng: np.random.Generator, width: int) -> np.ndarray:
    """Smooth noise of about unit variance, two octaves, float64 [64,width]."""
    out = np.zeros((SIZE, width))
    for size, weight in ((8, 0.7), (4, 0.7)):  # pixels between knots
        knots = rng.standard_normal((SIZE // size + 1, -(-width // size) + 1))
        (i, f), (j, g) = ((at.astype(int), at % 1) for at in ((np.arange(n) + 0.5) / size for n in (SIZE, width)))
        rows = knots[i] * (1 - f)[:, None] + knots[i + 1] * f[:, None]
        # Bilinear interpolation shrinks the variance to 4/9 on average.
        out += weight * 1.5 * (rows[:, j] * (1 - g) + rows[:, j + 1] * g)
    return out


def _draw_background(bg: Background, rng: np.random.Generator, texture: float, width: int) -> np.ndarray:
    yy, xx = _centres(width)
    c, s = np.cos(bg.angle), np.sin(bg.angle)
    # The gradient stretches with the width, so that its ends are the same colours; patterns do not.
    ramp = (((xx - width / 2) * (SIZE / width) * c + (yy - SIZE / 2) * s) / SIZE + 0.5)[..., None]
    image = np.array(bg.start) * (1 - ramp) + np.array(bg.end) * ramp
    relief = bg.clouds * _clouds(rng, width)
    if bg.pattern == "stripes":
        phase = rng.uniform(0, 2 * np.pi)
        relief += bg.contrast * np.sin((xx * s - yy * c) * 2 * np.pi / bg.period + phase)
    elif bg.pattern == "patches":
        cells = [int(np.ceil(n / bg.period)) + 1 for n in (SIZE, width)]
        level = rng.uniform(-1, 1, cells)
        shift = rng.uniform(0, bg.period, 2)
        y, x = (((at + d) / bg.period).astype(int) % n for at, d, n in zip((yy, xx), shift, cells, strict=True))
        relief += 1.2 * bg.contrast * level[y, x]
    return image + texture * relief[..., None]


def render(scene: Scene, rng: np.random.Generator, texture: float = 1.0) -> np.ndarray:
    """Draw a scene, uint8 [64,width,3]; `texture` scales the background's relief and the grain (0: calm)."""
    yy, xx = _centres(scene.width)
    image = _draw_background(scene.background, rng, texture, scene.width)
    for obj in scene.objects:
        light = 1 - 0.16 * ((xx - obj.x) + (yy - obj.y)) / (1.4 * obj.radius)
        alpha = np.clip(0.5 - _outline(obj, scene.width), 0, 1)[..., None]
        image = image * (1 - alpha) + alpha * np.array(obj.rgb) * light[..., None]
    image += texture * scene.background.grain * rng.standard_normal((SIZE, scene.width, 1))
    return np.clip(image + 0.5, 0, 255).astype(np.uint8)
