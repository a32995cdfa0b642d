"""The predictors, by hand, and which positions they are trained on."""

import pytest
import torch

from ssd_train.grid import Grid
from ssd_train.heads.predictors import (
    Direction,
    Heads,
    HeadSpec,
    Predictor,
    name,
    pairs,
    source_rectangle,
    widen,
)

H, V = Direction.HORIZONTAL, Direction.VERTICAL


def randomised(module, seed=0):
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def test_the_predictor_is_the_published_formula():
    """f(z) = W0 z + W2(SiLU(W1 n) * W3 n), n = RMSNorm(W0 z), written out with loops."""
    d, m = 3, 5
    f = randomised(Predictor(d, m).double())
    z = torch.randn(2 * d, dtype=torch.float64)
    w0, w1, w2, w3 = (layer.weight.tolist() for layer in (f.w0, f.w1, f.w2, f.w3))

    def times(w, x):
        return [sum(a * b for a, b in zip(row, x, strict=True)) for row in w]

    y = times(w0, z.tolist())
    rms = (sum(v * v for v in y) / d + 1e-6) ** 0.5
    n = [g * v / rms for g, v in zip(f.norm.weight.tolist(), y, strict=True)]
    gate = [a / (1 + 2.718281828459045**-a) * b for a, b in zip(times(w1, n), times(w3, n), strict=True)]
    expected = [a + b for a, b in zip(y, times(w2, gate), strict=True)]
    assert f(z).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("d", [8, 12])
def test_a_published_predictor_has_8_d_squared_plus_d_parameters(d):
    """134M at d = 4096 and m = 2d; all projections free of biases."""
    heads = Heads(HeadSpec(width=d, vocabulary=7, k_horizontal=1, k_vertical=0))
    assert heads.spec.hidden == 2 * d
    assert sum(p.numel() for p in heads.parameters()) == 8 * d * d + d
    assert pytest.approx(134e6, rel=0.01) == 8 * 4096**2 + 4096
    m = 5
    narrow = Heads(HeadSpec(width=d, vocabulary=7, k_horizontal=1, k_vertical=0, hidden=m))
    assert sum(p.numel() for p in narrow.parameters()) == 3 * d * m + 2 * d * d + d


def test_there_is_one_independent_predictor_an_offset():
    heads = Heads(HeadSpec(width=4, vocabulary=7, k_horizontal=2, k_vertical=3))
    assert list(heads.predictors) == ["horizontal_1", "horizontal_2", "vertical_1", "vertical_2", "vertical_3"]
    assert [name(*pair) for pair in heads.spec.offsets()] == list(heads.predictors)
    one = sum(p.numel() for p in heads.predictors["vertical_2"].parameters())
    assert len({id(p) for p in heads.parameters()}) == len(list(heads.parameters()))
    assert sum(p.numel() for p in heads.parameters()) == 5 * one
    z = torch.randn(8)
    heads(V, 2, z).square().sum().backward()
    with_gradient = {key for key, f in heads.predictors.items() if f.w0.weight.grad is not None}
    assert with_gradient == {"vertical_2"}


def test_untrained_heads_predict_the_state_they_were_given():
    heads = Heads(HeadSpec(width=4, vocabulary=7, k_horizontal=1, k_vertical=1, state_scale=37.0, embedding_scale=0.1))
    hidden, embedded = torch.randn(5, 4) * 37, torch.randn(5, 4) * 0.1
    z = heads.inputs(hidden, embedded)
    assert torch.allclose(z, torch.cat([hidden / 37, embedded / 0.1], -1))
    assert torch.allclose(heads(H, 1, z), hidden / 37)
    readout = torch.nn.Linear(4, 7)
    assert torch.allclose(heads.logits(V, 1, heads(V, 1, z), readout), readout(hidden), atol=1e-4)


def test_wide_vertical_heads_see_their_sources_neighbours():
    """Zeros beyond the edge, the source in the middle; they start as the identity on the source. Horizontal heads see
    their source alone."""
    z = torch.tensor([[1.0, 10], [2, 20], [3, 30]])
    assert widen(z, 1) is z
    wide = [[0, 0, 1, 10, 2, 20], [1, 10, 2, 20, 3, 30], [2, 20, 3, 30, 0, 0]]
    assert widen(z, 3).tolist() == wide
    heads = Heads(HeadSpec(width=1, vocabulary=7, k_horizontal=1, k_vertical=1, context=3))
    assert heads(V, 1, widen(z, heads.context(V))).tolist() == [[1.0], [2.0], [3.0]]
    assert heads(H, 1, widen(z, heads.context(H))).tolist() == [[1.0], [2.0], [3.0]]


def test_token_space_heads_have_a_vocabulary_projection_of_their_own():
    heads = randomised(Heads(HeadSpec(width=4, vocabulary=7, k_horizontal=1, k_vertical=1, space="token")))
    z = torch.randn(5, 8)

    def readout(_):
        raise AssertionError("the frozen readout must not be used")

    expected = heads.predictors["vertical_1"](z) @ heads.vocabulary_projections["vertical_1"].weight.T
    assert torch.allclose(heads.logits(V, 1, heads(V, 1, z), readout), expected)
    assert sum(p.numel() for p in heads.parameters()) == 2 * (8 * 4 * 4 + 4 + 4 * 7)


def test_a_head_that_is_not_there_is_named_with_the_mend():
    heads = Heads(HeadSpec(width=4, vocabulary=7, k_horizontal=1, k_vertical=2))
    message = r"no horizontal head for offset 2; there are \[.horizontal_1., .*: set head.k_horizontal=2 and train"
    with pytest.raises(ValueError, match=message):
        heads(H, 2, torch.zeros(8))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"k_horizontal": 0, "k_vertical": 0}, "k_horizontal=0, k_vertical=0: expected >= 0 and at least one head"),
        ({"k_vertical": -1}, "k_vertical=-1"),
        ({"k_vertical": 1.0}, "k_vertical is 1.0; expected a int"),
        ({"hidden": -1}, r"width, vocabulary and hidden are \(4, 7, -1\); expected 1 or more"),
        ({"context": 2}, "context is 2; expected an odd number, 1 or more"),
        ({"space": "pixel"}, "space is 'pixel'; expected 'latent' or 'token'"),
        ({"state_scale": 0.0}, "scales must be positive numbers, got 0.0"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        HeadSpec(width=4, vocabulary=7, **wrong)


@pytest.mark.parametrize("height, width", [(4, 6), (1, 5), (5, 1), (3, 3)])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_pairs_are_all_positions_with_a_neighbour_at_the_offset(height, width, direction, offset):
    """Against a loop over the grid; offsets that reach over its edge leave nothing."""
    grid = Grid(height, width)
    x = torch.arange(height * width).view(1, height, width, 1)
    dy, dx = (0, offset) if direction is H else (offset, 0)
    expected = [
        (y * width + column, (y + dy) * width + column + dx)
        for y in range(height)
        for column in range(width)
        if y + dy < height and column + dx < width
    ]
    source, target = pairs(x, grid, direction, offset)
    assert list(zip(source.flatten().tolist(), target.flatten().tolist(), strict=True)) == expected
    rows, columns = source_rectangle(grid, direction, offset)
    assert rows * columns == len(expected)
