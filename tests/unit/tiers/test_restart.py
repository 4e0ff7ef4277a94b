"""Generations, resets, and what a restart takes in. Any order of events: property_tests/machines/test_tier_machine.py.

`S8.n` numbers edge cases that broke the tiers of other caches.
"""

from dataclasses import replace

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import Direction, HybridChunkPlanner, RankReport
from cpu_prefix_cache.messages.generations import RANGE
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import Found, TierReport
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool
from cpu_prefix_cache.tiers.found import FoundBefore
from tests.unit.tiers.small_tier import FULL, GRID, STATE, Tiered, chain_names


def restarted(prompts, portion=100, **options):
    engine = Tiered(**options)
    for prompt in prompts:
        engine.tier_has(prompt)
    engine.restarts(portion)
    return engine


def told(engine, portions=1):
    for _ in range(portions):
        engine.steps_below()
        engine.reports_below()


def found(names, first=RANGE, slot=0):
    """Chunks of one slot each, in this order."""
    return [
        Found(Label(name.encode(), name[:-1].encode(), 0, 0, CHUNK, first + at), (slot + at,))
        for at, name in enumerate(names)
    ]


def finder(*groups, slots=16):
    planner = HybridChunkPlanner(groups or [FULL], max_model_len=1_000, in_pages=True).below()
    return FoundBefore(KVCacheCoordinator(planner, new_pool(planner, slots)))


def names_in(finder):
    pool = finder._pool
    return {key.decode() for key in map(pool.key, range(pool.capacity)) if key is not None}


def test_after_a_restart_the_tier_has_what_it_had():
    engine = restarted(["abcd", "ae"])
    told(engine)
    assert engine.below == {*chain_names("abcd"), "ae"} and engine.seen.found == 5
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)


def test_several_slots_to_a_chunk():
    """A group with a token's bytes twice the other's takes two slots of a chunk, and they are found as one piece."""
    groups = [FULL, replace(FULL, name="wide", block_bytes=2 * FULL.block_bytes)]
    engine = Tiered(*groups, host=48)
    assert [piece.host_blocks for piece in engine.planner.pieces] == [1, 2]
    engine.tier_has("abc")
    engine.goes_bad("abc")
    engine.restarts()
    told(engine)
    assert engine.below == set(chain_names("abc")) and engine.seen.found == 3
    assert isinstance(engine.asks_as("r", "abc"), Pending)
    engine.works()
    assert engine.asks_as("r", "abc") == Hit(2 * GRID) and engine.seen.refused == 3


def test_slots_that_were_found_are_in_use():  # S8.17
    engine = restarted(["abcdefgh"], host=8, slots=16)
    told(engine)
    assert engine.cache.below.edge.statistics().pool.cached == 8
    engine.host_has("mnopqrst")
    engine.works_off()
    engine.host_forgets()
    engine.host_has("vwxyz")
    engine.works_off()
    pool = engine.cache.below.edge.statistics().pool
    assert pool.cached == 16 and pool.free == 0 and "vwxyz" in engine.below  # the oldest have left
    assert pool.evictions == 5


def test_requests_are_served_while_portions_come():
    engine = restarted(["abcd"], portion=1)
    told(engine, 1)
    assert engine.below == {"a", "ab"} and engine.seen.state == "opening"
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.steps_below()
    engine.tier_ends()
    assert engine.asks_as("r", "abcd") == Hit(2 * GRID)
    told(engine, 3)
    assert engine.seen.state == "open" and engine.below == set(chain_names("abcd"))


def test_nothing_is_written_before_all_is_taken_in():
    engine = restarted(["abcd"], portion=1)
    engine.host_has("xyz")
    told(engine, 2)
    assert not engine.writes()
    told(engine, 4)
    engine.works_off()
    assert engine.below == {*chain_names("abcd"), *chain_names("xyz")}


def test_a_portion_that_was_lost_or_comes_again_changes_nothing():
    engine = restarted(["abcd"], portion=1)
    one = TierReport(RankReport(0), engine.tiers[0].next_generation, *engine.tiers[0].portion())
    for _ in range(2):
        engine.cache.report_below(one)
    assert engine.below == {"a"}
    third = one._replace(portion=3, found=tuple(found(["abc"])))
    engine.cache.report_below(third)
    assert engine.below == {"a"}
    told(engine, 4)
    engine.cache.report_below(one)
    assert engine.below == set(chain_names("abcd")) and engine.seen.found == 4 and engine.seen.state == "open"


def test_a_slot_that_went_bad_in_between_is_refused_when_it_is_read():
    engine = restarted(["abcd"])
    engine.tiers[0].records.pop(next(s for s, r in engine.tiers[0].records.items() if r.label.key == b"abc"))
    told(engine)
    engine.asks_as("r", "abcd")
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(2 * GRID) or "abc" not in engine.below


def test_parents_come_before_children_and_what_hangs_below_nothing_is_left_out():
    take = finder()
    taken = list(take.take_in(found(["a", "ab", "x", "xyz", "xy", "xyz"])))
    assert names_in(take) == {"a", "ab", "x", "xy", "xyz"}
    assert [(slot, generation - RANGE) for slot, generation in taken] == [(0, 0), (1, 1), (2, 2), (4, 4), (5, 5)]
    take = finder()
    assert list(take.take_in(found(["ab", "abc", "b"]))) and names_in(take) == {"b"}
    assert take.chunks == 1 and len(take._pool.free) == 15


def test_two_slots_with_the_same_chunk():
    """It was evicted and written again: either has its bytes. What hangs below it is kept."""
    take = finder()
    list(take.take_in(found(["a", "ab", "a", "ab", "abc"])))
    assert names_in(take) == {"a", "ab", "abc"} and len(take._pool.free) == 13
    list(take.take_in(found(["a", "ab", "abc", "abcd"], slot=8)))
    assert names_in(take) == {"a", "ab", "abc", "abcd"} and len(take._pool.free) == 12
    take._pool.check_valid()


def test_a_slot_that_is_in_use_is_left_out_with_what_hangs_below_it():
    take = finder()
    list(take.take_in(found(["a", "b"])))
    list(take.take_in([*found(["x", "xy"], slot=1), *found(["z"], slot=9)]))
    assert names_in(take) == {"a", "b", "z"}
    take._pool.check_valid()


@pytest.mark.parametrize("portion", [1, 2, 100])
def test_checkpoints_are_found_when_all_their_pieces_are_known(portion):
    engine = Tiered(FULL, STATE, host=32)
    engine.tier_has("abcd", ["ab", "abcd"])
    engine.tier_has("xy", ["xy"])
    records = engine.tiers[0].records
    lost = [slot for slot, each in records.items() if each.label.key == b"xy" and each.label.block != CHUNK]
    del records[lost[0]]
    engine.restarts(portion)
    told(engine, 12)
    assert engine.has_checkpoint_below("ab") and engine.has_checkpoint_below("abcd")
    assert "xy" in engine.below and not engine.has_checkpoint_below("xy")
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)
    assert not engine.cache.below._found._pieces


def test_pieces_of_chunks_that_are_gone_cost_nothing_later():
    """A portion looks at the checkpoints that it has pieces of, not at all that were never completed."""
    take = finder(FULL, STATE, slots=400)
    pieces = [Found(Label(b"%03d" % at, b"%03d" % at, 1, 0, 0, RANGE + at), (at,)) for at in range(300)]
    asked = []
    find = take._pool.find
    take._pool.find = lambda key: asked.append(key) or find(key)
    list(take.take_in(pieces))
    asked.clear()
    list(take.take_in(found(["a", "ab"], slot=300)))
    list(take.take_in(found(["b", "bc"], slot=310)))
    asked.clear()
    list(take.take_in(found(["x", "xy"], slot=320)))
    assert len(asked) < 10


# Generations


def test_every_write_has_a_generation_of_its_own_and_parents_the_smaller_one():
    engine = Tiered(host=64)
    engine.host_has("abcdef")
    engine.works_off()
    generations = {record.label.key.decode(): record.label.generation for record in engine.tiers[0].records.values()}
    assert [generations[name] for name in chain_names("abcdef")] == sorted(set(generations.values()))
    assert min(generations.values()) == RANGE


def test_generations_begin_beyond_what_any_rank_has_used():
    engine = Tiered(ranks=2)
    engine.tiers[1].last = 7
    engine.restarts()
    told(engine, 2)
    engine.host_has("a")
    engine.works_off()
    assert {record.label.generation for tier in engine.tiers for record in tier.records.values()} == {8 * RANGE}


def test_after_a_reset_nothing_of_before_is_found_now_or_after_a_restart():  # S8.15
    engine = Tiered()
    engine.tier_has("abc")
    engine.cache.reset()
    assert engine.asks_as("r", "abc") == Miss() and not engine.below
    told(engine)
    assert engine.first_generation == 2 * RANGE
    engine.host_has("xy")
    engine.works_off()
    engine.restarts()
    told(engine)
    assert engine.below == {"x", "xy"}


def test_a_write_from_before_a_reset_is_not_found_after_a_restart():  # S8.15
    engine = Tiered()
    engine.host_has("abc")
    engine.steps_below()
    engine.cache.reset()
    engine.steps_below()
    engine.tier_ends()  # only now
    engine.restarts()
    told(engine)
    assert engine.tiers[0].records and not engine.below


def test_a_write_that_was_planned_before_a_reset_and_goes_out_after_it_writes_nothing():  # S8.15
    """Its label would be of the new range: a restart would serve the bytes of before."""
    engine = Tiered(host=32)
    engine.host_has("abc")
    engine.cache.step()
    engine.cache.below.demotion.plan()
    assert any(engine.cache.below.edge.ledger.stores())
    engine.cache.reset()
    plan = engine.cache.plan_below()
    stores = [each for each in plan.step.transfers if each.direction is Direction.STORE]
    assert stores and all(store.copies == () for store in stores)


def test_a_read_of_a_checkpoint_that_was_planned_before_a_reset_and_goes_out_after_it_reads_nothing():
    engine = Tiered(FULL, STATE, host=64)
    engine.host_has("abcd", ["abcd"])
    engine.cache.below.flush()
    engine.works_off()
    engine.host_forgets()
    assert engine.asks_as("r", "abcd")
    engine.cache.passed(engine.now)
    engine.cache.step()
    assert len(engine.cache.below.edge.ledger.loads) > 0
    engine.cache.reset()
    assert all(each.copies == () for each in engine.cache.plan_below().step.transfers)


def test_a_reset_before_the_ranks_have_reported_counts():  # S8.15
    engine = Tiered()
    engine.tier_has("abc")
    for tier in engine.tiers:
        tier.open(portion=100, scans=True)
    engine.reports_below = lambda *_, **__: None  # they are slow to open
    engine.begins()
    del engine.reports_below
    engine.cache.reset()
    engine.steps_below()
    told(engine)
    assert not engine.below
    engine.restarts()
    told(engine)
    assert not engine.below


def test_a_reset_while_portions_come():
    engine = restarted(["abcd"], portion=1)
    told(engine, 2)
    engine.cache.reset()
    told(engine, 4)
    assert not engine.below and engine.seen.state == "open"
    engine.host_has("xy")
    engine.works_off()
    assert engine.below == {"x", "xy"}
