"""Where an engine cannot be told that a load failed, the load is made again the plain way."""

import pytest

from connector.vllm.retry import RetryingCopier
from cpu_prefix_cache.copier.streams import Passed
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

COPIES = [GroupCopy(0, (1,), (2,))]


class Asked:
    """A copier that notes what it was asked for, and may refuse."""

    def __init__(self, error=None):
        self.error, self.asked, self.mark = error, [], Passed()

    def here(self):
        return self.mark

    def submit(self, direction, copies, after):
        self.asked.append((direction, copies))
        if self.error is not None:
            raise self.error
        return self.mark


def submitted(first, plain, direction):
    copier = RetryingCopier(first, plain)
    return copier.submit(direction, COPIES, copier.here())


def test_what_goes_well_is_done_once():
    first, plain = Asked(), Asked()
    assert submitted(first, plain, Direction.LOAD) is first.mark
    assert first.asked == [(Direction.LOAD, COPIES)] and plain.asked == []


def test_a_load_that_is_refused_is_made_again_the_plain_way(log):
    first, plain = Asked(RuntimeError("no kernel")), Asked()
    assert submitted(first, plain, Direction.LOAD) is plain.mark
    assert plain.asked == [(Direction.LOAD, COPIES)]
    assert "no kernel" in log.text


def test_a_store_that_is_refused_fails():
    """A store that is lost is a miss later on, and nothing worse."""
    first, plain = Asked(RuntimeError("no kernel")), Asked()
    with pytest.raises(RuntimeError, match="no kernel"):
        submitted(first, plain, Direction.STORE)
    assert plain.asked == []


def test_if_the_plain_way_fails_too_the_load_does():
    with pytest.raises(OSError, match="no memory"):
        submitted(Asked(RuntimeError("no kernel")), Asked(OSError("no memory")), Direction.LOAD)


def test_an_interrupt_is_no_failure_of_the_copier():
    plain = Asked()
    with pytest.raises(KeyboardInterrupt):
        submitted(Asked(KeyboardInterrupt()), plain, Direction.LOAD)
    assert plain.asked == []
