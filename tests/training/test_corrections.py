"""Pairs for a corrector: what is re-drawn, what the backbone says of it, and which positions are asked."""

import micro
import pytest
import torch

from ssd_train.distributions import Sampling, guided_probabilities
from ssd_train.grid import Grid
from ssd_train.heads.corrector import Corrector, CorrectorSpec, neighbours
from ssd_train.training.corrections import corrections, redraw
from ssd_train.training.teacher import Teacher

V, SHAPE = 5, (2, 64, 3, 4)  # streams, images, rows, columns
SAMPLING = Sampling(guidance=2.0, top_k=3)


def drawn(sampling=SAMPLING, key=(0, 7), index=None):
    """(logits of every position, tokens that stand, tokens after re-drawing)"""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*SHAPE, V, generator=generator)
    tokens = torch.full(SHAPE[1:], V)  # a token that no p gives: what is re-drawn can be told apart
    index = torch.arange(SHAPE[1]) if index is None else index
    return logits, tokens, redraw(logits, tokens, index, key, lambda h: h, sampling)


def test_a_share_of_each_image_is_drawn_again_from_p():
    logits, tokens, fed = drawn()
    share = (fed != tokens).flatten(1).double().mean(1)
    assert share.min() < 0.25
    assert share.max() > 0.55
    assert share.mean() == pytest.approx(0.4, abs=5 * 0.22 / 8)  # 0.1 to 0.7; 5 standard errors of 64 images
    p = guided_probabilities(logits, SAMPLING)
    chosen = fed != tokens
    assert (p[chosen].gather(1, fed[chosen][:, None]) > 0).all()  # top-k holds
    hits = p[chosen].gather(1, fed[chosen][:, None]).double().mean()
    assert hits == pytest.approx(float(p[chosen].double().square().sum(1).mean()), abs=0.1)


def test_a_draw_depends_on_the_sample_and_the_key_alone():
    _, _, fed = drawn()
    assert torch.equal(drawn()[2], fed)
    assert not torch.equal(drawn(key=(0, 8))[2], fed)
    assert not torch.equal(drawn(key=(1, 7))[2], fed)
    _, _, moved = drawn(index=torch.arange(SHAPE[1]) + 1)
    assert (moved != fed).any(0).any()


def test_greedy_sampling_has_others_to_draw():
    """At temperature 0 the likeliest token alone would never differ from what stands."""
    logits, tokens, fed = drawn(Sampling(guidance=1.0, temperature=0))
    chosen = fed != tokens
    assert (logits[0].argmax(-1)[chosen] != fed[chosen]).float().mean() > 0.3


@pytest.mark.parametrize("most", [100, 3, 1])
def test_positions_with_a_neighbour_that_differs(most):
    """Of a 2 x 3 grid with context left and above: one token differs, then its right and lower neighbours are asked."""
    grid = Grid(2, 3)
    tokens = torch.zeros(2, 2, 3, dtype=torch.int64)
    fed = tokens.clone()
    fed[0, 0, 1] = fed[1, 1, 0] = 1  # of positions 2 and 4; of position 4
    hidden = torch.arange(2 * 2 * 6.0).view(2, 2, 2, 3, 1)
    stale = hidden + 100
    found = corrections(stale, fed, hidden, tokens, neighbours(grid, 2), most)
    position = torch.tensor([2, 4, 6 + 4])[torch.arange(min(3, most)) * 3 // min(3, most)]
    assert torch.equal(found.hidden, stale.flatten(1, 3)[:, position])
    assert torch.equal(found.left, stale.flatten(1, 3)[:, position - 1])
    assert torch.equal(found.target, hidden.flatten(1, 3)[:, position])
    rows = {2: ([1, -1], [0, -1]), 4: ([0, 1], [0, 0]), 10: ([1, 0], [0, 0])}
    assert found.fed.tolist() == [rows[p][0] for p in position.tolist()]
    assert found.now.tolist() == [rows[p][1] for p in position.tolist()]


def test_images_without_a_difference_give_one_position_that_does_not_move():
    tokens, states = torch.zeros(1, 2, 3, dtype=torch.int64), torch.randn(1, 1, 2, 3, 4)
    found = corrections(states, tokens, states, tokens, neighbours(Grid(2, 3), 2), 5)
    assert found.hidden.shape[1] == 1
    assert torch.equal(found.fed, found.now)


def test_a_corrector_learns_what_a_neighbour_changes():
    """In a world in which a state is what stands to its left and above, and nothing else."""
    torch.manual_seed(0)
    grid, table = Grid(4, 4), torch.randn(V + 1, 8)
    near, weights = neighbours(grid, 2), torch.randn(2, 8, 8) / 3

    def states(tokens):
        around = torch.nn.functional.pad(tokens.flatten(1), (0, 1), value=V)[:, near]
        return torch.einsum("blcd,cde->ble", table[around], weights).unflatten(1, (4, 4))[None]

    corrector = Corrector(CorrectorSpec(16, 1, 2), 8)
    optimiser, errors = torch.optim.Adam(corrector.parameters(), 1e-2), []
    for _ in range(150):
        tokens, fed = torch.randint(V, (2, 16, 4, 4))
        at = corrections(states(fed), fed, states(tokens), tokens, near, 100)
        corrected = corrector(at.hidden, at.left, at.fed, at.now, lambda t: table[t])
        loss = (corrected - at.target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        errors.append(loss.item())
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("guidance, streams", [(2.0, 2), (1.0, 1)])
def test_the_teachers_states_are_those_of_sampling_and_may_be_trained_on(guidance, streams):
    backbone, prompts = micro.janus((2, 3)), micro.prompts(2)
    backbone.encode_prompts = lambda texts: prompts
    tokens = torch.arange(12).view(2, 2, 3) % backbone.vocabulary
    states = Teacher(backbone, guidance)(["a", "b"], tokens)
    expected = backbone.teacher_force(prompts.guided(guidance), tokens.flatten(1)).unflatten(2, (2, 3))
    assert states.shape == (streams, 2, 2, 3, backbone.width)
    assert states.dtype == torch.float32
    assert torch.allclose(states, expected.float())
    weight = torch.ones(backbone.width, requires_grad=True)
    (states * weight).sum().backward()
    assert weight.grad.norm() > 0
