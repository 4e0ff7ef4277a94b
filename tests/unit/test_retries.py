"""Requests that wait for a host that is still being prepared, and the time of their turn."""

from dataclasses import dataclass

from cpu_prefix_cache.offload.retries import Retries
from cpu_prefix_cache.pool.block_pool import BlockPool


@dataclass(frozen=True)
class Left:
    id: str
    confirmed: int


class Story:
    """A pool of 10 blocks of which none is ready, and what each request lacks."""

    def __init__(self, most_chunks: int = 100) -> None:
        self.pool = BlockPool(10, ready=0)
        self.asked = 0
        self.postponed = Retries(self.pool, most_chunks, self.missing)

    def missing(self, request: Left) -> int:
        self.asked += 1
        return request.confirmed

    def grows(self, ready: int) -> list[str]:
        self.pool.grow(ready)
        return [request.id for request in self.postponed.that_fit()]


def test_they_come_in_their_order_as_there_is_room_for_all_that_each_lacks():
    story = Story()
    for id, chunks in (("a", 2), ("b", 3), ("c", 1)):
        story.postponed.add(Left(id, chunks))
    assert story.grows(1) == []
    assert story.grows(4) == ["a"], "and not c before b"
    story.pool.allocate(2)
    assert story.grows(5) == ["b"]
    assert len(story.postponed) == 1


def test_when_there_is_no_more_to_come_all_have_their_turn():
    story = Story()
    for id in "abc":
        story.postponed.add(Left(id, 9))
    assert story.grows(9) == ["a"] and story.grows(10) == ["b", "c"]
    story.postponed.add(Left("d", 9))
    assert len(story.postponed) == 0, "whoever is refused now is refused for another reason"


def test_nothing_is_retried_while_the_host_does_not_grow():
    story = Story()
    story.postponed.add(Left("a", 5))
    story.grows(1)
    for _ in range(100):
        assert story.grows(1) == []
    assert story.asked == 1


def test_the_oldest_are_dropped_when_others_have_all_of_the_device():
    story = Story(most_chunks=6)
    for id in "abc":
        story.postponed.add(Left(id, 3))
    story.postponed.add(Left("c", 2))  # the name again: what was known of it no longer counts
    assert story.grows(10) == ["b", "c"]
    story.postponed.add(Left("large", 7))
    assert len(story.postponed) == 0
