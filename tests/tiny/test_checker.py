from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import JanusForConditionalGeneration

from ssd_train.evaluation.metrics import energy_distance
from ssd_train.tiny.checker import check, check_batch, features, find_objects, score
from ssd_train.tiny.scenes import CATEGORIES, render, sample_scene
from ssd_train.tiny.train_vq import decode, encode

TINY = Path(__file__).parents[2] / "data" / "tiny"
N = 120


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(11)
    scenes = [sample_scene(rng, CATEGORIES[i % len(CATEGORIES)]) for i in range(N)]
    return scenes, np.stack([render(s, rng) for s in scenes]), [s.caption for s in scenes]


@pytest.fixture(scope="module")
def vq():
    return JanusForConditionalGeneration.from_pretrained(TINY).eval().model.vqmodel


def test_renders_are_right(drawn):
    _, images, captions = drawn
    result = score(images, captions)
    assert set(result) == {*CATEGORIES, "overall"}
    assert result["overall"] >= 0.97


def test_reconstructions_are_right(drawn, vq):
    _, images, captions = drawn
    assert score(decode(vq, encode(vq, images)), captions)["overall"] >= 0.95


def test_other_captions_are_wrong(drawn):
    _, images, captions = drawn
    assert check_batch(images, captions[1:] + captions[:1]).mean() <= 0.05


def test_wide_scenes_are_checked(vq):
    """Renders and the square tokenizer's reconstructions of images twice as wide, and other captions."""
    rng = np.random.default_rng(12)
    scenes = [sample_scene(rng, CATEGORIES[i % len(CATEGORIES)], width=128) for i in range(36)]
    images, captions = np.stack([render(s, rng) for s in scenes]), [s.caption for s in scenes]
    tokens = encode(vq, images)
    assert tokens.shape == (36, 16 * 32)
    assert check_batch(images, captions).mean() >= 0.95
    assert check_batch(decode(vq, tokens), captions).mean() >= 0.9
    assert check_batch(images, captions[1:] + captions[:1]).mean() <= 0.1


def test_finds_what_was_drawn(drawn):
    scenes, images, _ = drawn
    missed = 0
    for scene, found in zip(scenes, find_objects(images), strict=True):
        expected = sorted((o.shape, o.colour) for o in scene.objects)
        if len(found) != len(expected):
            missed += 1  # now and then two corners touch
            continue
        assert sorted((f.shape, f.colour) for f in found) == expected
        for f in found:
            assert min(np.hypot(f.x - o.x, f.y - o.y) for o in scene.objects) < 1.5
    assert missed <= 0.02 * N


def test_single_and_batch_agree(drawn):
    _, images, captions = drawn
    batch = check_batch(images[:12], captions[:12])
    assert [check(i, c) for i, c in zip(images[:12], captions[:12], strict=True)] == batch.tolist()


def test_a_torn_object_is_wrong(drawn):
    """The lower half of the object shifted by a quarter of its width, as when rows disagree."""
    rng = np.random.default_rng(2)
    for shape in ("circle", "square", "triangle"):
        scene = sample_scene(rng, "colour")
        obj = replace(scene.objects[0], shape=shape, x=32.0, y=32.0, radius=12.0)
        image = render(replace(scene, objects=(obj,)), rng)
        caption = f"a {obj.colour} {shape}"
        assert check(image, caption)
        torn = image.copy()
        torn[32:] = np.roll(torn[32:], 7, axis=1)
        assert not check(torn, caption)


def test_a_hole_and_an_extra_object_are_wrong(drawn):
    scenes, images, _ = drawn
    scene, image = next((s, i) for s, i in zip(scenes, images, strict=True) if s.category == "colour")
    obj = scene.objects[0]
    x, y = int(obj.x), int(obj.y)
    holed = image.copy()
    holed[y - 4 : y + 5, x - 4 : x + 5] = 128
    assert not check(holed, scene.caption)
    extra = image.copy()
    corner = (slice(0, 6) if y > 32 else slice(58, 64), slice(0, 6) if x > 32 else slice(58, 64))
    extra[corner] = (216, 40, 42)
    assert not check(extra, scene.caption)


def test_mirrored_positions_are_wrong():
    rng = np.random.default_rng(4)
    for _ in range(20):
        scene = sample_scene(rng, "position")
        image = render(scene, rng)
        axis = 1 if "of" in scene.caption else 0
        # Squares and circles survive the flip; upside-down triangles are broken anyway.
        assert check(image, scene.caption)
        assert not check(np.flip(image, axis).copy(), scene.caption)


def test_no_objects_is_wrong():
    assert not check(np.full((64, 64, 3), 128, np.uint8), "a circle")


def test_the_more_tokens_are_wrong_the_farther_pictures_are(drawn, vq):
    """Renders through the tokenizer against others of other captions (the floor), and with 10 and 50 % of their tokens
    replaced: the energy distance between what the checker measures of them, and whether chance explains it."""
    reference, tokens = decode(vq, encode(vq, drawn[1][:60])), encode(vq, drawn[1][60:120])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(vq.config.num_embeddings, tokens.shape, generator=generator)
    order = torch.rand(tokens.shape, generator=generator)
    measured = [
        energy_distance(*(torch.tensor(features(images)) for images in (reference, decode(vq, changed))))
        for changed in (tokens.where(order > share, noise) for share in (0, 0.1, 0.5))
    ]
    distances, p = zip(*measured, strict=True)
    assert 0 < distances[0] < distances[1] < distances[2] < 1
    assert p[0] > 0.01 > p[1] >= p[2] == 0.001
