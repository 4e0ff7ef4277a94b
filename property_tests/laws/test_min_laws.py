"""`min` of replay against all that a cache could do: every set of blocks after every request."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.tools.replay.clairvoyant import Future, replay_min
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

# Few blocks, so that all sets of them can be tried, but prompts that part at any depth and come again after others.
MOST_BLOCKS = 9
stories = st.lists(st.text("ab", min_size=1, max_size=4), min_size=2, max_size=9).filter(
    lambda story: len({prompt[:end] for prompt in story for end in range(1, len(prompt) + 1)}) <= MOST_BLOCKS
)


class NoMeter(Meter):
    """Measures nothing, and collects no garbage for it: a third of a second, for each story, among all other tests."""

    def slices(self, requests: Sequence[TraceRequest]) -> Iterator[Sequence[TraceRequest]]:
        yield requests


@settings(max_examples=300, deadline=None)
@given(story=stories, capacity=st.integers(1, 5))
def test_no_cache_finds_more_blocks_than_min(story: list[str], capacity: int) -> None:
    """Found is the beginning of a prompt, as everywhere; MIN finds as many as the best of all caches."""
    requests = [
        TraceRequest(float(now), [prompt[:end].encode() for end in range(1, len(prompt) + 1)], len(prompt))
        for now, prompt in enumerate(story)
    ]
    trace = Trace(["made up"], 1, requests)
    assert replay_min(Future(trace), capacity, NoMeter("test", trace.blocks)).hit_blocks == most_hits(story, capacity)


def most_hits(story: list[str], capacity: int) -> int:
    """The most blocks that can be found, if any `capacity` of those at hand may be kept after each request."""

    @cache
    def best(number: int, here: frozenset[str]) -> int:
        if number == len(story):
            return 0
        blocks = [story[number][:end] for end in range(1, len(story[number]) + 1)]
        found = next((at for at, block in enumerate(blocks) if block not in here), len(blocks))
        at_hand = sorted(here.union(blocks))
        kept = combinations(at_hand, min(capacity, len(at_hand)))
        return found + max(best(number + 1, frozenset(each)) for each in kept)

    return best(0, frozenset())
