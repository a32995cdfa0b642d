"""Pictures of prompt sources, in the colours that people see."""

import io

import numpy as np
import pytest
from PIL import Image

from ssd_train.pictures import Picture

GREY = np.array([[0, 128, 255]], dtype=np.uint8)


def png(image: Image.Image, **settings) -> bytes:
    file = io.BytesIO()
    image.save(file, "png", **settings)
    return file.getvalue()


def alpha(rgb, opacity):
    return Image.fromarray(np.array([[[*rgb, opacity]]], dtype=np.uint8), "RGBA")


def palette():
    image = Image.new("P", (1, 1), 0)
    image.putpalette([10, 20, 30])
    return image


CASES = {
    "grey": (png(Image.fromarray(GREY)), [[[g] * 3 for g in (0, 128, 255)]]),
    "16 bits": (png(Image.fromarray(GREY.astype(np.uint16) * 257)), [[[g] * 3 for g in (0, 128, 255)]]),
    "transparent": (png(alpha((200, 0, 0), 0)), [[[255, 255, 255]]]),
    "half": (png(alpha((0, 0, 0), 128)), [[[127, 127, 127]]]),
    "opaque": (png(alpha((1, 2, 3), 255)), [[[1, 2, 3]]]),
    "palette": (png(palette()), [[[10, 20, 30]]]),
    "palette, transparent": (png(palette(), transparency=0), [[[255, 255, 255]]]),
}


@pytest.mark.parametrize("content, expected", CASES.values(), ids=CASES.keys())
def test_a_picture_is_what_people_see(tmp_path, content, expected):
    (tmp_path / "0.png").write_bytes(content)
    for value in content, "0.png", str(tmp_path / "0.png"), {"bytes": content, "path": None}, {"path": "0.png"}:
        picture = Picture(value, tmp_path, "here")
        assert picture().tolist() == expected
        assert picture().dtype == np.uint8
        assert picture.digest() == Picture(content, tmp_path, "").digest()


@pytest.mark.parametrize(
    "value, message",
    [
        (CASES["grey"][0][:-30], r"prompts.jsonl, line 2: no whole picture in its bytes \(.*\); replace it"),
        (b"a cat", r"prompts.jsonl, line 2: no whole picture in its bytes"),
        ("cut.png", r"prompts.jsonl, line 2: no whole picture in cut.png \(.*truncated.*\); replace it"),
        ("none.png", r"line 2: the picture .*/none.png cannot be read \(No such file .*\); paths are relative to the"),
        (7, r"prompts.jsonl, line 2: '7' is no picture; expected an image file's path or its bytes"),
        ({"bytes": None, "path": None}, r"line 2: 'None' is no picture"),
    ],
)
def test_what_is_no_picture_is_named_with_its_row(tmp_path, value, message):
    (tmp_path / "cut.png").write_bytes(png(Image.effect_noise((64, 64), 50))[:2000])
    with pytest.raises(ValueError, match=message):
        Picture(value, tmp_path, "prompts.jsonl, line 2")()


def test_another_picture_has_another_digest(tmp_path):
    digests = {Picture(content, tmp_path, "").digest() for content, _ in CASES.values()}
    assert len(digests) == len(CASES)
