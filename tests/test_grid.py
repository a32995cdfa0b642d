import pytest

from ssd_train.grid import Grid


def test_sequence_without_end_of_line():
    grid = Grid(2, 3)
    assert grid.sequence_length == grid.size == 6
    assert grid.feed_plan([2, 3]) == ([2, 3], [2, 3], [3, 4])


def test_sequence_with_end_of_line():
    """a b c / d e f /: the end-of-line token after c predicts d, and c's own state predicts nothing we want."""
    grid = Grid(2, 3, end_of_line=True)
    assert grid.sequence_length == 8
    assert [grid.sequence_index(p) for p in range(6)] == [0, 1, 2, 4, 5, 6]
    assert grid.feed_plan([1, 2, 3]) == ([1, 2, 3, 4], [1, 2, -1, 3], [2, -1, 3, 4])


def test_offsets():
    grid = Grid(4, 5)
    assert grid.offset(grid.position(1, 2), grid.position(3, 2)) == (2, 0)
    assert grid.offset(grid.position(1, 4), grid.position(1, 1)) == (0, -3)
    assert list(grid.row(2)) == [10, 11, 12, 13, 14]


def test_empty_grid_is_refused():
    with pytest.raises(ValueError, match="at least 1x1, got 0x3"):
        Grid(0, 3)
