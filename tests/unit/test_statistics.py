"""The meaning of each count, from 0, and where it is a level, back to 0."""

from dataclasses import astuple

from cpu_prefix_cache.testing.engine import GRID, Engine


def loading_ab():
    """An engine whose host alone had "ab", and the load of that by "r"."""
    engine = Engine(host=8)
    engine.serves("ab")
    engine.device_forgets()
    return engine, engine.starts("r", "ab")


def test_a_cache_that_did_nothing_counts_nothing():
    engine = Engine(host=8)
    _, *counts, _ = astuple(engine.cache.statistics())
    assert not any(counts)


def test_hit_tokens_are_those_a_load_was_admitted_for():
    engine = Engine(host=8)
    engine.serves("abc")
    assert engine.cache.statistics().hit_tokens == 0
    engine.device_forgets()
    engine.serves("abx")
    assert engine.cache.statistics().hit_tokens == 2 * GRID
    engine.device_forgets()
    engine.gpu.commit(engine.gpu.allocate(1), [b"a"], engine.gpu.root, engine.gpu.touch(None))
    engine.serves("abc")
    assert engine.cache.statistics().hit_tokens == (2 + 2) * GRID, "what the device had was counted"


def test_hit_tokens_count_what_failed_too():
    engine, load = loading_ab()
    engine.steps()
    engine.reports(failed=[load])
    now = engine.cache.statistics()
    assert (now.hit_tokens, now.loads_failed) == (2 * GRID, 1)


def test_chunks_of_a_store_that_failed_and_of_one_that_a_reset_overtook_were_given_up():
    engine = Engine(host=8)
    engine.starts("r", "abcd")
    engine.computes("r", 3)
    first = [transfer.id for transfer in engine.steps().transfers]
    engine.computes("r", 4)
    second = [transfer.id for transfer in engine.steps().transfers]
    engine.reports(failed=first, done=second)
    assert engine.cache.statistics().store_cancelled == 4, "the one below it had nothing to hang below"
    engine.serves("xy")
    assert engine.cache.statistics().store_cancelled == 4
    engine.starts("z", "pq")
    engine.computes("z")
    third = [transfer.id for transfer in engine.steps().transfers]
    engine.cache.reset()
    engine.reports(done=third)
    assert engine.cache.statistics().store_cancelled == 6


def test_transfers_cancelled_by_a_reset_have_not_failed():
    """All copies went well: who looks for failures must find none."""
    engine, load = loading_ab()
    engine.starts("s", "xy")
    engine.computes("s")
    moving = [transfer.id for transfer in engine.steps().transfers]
    assert load in moving and len(moving) == 2
    engine.cache.reset()
    engine.steps()
    engine.reports(done=moving)
    now = engine.cache.statistics()
    assert (now.stores_failed, now.loads_failed, now.store_cancelled) == (0, 0, 2)


def test_a_load_that_is_too_late_has_failed_once():
    engine, load = loading_ab()
    engine.steps()
    for _ in range(2):
        engine.reports(late={load})
    engine.reports(done=[load])
    assert engine.cache.statistics().loads_failed == 1


def test_held_are_the_blocks_that_pins_keep():
    engine = Engine(host=8)
    engine.serves("abc")
    engine.serves("x")
    assert engine.cache.statistics().pool.protected == 0
    lease = engine.reserves("ab")
    assert engine.cache.statistics().pool.protected == 2
    another = engine.reserves("abc")
    assert engine.cache.statistics().pool.protected == 4, "the cached blocks are the most that can be protected"
    engine.cache.release(lease)
    engine.cache.release(another)
    assert engine.cache.statistics().pool.protected == 0
