"""FreeRuns against a set of integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.pool.free_runs import FreeRuns


@given(st.data())
def test_free_runs_are_a_set_that_gives_out_neighbours(data: st.DataObject) -> None:
    runs = FreeRuns()
    free = set(range(20))
    taken = set()
    runs.put(range(20))
    for _ in range(data.draw(st.integers(0, 20))):
        if free and data.draw(st.sampled_from([False, False, True])):
            these = data.draw(st.lists(st.sampled_from(sorted(free | taken)), max_size=6))
            if len(set(these)) == len(these) and set(these) <= free:
                runs.remove(these)
                taken, free = taken | set(these), free - set(these)
            else:
                with pytest.raises(MisuseError):
                    runs.remove(these)
        elif taken and data.draw(st.booleans()):
            back = data.draw(st.sets(st.sampled_from(sorted(taken)), min_size=1))
            runs.put(sorted(back))
            taken, free = taken - back, free | back
        else:
            count = data.draw(st.integers(0, len(free)))
            fits = shortest_run_of(free, count)
            got = runs.take(count)
            assert got == sorted(set(got)) and set(got) <= free and len(got) == count
            if fits is not None and count:
                assert got[-1] - got[0] == count - 1, f"{count} neighbours were free in {sorted(free)}"
            taken, free = taken | set(got), free - set(got)
        assert list(runs) == sorted(free) and len(runs) == len(free)


def shortest_run_of(free: set[int], count: int) -> int | None:
    """Where `count` neighbours begin, if anywhere."""
    return next((first for first in sorted(free) if all(first + each in free for each in range(count))), None)
