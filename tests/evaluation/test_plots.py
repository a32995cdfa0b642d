"""What the pictures show, read back from their pixels."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from ssd_train.evaluation import plots
from ssd_train.evaluation.metrics import Acceptance, Tally


def read(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def solid(*colours, height=8, width=8):
    """Images [N, height, width, 3] of one colour each."""
    return torch.tensor(colours, dtype=torch.uint8)[:, None, None].expand(-1, height, width, 3)


def share(picture, colour, tolerance=3):
    return (abs(picture - np.array(colour)).max(-1) <= tolerance).mean()


def acceptance(rate, rounds=2):
    tally = Tally(round(1000 * rate), 1000)
    by_round = dict.fromkeys(range(1, rounds + 1), tally)
    return Acceptance(tally, by_round, {(0, 1): tally, (1, 0): tally}, PLACES)


PLACES = torch.zeros(2, 2, 2, dtype=torch.int64)
NO_DRAFTS = Acceptance(Tally(), {}, {}, PLACES)


def test_image_grid_has_a_row_a_prompt_and_a_column_a_decoder(tmp_path):
    red, green, blue, black = (200, 0, 0), (0, 200, 0), (0, 0, 200), (0, 0, 0)
    columns = {"ar": solid(red, green), "ssd": solid(blue, black)}
    plots.image_grid(columns, ["first", "second"], tmp_path / "a.png")
    picture = read(tmp_path / "a.png")
    height, width, _ = picture.shape
    cell = 192
    left = width - 2 * (cell + 8)
    for row, colours in enumerate([(red, blue), (green, black)]):
        for column, colour in enumerate(colours):
            y, x = height - (2 - row) * (cell + 8), left + column * (cell + 8)
            assert (picture[y : y + cell, x : x + cell] == colour).all(), (row, column)
            assert (picture[y : y + cell, x + cell : x + cell + 8] == 255).all()
    for row in range(2):  # captions, right beside their row
        top = height - (2 - row) * (cell + 8)
        rows = np.nonzero((picture[top : top + cell, :left] < 100).any((1, 2)))[0]
        assert abs((rows[0] + rows[-1]) / 2 - cell / 2) < 8


def test_small_images_are_enlarged_pixel_by_pixel(tmp_path):
    image = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    image[0, 10, 20] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    plots.image_grid({"ar": image}, ["dot"], tmp_path / "a.png")
    picture = read(tmp_path / "a.png")
    rows, columns = np.nonzero((picture == [255, 0, 0]).all(-1))
    assert len(rows) == 9  # one pixel became 3 x 3
    assert rows.min() == picture.shape[0] - 200 + 30
    assert columns.min() == picture.shape[1] - 200 + 60


@pytest.mark.parametrize("side, cell", [(256, 256), (384, 384), (768, 384)])
def test_large_images_are_reduced(tmp_path, side, cell):
    plots.image_grid({"ar": solid((9, 90, 200), height=side, width=side)}, ["x"], tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == (9, 90, 200)).all(-1).sum() == cell * cell


def test_long_captions_stay_in_their_row(tmp_path):
    images = solid((0, 200, 0), (0, 200, 0))
    plots.image_grid({"ar": images}, ["", "words and more words " * 50], tmp_path / "a.png")
    picture = read(tmp_path / "a.png")
    label = picture[:, : picture.shape[1] - 200]
    assert (label[-190:] < 100).any()
    assert (label[:-200] == 255).all()
    assert (label[:, :2] == 255).all()


def test_captions_are_text_not_formulas(tmp_path):
    plots.image_grid({"ar": solid((0, 0, 0))}, [r"for $\frac$ sale"], tmp_path / "a.png")


def test_image_grid_refuses_missing_images(tmp_path):
    columns = {"ar": solid((0, 0, 0), (0, 0, 0)), "ssd": solid((0, 0, 0))}
    with pytest.raises(ValueError, match="ssd: 1 images for 2 captions"):
        plots.image_grid(columns, ["a", "b"], tmp_path / "a.png")


def test_acceptance_map_colours(tmp_path):
    """viridis from 0 (dark purple) to 1 (yellow) whatever the rates are; grey where nothing was drafted."""
    rates = torch.tensor([[0.0, 1.0], [1.0, float("nan")]])
    plots.acceptance_map(rates, "map", tmp_path / "a.png")
    mixed = read(tmp_path / "a.png")
    plots.acceptance_map(torch.ones(2, 2), "map", tmp_path / "b.png")
    full = read(tmp_path / "b.png")
    yellow, purple, grey = (253, 231, 37), (68, 1, 84), (221, 221, 221)
    assert share(mixed, yellow) > 0.2
    assert share(mixed, purple) > 0.1
    assert share(mixed, grey) > 0.1
    assert share(full, yellow) > 0.45
    assert share(full, grey) < 0.01


def test_acceptance_bars_are_as_high_as_the_rates(tmp_path):
    def blue_rows(rate):
        plots.acceptance_bars({"ar": NO_DRAFTS, "ssd": acceptance(rate)}, tmp_path / "a.png")
        blue = (abs(read(tmp_path / "a.png") - np.array([0, 114, 178])).max(-1) < 3)[60:]  # below the legend
        return blue.any(1).sum()

    assert blue_rows(0.8) / blue_rows(0.4) == pytest.approx(2, rel=0.02)


def test_acceptance_bars_of_uneven_decoders_and_of_none(tmp_path):
    many = {f"ssd {r}": acceptance(0.5, r) for r in range(1, 9)}
    plots.acceptance_bars(many | {"ar": NO_DRAFTS}, tmp_path / "many.png")
    plots.acceptance_bars({"ar": NO_DRAFTS}, tmp_path / "none.png")
    colours = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in plots.COLOURS]
    assert all(share(read(tmp_path / "many.png"), colour) > 0.005 for colour in colours)
    assert all(share(read(tmp_path / "none.png"), colour) == 0 for colour in colours)


def points(score=0.8):
    scores = {"score": score, "low": score and score - 0.05, "high": score and score + 0.05}
    ar = {"series": "ar", "label": "", "speedup": 1.0, "nll": 3.2} | scores
    ssd = [{"label": f"{r}", "series": "ssd", "speedup": 8.0 - r, "nll": 4 - r / 4} | scores for r in range(4)]
    return [ar, *ssd, ssd[1] | {"label": "", "series": "sjd", "speedup": 2.0}]


def test_speed_fidelity_has_one_panel_more_with_scores(tmp_path):
    plots.speed_fidelity(points(), tmp_path / "both.png")
    plots.speed_fidelity(points(None), tmp_path / "nll.png")
    both, nll = read(tmp_path / "both.png"), read(tmp_path / "nll.png")
    assert both.shape[1] > 1.5 * nll.shape[1]
    band = (229, 229, 229)  # 15 % of the grey over white
    assert share(both[:, : both.shape[1] // 2], band, 8) > 0.03
    assert share(nll, band, 8) < 0.01
    for colour in (0, 114, 178), (213, 94, 0):  # a series keeps its colour in both panels
        for panel in both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :], nll:
            assert share(panel[80:], colour) > 1e-4


def test_speed_fidelity_with_scores_for_some(tmp_path):
    some = points()
    some[-1] |= {"score": None, "low": None, "high": None}
    plots.speed_fidelity(some, tmp_path / "a.png")
    picture = read(tmp_path / "a.png")
    half = picture.shape[1] // 2
    assert share(picture[80:, :half], (213, 94, 0)) == 0
    assert share(picture[80:, half:], (213, 94, 0)) > 1e-4


def test_a_failure_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    plots.acceptance_map(torch.ones(2, 2), "map", path)
    before = path.read_bytes()

    def half(self, file, **_):
        file.write(b"half a picture")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        plots.acceptance_map(torch.zeros(2, 2), "map", path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
