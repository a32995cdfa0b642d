"""The predictors, by hand, and which positions they are trained on."""

import pytest
import torch
import torch.nn.functional as F

from ssd_train.grid import Grid
from ssd_train.heads.predictors import (
    Direction,
    Heads,
    HeadSpec,
    Predictor,
    RowPredictor,
    left_neighbours,
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


# -- recurrent heads ----------------------------------------------------------------------------------------------


def recurrent_heads(width=4, context=3, **settings):
    spec = HeadSpec(width, 7, 1, 2, context=context, recurrent=True, state_scale=3.0, embedding_scale=0.5, **settings)
    return randomised(Heads(spec).double())


def test_a_row_predictor_is_a_predictor_and_a_gated_recurrent_unit():
    """f(z) + W4 s, s = GRU([RMSNorm(W0 z) ; e(left)], s), the cell written out (Cho et al., arXiv 1406.1078)."""
    d, columns = 4, 5
    f = randomised(RowPredictor(d, 6, context=3).double())
    z, left = torch.randn(columns, 6 * d, dtype=torch.float64), torch.randn(columns, d, dtype=torch.float64)
    plain = Predictor(d, 6, context=3).double()
    plain.load_state_dict({k: v for k, v in f.state_dict().items() if k.split(".")[0] not in ("cell", "w4")})
    (ir, iu, ic), (hr, hu, hc) = (getattr(f.cell, f"weight_{kind}_l0").chunk(3) for kind in ("ih", "hh"))
    s, expected = torch.zeros(d // 2, dtype=torch.float64), []
    for x in range(columns):
        seen = torch.cat([f.norm(f.w0(z[x])), left[x]])
        reset, update = torch.sigmoid(ir @ seen + hr @ s), torch.sigmoid(iu @ seen + hu @ s)
        s = (1 - update) * torch.tanh(ic @ seen + reset * (hc @ s)) + update * s
        expected.append(plain(z[x]) + f.w4.weight @ s)
    predicted, memory = f(z[None], left[None])
    assert torch.allclose(predicted[0], torch.stack(expected), atol=1e-12)
    assert torch.allclose(memory[0], s, atol=1e-12)
    first, middle = f(z[None, :2], left[None, :2])
    second, _ = f(z[None, 2:], left[None, 2:], middle)
    assert torch.allclose(torch.cat([first, second], 1), predicted, atol=1e-12)


def test_a_row_predictor_has_4_25_d_squared_parameters_more():
    d, m = 8, 16
    row, plain = (sum(p.numel() for p in kind(d, m).parameters()) for kind in (RowPredictor, Predictor))
    assert row - plain == 4.25 * d * d


def test_only_vertical_heads_recur_and_they_start_as_the_identity():
    heads = Heads(HeadSpec(width=4, vocabulary=7, k_horizontal=1, k_vertical=2, context=3, recurrent=True))
    assert {key: type(f) for key, f in heads.predictors.items()} == {
        "horizontal_1": Predictor, "vertical_1": RowPredictor, "vertical_2": RowPredictor
    }  # fmt: skip
    z, left = torch.randn(2, 3, 5, 8), torch.randn(3, 5, 4)
    assert torch.allclose(heads(V, 2, widen(z, 3), left), z[..., :4])
    assert torch.allclose(heads(H, 1, z), z[..., :4])


def test_rows_at_once_are_rows_column_by_column():
    """Training's way and drafting's; whole rows with any leading dimensions, one row's ``left`` for both streams."""
    heads = recurrent_heads()
    z, embedded = torch.randn(2, 3, 5, 8).double(), torch.randn(3, 5, 4).double()
    left = left_neighbours(embedded)
    assert torch.equal(left[:, 1:], embedded[:, :-1])
    assert not left[:, 0].any()
    whole = heads(V, 2, widen(z, 3), left)
    memory = torch.zeros(6, 2).double()
    for x in range(5):
        column, memory = heads.step(2, widen(z, 3)[:, :, x].flatten(0, 1), left[:, x].repeat(2, 1), memory)
        assert torch.allclose(column.view(2, 3, 4), whole[:, :, x], atol=1e-12)


def test_a_recurrent_head_sees_what_is_to_its_left_and_nothing_to_its_right():
    """Its own context above apart: here 1."""
    heads = recurrent_heads(context=1)
    z, left = torch.randn(1, 5, 8).double(), torch.randn(1, 5, 4).double().requires_grad_()
    heads(V, 1, z, left)[0, 2].sum().backward()
    assert left.grad[0].abs().sum(-1).gt(0).tolist() == [True, True, True, False, False]


def test_a_recurrent_head_learns_what_no_window_above_tells():
    """States that depend on the token two to the left, on data never seen in training: next to no error, where a plain
    head, which has only z, cannot do better than their mean."""
    table = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    errors = {}
    for recurrent in False, True:
        heads = randomised(Heads(HeadSpec(16, 5, 0, 1, recurrent=recurrent)))
        optimiser = torch.optim.Adam(heads.parameters(), lr=1e-2)
        for _ in range(400):
            z, tokens = torch.randn(32, 6, 32), torch.randint(5, (32, 6))
            left = left_neighbours(table[tokens])
            loss = F.mse_loss(heads(V, 1, z, left), left_neighbours(left))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        errors[recurrent] = loss.item()
    variance = (table - table.mean(0)).square().mean() * 4 / 6  # the first two columns have nothing to guess
    assert errors[False] > 0.9 * variance
    assert errors[True] < 0.2 * errors[False]


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
        ({"context": 2}, "context is 2; expected an odd number, 1 or more"),
        ({"recurrent": True, "k_vertical": 0}, "recurrent heads are vertical ones, but k_vertical is 0"),
        ({"space": "pixel"}, "space is 'pixel'; expected 'latent' or 'token'"),
        ({"state_scale": 0.0}, "scales must be positive, got 0.0"),
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
