"""Hits of an LRU by uses, beside an LRU that has the chunks; and `adaptive` by age, beside the policy `lru`."""

from contextlib import suppress
from math import isclose
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import BlockPool, PoolExhausted
from cpu_prefix_cache.eviction.ages import Use
from cpu_prefix_cache.eviction.buckets import Buckets
from cpu_prefix_cache.eviction.recency import DECAY, Recency
from property_tests.strategies import chain, prompts


@settings(max_examples=500)
@given(
    room=st.integers(0, 12),
    requests=st.lists(st.lists(st.sampled_from("abcdefghij"), unique=True, min_size=1), max_size=30),
)
def test_an_lru_finds_what_the_youngest_requests_used(room: int, requests: list[list[str]]) -> None:
    """Beside the sums over all younger requests: those that leave room have their chunks, the oldest of them a part."""
    last: dict[str, int] = {}
    uses: list[Use] = []
    recency, found = Recency(room, lambda use: next((each for each in uses[use.number :] if each.members), None)), 0.0
    gone = 0  # requests that are older than all recent ones

    def younger(number: int) -> int:
        return sum(each > number for each in last.values())

    def share(number: int) -> float:
        """The share of its chunks that an LRU has."""
        return 0 if number < gone else min(1, (room - younger(number)) / [*last.values()].count(number))

    for number, chunks in enumerate(requests):
        found += sum(share(last[chunk]) for chunk in chunks if chunk in last)
        with mock.patch("cpu_prefix_cache.eviction.recency.DECAY", 1.0), mock.patch.object(Recency, "is_enough", False):
            recency.seek([(uses[last[chunk]], 1) for chunk in chunks if chunk in last], 0, is_hinted=False)
        assert isclose(recency._found, found, abs_tol=1e-9)
        uses.append(Use(float(number), number + 1))
        recency.begin(uses[-1])
        for chunk in chunks:
            uses[-1].members[0] = uses[-1].members.get(0, 0) + 1
            if chunk in last:
                leave(recency, uses[last[chunk]])
            last[chunk] = number
            recency.add(uses[-1], 1)
            gone = max([gone, *(each + 1 for each in {*last.values()} if younger(each) >= room)])
        recency.check_valid(uses[number] for number in sorted({*last.values()}))


def leave(recency: Recency, use: Use) -> None:
    """A chunk has this use no more."""
    use.members[0] -= 1
    if not use.members[0]:
        del use.members[0]
    recency.add(use, -1)


def test_while_chunks_go_by_age_an_lru_finds_what_is_here() -> None:
    """Not what it would have by the uses, which is nothing here."""
    recency = Recency(0, lambda _: None)
    recency._found = 100.0
    recency.seek([(Use(0.0, 1), 5)], 3, is_hinted=False)
    assert recency._found == 100 * DECAY + 3


@settings(max_examples=300)
@given(story=st.lists(prompts, min_size=4, max_size=25), blocks=st.integers(4, 12))
def test_by_age_it_has_what_an_lru_has(story: list[str], blocks: int) -> None:
    pools = {name: BlockPool(blocks, name) for name in ("lru", "adaptive")}
    with mock.patch.object(Buckets, "is_by_age", True):
        for now, prompt in enumerate(story):
            for pool in pools.values():
                with suppress(PoolExhausted):
                    use(pool, prompt, 2.0 * now)
                pool.check_valid()
            here = [{name for name in names(story) if pool.find(name) is not None} for pool in pools.values()]
            assert here[0] == here[1]


def names(story: list[str]) -> set[bytes]:
    return {key for prompt in story for key in chain(prompt)}


def use(pool: BlockPool, prompt: str, now: float) -> None:
    """A request for a prompt, of which as much is stored as there is room for."""
    keys = chain(prompt)
    have = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[have - 1]) if have else None
    touch = pool.touch(deepest, keys, now)
    parent, new = pool.root if deepest is None else deepest, keys[have:]
    pin = pool.pin() if deepest is None else pool.pin(deepest)
    new = new[: pool.choose(parent, new)]
    if new:
        pool.commit(pool.allocate(len(new), new), new, parent, touch)
    pool.unpin(pin)
