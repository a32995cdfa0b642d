import torch

from ssd_train.draws import sample_seed, uniform


def test_uniform_is_a_function_of_its_key_alone():
    seeds, positions = torch.tensor([3, 5, 2**62]), torch.arange(7)
    table = uniform(seeds[:, None], positions, 4, 2)
    for i, seed in enumerate(seeds):
        for j, position in enumerate(positions):
            assert uniform(seed, position, 4, 2) == table[i, j]
    assert table.dtype == torch.float64
    # The reference values guard the stream: changing it would change every image.
    assert uniform(torch.tensor(0), 0, 0, 0).item() == REFERENCE


REFERENCE = 0.1296456182608381


def test_every_part_of_the_key_matters():
    base = uniform(torch.tensor(1), 2, 3, 4)
    keys = [(9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9)]
    others = [uniform(torch.tensor(seed), *key) for seed, *key in keys]
    assert len({float(x) for x in [base, *others]}) == 5


def test_uniform_is_uniform_and_independent_along_each_key():
    """Chi-square on 64 cells and lag correlations over neighbouring seeds, positions, visits and purposes; the
    numbers are fixed, so this either holds or it does not."""
    u = uniform(torch.arange(400)[:, None, None, None], torch.arange(40)[:, None, None], torch.arange(4)[:, None],
                torch.arange(3))  # fmt: skip
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.bincount((u.flatten() * 64).long(), minlength=64).double()
    expected = u.numel() / 64
    assert 20 < ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom
    for dim in range(4):
        a, b = u.narrow(dim, 0, u.shape[dim] - 1).flatten(), u.narrow(dim, 1, u.shape[dim] - 1).flatten()
        assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 4.5 / len(a) ** 0.5


def test_sample_seeds_differ_and_are_non_negative():
    seeds = {sample_seed(run, index) for run in range(10) for index in range(1000)}
    assert len(seeds) == 10_000
    assert min(seeds) >= 0
