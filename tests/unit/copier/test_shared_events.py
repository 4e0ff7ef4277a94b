"""Events that several ask: who waits for sections waits for each in its own way, and learns of a failure at the end."""

import pytest

from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.shared_events import EndOfSections, Shared


class Awaited(Event):
    """Ends when it is waited for, however often it is looked at."""

    def __init__(self, fails=False):
        self.fails, self.has_ended = fails, False

    def passed(self):
        if self.has_ended and self.fails:
            raise OSError("this section failed")
        return self.has_ended

    def until_passed(self):
        self.has_ended = True
        self.passed()


def test_a_wait_for_sections_waits_for_each():
    sections = [Awaited(), Awaited()]
    end = EndOfSections([*map(Shared, sections)])
    assert not end.passed()
    end.until_passed()
    assert end.passed() and all(section.has_ended for section in sections)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_wait_for_sections_raises_when_none_is_in_flight(failed):
    sections = [Awaited(fails=at == failed) for at in range(2)]
    end = EndOfSections([*map(Shared, sections)])
    for _ in range(2):
        with pytest.raises(OSError, match="section failed"):
            end.until_passed()
        assert all(section.has_ended for section in sections)
