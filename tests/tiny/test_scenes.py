import numpy as np
import pytest

from ssd_train.tiny.scenes import (
    CATEGORIES,
    GRID,
    RELATIONS,
    SIZE,
    Item,
    Requirement,
    object_patches,
    parse_caption,
    related,
    render,
    sample_scene,
)


def draw(seed: int, category: str | None = None):
    rng = np.random.default_rng(seed)
    scene = sample_scene(rng, category)
    return scene, render(scene, rng)


@pytest.mark.parametrize("category", CATEGORIES)
def test_same_seed_same_scene(category):
    (a, image_a), (b, image_b), (_, image_c) = draw(3, category), draw(3, category), draw(4, category)
    assert a == b
    assert a.category == category
    assert image_a.shape == (SIZE, SIZE, 3)
    assert image_a.dtype == np.uint8
    np.testing.assert_array_equal(image_a, image_b)
    assert (image_a != image_c).any()


def test_captions_parse_back():
    for seed in range(300):
        scene, _ = draw(seed)
        requirement = parse_caption(scene.caption)
        assert requirement.category == scene.category
        assert requirement.text() == scene.caption
        assert sum(item.count for item in requirement.items) == len(scene.objects)


def test_parse_known_captions():
    assert parse_caption("a circle") == Requirement((Item(1, "circle"),))
    assert parse_caption("three green triangles") == Requirement((Item(3, "triangle", "green"),))
    pair = (Item(1, "circle", "red"), Item(1, "square", "blue"))
    assert parse_caption("a red circle left of a blue square") == Requirement(pair, "left of")
    assert parse_caption("a red circle and a blue square") == Requirement(pair)


@pytest.mark.parametrize("text", ["", "a dog", "two circle", "a circles", "a red circle near a blue square"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="grammar"):
        parse_caption(text)


def test_objects_lie_inside_and_apart():
    for seed in range(100):
        scene, _ = draw(seed)
        for i, a in enumerate(scene.objects):
            assert a.radius < a.x < SIZE - a.radius
            assert a.radius < a.y < SIZE - a.radius
            for b in scene.objects[:i]:
                assert np.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius


@pytest.mark.parametrize("relation", RELATIONS)
def test_relations_hold_one_way(relation):
    for seed in range(200):
        scene, _ = draw(seed, "position")
        if parse_caption(scene.caption).relation == relation:
            a, b = ((o.x, o.y) for o in scene.objects)
            assert related(relation, a, b)
            assert not related(relation, b, a)


def test_object_patches_cover_the_saturated_pixels():
    scene, _ = draw(5)
    image = render(scene, np.random.default_rng(0), texture=0.0).astype(int)
    patches = object_patches(scene)
    assert patches.shape == (GRID, GRID)
    pixels = patches.repeat(SIZE // GRID, 0).repeat(SIZE // GRID, 1)
    saturated = np.ptp(image, axis=-1) > 55
    assert saturated.any()
    assert not (saturated & ~pixels).any()


def test_a_wide_scene_fills_its_canvas():
    """Same captions, objects all over it, and colours of the ground no wilder than a square scene's."""
    rng, centres, ground = np.random.default_rng(8), [], {SIZE: [], 2 * SIZE: []}
    for seed in range(40):
        for width, values in ground.items():
            scene = sample_scene(np.random.default_rng(seed), width=width)
            image = render(scene, rng)
            assert image.shape == (SIZE, width, 3)
            assert object_patches(scene).shape == (GRID, GRID * width // SIZE)
            assert all(o.radius < o.x < width - o.radius and o.radius < o.y < SIZE - o.radius for o in scene.objects)
            assert scene.caption == sample_scene(np.random.default_rng(seed)).caption
            values.append(np.quantile(image[np.ptp(image.astype(int), axis=-1) < 30], [0.01, 0.99]))
        centres += [o.x for o in scene.objects]
    assert min(centres) < SIZE / 2
    assert max(centres) > 1.5 * SIZE
    square, wide = (np.mean(values, 0) for values in ground.values())
    np.testing.assert_allclose(square, wide, atol=10)


def test_texture_zero_is_calm():
    rng = np.random.default_rng(1)
    scene = sample_scene(rng)
    rough, calm = render(scene, rng).astype(float), render(scene, rng, texture=0.0).astype(float)
    assert np.abs(np.diff(calm, axis=0)).mean() < 0.5 * np.abs(np.diff(rough, axis=0)).mean()
