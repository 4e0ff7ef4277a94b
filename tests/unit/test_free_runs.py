"""Free blocks come in neighbouring runs."""

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.pool.free_runs import FreeRuns


def free(*blocks):
    runs = FreeRuns()
    runs.put(blocks)
    return runs


def test_the_run_that_fits_best_is_taken_first():
    assert free(0, 1, 2, 3, 7, 8).take(2) == [7, 8]


def test_a_longer_run_is_cut_at_its_beginning():
    runs = free(0, 1, 2, 3)
    assert runs.take(3) == [0, 1, 2]
    assert list(runs) == [3]


def test_without_a_fitting_run_the_longest_ones_are_taken():
    runs = free(0, 2, 3, 5, 6, 7)
    assert runs.take(5) == [2, 3, 5, 6, 7]
    assert list(runs) == [0]


def test_neighbours_grow_together_from_both_sides():
    runs = free(0, 2)
    runs.put([1])
    assert runs.take(3) == [0, 1, 2]


def test_a_block_is_not_free_twice():
    for again in ([1], [0], [2], [0, 1, 2]):
        with pytest.raises(MisuseError, match="free already"):
            free(0, 1, 2).put(again)
    with pytest.raises(MisuseError, match="free already"):
        free(5, 6).put([4, 5])


def test_nobody_takes_more_than_there_is():
    with pytest.raises(MisuseError, match="only 2 are free"):
        free(0, 1).take(3)
    assert free().take(0) == []


def test_it_knows_what_is_in_it():
    free = FreeRuns()
    free.put([2, 3, 7])
    assert [block for block in range(9) if block in free] == [2, 3, 7]
