"""Exchanges: blocks that a load overwrites on the device go into the host blocks that it reads."""

from typing import Any

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import Direction, TransferPlan
from cpu_prefix_cache.offload.exchange import partners
from cpu_prefix_cache.testing.engine import GRID, Engine
from tests.support.story import make_scarce


def exchanging(**options: Any) -> Engine:
    """The host alone has "abcd", and the device, which is full, "wxyz" and "klmn". Evicted chunks are wanted again."""
    engine = Engine("lazy", device=8, host=16, hands_out_first=True, **{"exchanges": True, **options})
    make_scarce(engine.cache.pool)
    for prompt in ("abcd", "wxyz", "klmn"):
        engine.starts(prompt, prompt)
        engine.copies()
        engine.computes(prompt)
        engine.ends(prompt)
    return engine


def planned(engine: Engine, load: int) -> tuple[TransferPlan, list[TransferPlan], list[TransferPlan]]:
    """The load, the stores in exchange with it, and the others that it follows. What else was planned lands."""
    plans = {each.id: each for each in engine.steps().transfers}
    engine.reports(plans.keys() - {load, *plans[load].after})
    stores = [plans[id] for id in plans[load].after]
    assert all(each.direction is Direction.STORE for each in stores)
    return plans[load], [each for each in stores if each.after == (load,)], [each for each in stores if not each.after]


def test_a_load_takes_the_place_of_what_it_overwrites():
    """w is overwritten first, and finds no block that has been read before."""
    engine = exchanging()
    before = {key for key in engine.host if key.startswith("-")}
    load = engine.starts("again", "abcd")
    plan, [exchanged], [other] = planned(engine, load)
    (read,) = plan.copies
    (written,) = exchanged.copies
    (fresh,) = other.copies
    assert written.host_blocks == read.host_blocks[:3] and written.device_blocks == read.device_blocks[1:]
    assert set(fresh.host_blocks).isdisjoint(read.host_blocks) and fresh.device_blocks == read.device_blocks[:1]
    engine.reports({load, exchanged.id, other.id})
    assert {"w", "wx", "wxy", "wxyz"} <= engine.host
    assert engine.host.isdisjoint({"a", "ab", "abc"}), "the device has them"
    assert len(before - engine.host) == 1, "for w"
    assert engine.asks("wxyz") == Hit(4 * GRID)
    assert engine.asks("abcdz", n0=3 * GRID) == Hit(4 * GRID, 3 * GRID)


@pytest.mark.parametrize("why", ["it is off", "room is not scarce", "what is read would not be stored again"])
def test_nothing_is_exchanged_where(why: str):
    engine = exchanging(exchanges=why != "it is off")
    if why == "room is not scarce":
        engine.cache.pool._duplicates.scarcity.clear()
    stores = why != "what is read would not be stored again"
    _, exchanged, others = planned(engine, engine.starts("again", "abcd", stores=stores))
    assert not exchanged and others


def test_chunks_declined_by_admission_are_not_exchanged(monkeypatch: pytest.MonkeyPatch):
    engine = exchanging()
    monkeypatch.setattr(engine.cache.pool, "admitted", lambda keys: sum(key in (b"w", b"wx") for key in keys))
    load, exchanged, others = planned(engine, engine.starts("again", "abcd"))
    engine.reports({each.id for each in (load, *exchanged, *others)})
    assert {"w", "wx"} <= engine.host and engine.host.isdisjoint({"wxy", "wxyz"})
    assert {"ab", "abc", "abcd"} <= engine.host, "nothing took their place"


def test_nothing_is_saved_below_what_finds_no_room():
    """w finds none, as all of the host is pinned."""
    engine = exchanging()
    pins = [engine.cache.pool.pin(engine.cache.pool.find(key.encode())) for key in engine.host if key[0] == "-"]
    _, exchanged, others = planned(engine, engine.starts("again", "abcd"))
    assert not exchanged and not others
    assert {"a", "ab", "abc", "abcd"} <= engine.host
    for pin in pins:
        engine.cache.pool.unpin(pin)


def test_a_store_that_is_reported_after_its_load_counts():
    engine = exchanging()
    load = engine.starts("again", "abcd")
    _, [exchanged], [other] = planned(engine, load)
    engine.reports({load})
    engine.reports({exchanged.id, other.id})
    assert {"w", "wx", "wxy", "wxyz"} <= engine.host


def test_a_load_and_its_stores_that_fail_together_are_one_failure():
    engine = exchanging()
    load = engine.starts("again", "abcd")
    _, [exchanged], [other] = planned(engine, load)
    for _ in range(2):
        engine.reports({other.id}, failed={load, exchanged.id})
    assert engine.cache.edge._completion._failures_in_a_row == {Direction.STORE: 0, Direction.LOAD: 1}


def test_others_wait_for_what_is_on_its_way_to_the_device():
    engine = exchanging()
    load = engine.starts("again", "abcd")
    assert engine.cache.pool.find(b"a") is None
    assert isinstance(engine.asks("abcde"), Pending)
    assert isinstance(engine.asks("abq"), Pending)
    assert engine.asks("a", extra=0) == Miss(), "its last token is computed in any case"
    assert engine.asks("xb") == Miss()
    engine.now = 1e9
    assert isinstance(engine.asks("abcde"), Pending), "nobody else can load it"
    plan, exchanged, others = planned(engine, load)
    engine.reports({each.id for each in (plan, *exchanged, *others)})
    engine.fills("again", 4)
    assert engine.asks("abcde", n0=4 * GRID) == Miss(), "the device has all that the host had"


def test_chunks_under_another_lease_stay_on_the_host():
    engine = exchanging()
    lease = engine.reserves("ab")
    _, exchanged, _ = planned(engine, engine.starts("again", "abcd"))
    assert {"a", "ab"} <= engine.host and "abc" not in engine.host
    assert sum(len(copy.host_blocks) for each in exchanged for copy in each.copies) == 1
    engine.cache.release(lease)


def test_exchanged_chunks_are_stored_again_before_they_leave_the_device():
    engine = exchanging()
    load = engine.starts("again", "abcd")
    plan, exchanged, others = planned(engine, load)
    engine.reports({each.id for each in (plan, *exchanged, *others)})
    engine.computes("again")
    engine.ends("again")
    engine.copies()
    for prompt in "stuvefgh":  # each takes one block of the device
        engine.serves(prompt)
    assert {"a", "ab", "abc", "abcd"} <= engine.host
    assert engine.cache.statistics().lost_before_store == 0


@pytest.mark.parametrize("is_unfit", [False, True])
def test_a_store_that_fails_keeps_its_blocks_until_the_load_has_read_them(is_unfit: bool):
    engine = exchanging()
    load = engine.starts("again", "abcd")
    _, [exchanged], [other] = planned(engine, load)
    free = engine.cache.pool.statistics().free
    if is_unfit:
        unfit = ((exchanged.id, exchanged.copies[0].host_blocks),)
        engine.reports(failed={exchanged.id}, unfit=unfit)
    engine.reports({other.id}, failed={exchanged.id})
    assert engine.cache.pool.statistics().free == free
    assert engine.reports({load})[0].ok
    assert engine.cache.pool.statistics().free == free + 3
    assert engine.host.isdisjoint({"wx", "wxy", "wxyz"})


def test_a_load_that_fails_loses_what_it_read_and_no_more():
    """The engine computes it anew, and the host has what the load was to overwrite."""
    engine = exchanging()
    load = engine.starts("again", "abcd")
    _, [exchanged], [other] = planned(engine, load)
    engine.reports({exchanged.id, other.id}, failed={load})
    assert engine.host.isdisjoint({"a", "ab", "abc", "abcd"})
    assert {"w", "wx", "wxy", "wxyz"} <= engine.host
    assert engine.asks("abcd") == Miss()


@pytest.mark.parametrize("meanwhile", ["reset", "invalidated"])
def test_bytes_that_count_no_more_are_registered_nowhere(meanwhile: str):
    engine = exchanging()
    load = engine.starts("again", "abcd")
    _, [exchanged], [other] = planned(engine, load)
    if meanwhile == "reset":
        engine.cache.reset()
    else:
        engine.cache.invalidated(exchanged.copies[0].device_blocks)
    engine.reports({load, exchanged.id, other.id})
    assert engine.host.isdisjoint({"wx", "wxy", "wxyz"})


def test_a_block_is_written_after_it_was_read_and_before_what_is_saved_is_overwritten():
    saved = {b"x": (10, 11), b"y": (12, 17), b"z": (16, 99)}
    assert partners(saved, range(10, 18), [1, None, 3, 4]) == {b"y": 1, b"z": 3}
    assert partners(saved, range(10, 18), []) == {}
    many = {b"%3d" % at: (at,) for at in range(64)}
    assert partners(many, range(64), range(64)) == {b"%3d" % at: at - 4 for at in range(4, 64)}
