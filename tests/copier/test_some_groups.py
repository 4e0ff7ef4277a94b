"""A rank with some of the groups: copies of those go through under its own numbers, others have ended at once."""

import pytest

from cpu_prefix_cache.copier.queues import Passed
from cpu_prefix_cache.copier.some_groups import SomeGroupsCopier
from cpu_prefix_cache.messages.plan import Direction, GroupCopy


class Noting:
    """A copier that notes what it is asked for. Its marks are the directions."""

    def __init__(self):
        self.asked = []

    def here(self):
        return "here"

    def submit(self, direction, copies, after):
        self.asked.append((copies, after))
        return direction


@pytest.fixture
def inner():
    return Noting()


def test_groups_have_other_numbers_there(inner):
    copier = SomeGroupsCopier(inner, [1, 3])
    copies = [GroupCopy(group, (group,), (7,)) for group in range(4)]
    assert copier.submit(Direction.LOAD, copies, copier.here()) is Direction.LOAD
    assert inner.asked == [([GroupCopy(0, (1,), (7,)), GroupCopy(1, (3,), (7,))], "here")]


def test_what_concerns_none_of_them_has_ended(inner):
    mark = SomeGroupsCopier(inner, [1]).submit(Direction.STORE, [GroupCopy(0, (0,), (7,))], "here")
    assert isinstance(mark, Passed) and not inner.asked
