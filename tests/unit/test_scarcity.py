"""Scarcity: what was evicted and is missed, beside all that was evicted."""

from cpu_prefix_cache.pool.scarcity import WORTH, Scarcity

WINDOW = 100


def evicted(count: int) -> tuple[Scarcity, list[bytes]]:
    scarcity, keys = Scarcity(WINDOW), [bytes([at]) for at in range(count)]
    scarcity.evicted(keys)
    return scarcity, keys


def test_room_is_scarce_when_enough_of_what_was_evicted_is_missed():
    scarcity, keys = evicted(WORTH + 1)
    scarcity.missed(keys[:1])
    assert not scarcity.holds
    scarcity.missed(keys[1:2])
    assert scarcity.holds


def test_a_chunk_is_missed_once():
    scarcity, keys = evicted(WORTH + 1)
    for _ in range(3):
        scarcity.missed(keys[:1])
    assert not scarcity.holds


def test_chunks_below_one_that_was_never_evicted_do_not_count():
    scarcity, keys = evicted(WORTH - 1)
    scarcity.missed([b"another", *keys])
    assert not scarcity.holds


def test_chunks_that_were_evicted_long_ago_count_no_more():
    scarcity, keys = evicted(2 * WINDOW)
    scarcity.missed(keys[:WINDOW])
    assert not scarcity.holds
