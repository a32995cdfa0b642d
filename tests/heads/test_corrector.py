"""The corrector by hand: what it sees, in which order, and what it adds."""

import pytest
import torch
import torch.nn.functional as F

from ssd_train.grid import Grid
from ssd_train.heads.corrector import Corrector, CorrectorSpec, FrozenCorrector, nearest, neighbours
from ssd_train.heads.predictors import Heads, HeadSpec

D, M, C = 4, 6, 3
TABLE = torch.arange(20.0).view(5, D).sin()


def embed(tokens):
    return F.embedding(tokens, TABLE)


def make(depth=1, std=0.3):
    torch.manual_seed(0)
    corrector = Corrector(CorrectorSpec(M, depth, C), D, state_scale=3.0, embedding_scale=0.5)
    for parameter in corrector.parameters() if std else ():
        torch.nn.init.normal_(parameter, std=std)
    return corrector


def inputs():
    """Two streams of four positions: a left neighbour re-drawn; the first of a row, re-drawn above; nothing re-drawn;
    something that was not there yet."""
    fed = torch.tensor([[1, 2, 3], [-1, 2, 0], [1, 2, 3], [1, -1, 0]])
    now = torch.tensor([[4, 2, 3], [-1, 1, 0], [1, 2, 3], [1, 3, 0]])
    return torch.randn(2, 4, D), torch.randn(2, 4, D), fed, now


def test_neighbours_are_the_nearest_that_come_before():
    assert nearest(7) == [(0, -1), (-1, 0), (-1, -1), (-1, 1), (0, -2), (-2, 0), (-1, -2)]
    none = 6
    assert neighbours(Grid(2, 3), 5).tolist() == [
        [none] * 5, [0, none, none, none, none], [1, none, none, none, 0],
        [none, 0, none, 1, none], [3, 1, 0, 2, none], [4, 2, 1, none, 3],
    ]  # fmt: skip
    assert neighbours(Grid(3, 1), 2).tolist() == [[3, 3], [3, 0], [3, 1]]
    assert neighbours(Grid(1, 2, end_of_line=True), 1).tolist() == [[2], [0]]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_formula(depth):
    corrector, (hidden, left, fed, now) = make(depth), inputs()
    corrected = corrector(hidden, left, fed, now, embed)

    def gated(layer, x):
        n = layer.norm.weight * x / (x.square().mean() + 1e-6).sqrt()
        return layer.w2.weight @ (F.silu(layer.w1.weight @ n) * (layer.w3.weight @ n))

    def e(token):
        return TABLE[token] if token >= 0 else torch.zeros(D)

    for stream in range(2):
        for i in range(4):
            h, before = hidden[stream, i], left[stream, i] * (now[i, 0] >= 0)
            change = torch.cat([e(now[i, 0])] + [e(a) - e(b) for a, b in zip(now[i], fed[i], strict=True)]) / 0.5
            x = corrector.states.weight @ torch.cat([h, before]) / 3 + corrector.tokens.weight @ change
            for layer in corrector.layers:
                x = x + gated(layer, x)
            expected = h if i == 2 else h + 3 * gated(corrector.last, x)
            assert torch.allclose(corrected[stream, i], expected, atol=1e-5)
            assert i == 2 or (expected - h).norm() > 1e-2


@pytest.mark.parametrize("depth", [1, 3])
def test_tables_say_the_same(depth):
    """Sweep after sweep, of positions in any order."""
    corrector, (hidden, left, fed, now) = make(depth), inputs()
    revised = FrozenCorrector(corrector, TABLE).begin(hidden, left, fed)
    for index in ([3, 0], [0, 1, 2, 3], [2]):
        for stands in (now[index], (now[index] + 1) % len(TABLE)):
            expected = corrector(hidden[:, index], left[:, index], fed[index], stands, embed)
            assert torch.allclose(revised(torch.tensor(index), stands), expected, atol=1e-5)


def test_it_starts_by_changing_nothing():
    hidden, *rest = inputs()
    assert torch.equal(make(std=0)(hidden, *rest, embed), hidden)


@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_parameters_as_the_docstring_says(depth):
    norms = depth * M
    expected = (3 + C) * D * M + 2 * D * M + 4 * M**2 + (depth - 1) * 6 * M**2 + norms
    assert sum(p.numel() for p in make(depth).parameters()) == expected


def test_it_is_a_part_of_the_heads_at_their_scales():
    spec = HeadSpec(D, 5, 1, 1, state_scale=3.0, embedding_scale=0.5, corrector=CorrectorSpec(M, 1, C))
    heads = Heads(spec)
    assert list(heads.parts()) == ["horizontal_1", "vertical_1", "corrector"]
    assert (heads.corrector.state_scale, heads.corrector.embedding_scale) == (3.0, 0.5)
    assert HeadSpec(**heads.config()) == spec
    assert Heads(HeadSpec(D, 5)).corrector is None


@pytest.mark.parametrize("wrong", ["width", "depth", "context"])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match=rf"corrector.{wrong} is 0; expected at least 1"):
        CorrectorSpec(**{wrong: 0})
