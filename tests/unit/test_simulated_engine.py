"""The simulated engine (cpu_prefix_cache.testing.Engine): copies move patterns, and wrong ones are noticed."""

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import HybridChunkPlanner, PoolExhausted, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.testing import Engine
from cpu_prefix_cache.testing.engine import GRID
from property_tests.models.engines import QueueSlots

FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=100)
WINDOW = WindowGroup(name="window", block_tokens=2, block_bytes=100, window_tokens=2 * GRID + 1)
STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=200)


def with_prompt_on_host(prompt="abc", groups=(), **options):
    """An engine whose host has a prompt that its device has not."""
    planner = HybridChunkPlanner(groups, max_model_len=1_000) if groups else None
    engine = Engine(**{"device": 64, "host": 64, "planner": planner} | options)
    engine.serves(prompt)
    engine.device_forgets()
    return engine


@pytest.mark.parametrize("groups", [(), (FULL, WINDOW, STATE)], ids=["attention", "all kinds"])
def test_a_load_brings_the_bytes_of_its_keys(groups):
    engine = with_prompt_on_host(groups=groups)
    load = engine.starts("again", "abcd")
    assert load is not None and engine.copies() == ["abc"]
    engine.computes("again")
    engine.ends("again")
    engine.copies()
    assert engine.asks("abcde") == Hit(4 * GRID) and engine.is_at_rest()


@pytest.mark.parametrize("at", [*range(8), None])
def test_a_load_of_a_damaged_block_is_noticed(at):
    """Any block of the chunks and of the checkpoint, on any rank."""
    engine = with_prompt_on_host(groups=(FULL, WINDOW, STATE), ranks=2)
    engine.starts("again", "abcd")
    (load,) = engine.steps().transfers
    blocks = [block for copy in load.copies for block in copy.device_blocks]
    assert len(blocks) == 3 + 4 + 1
    engine.reports([load], rank=0)
    if at is None:
        assert [each.ok for each in engine.reports([load], rank=1)] == [True]
        return
    engine.memory.device[0][blocks[at]] = "damaged"
    with pytest.raises(AssertionError, match="brought other bytes"):
        engine.reports([load], rank=1)


def test_a_load_that_moves_nothing_is_noticed():
    """Its blocks hold nothing from the plan on, though they had these very bytes before they left the device."""
    engine = with_prompt_on_host(device=4)
    engine.starts("again", "abcd")
    (load,) = engine.steps().transfers
    engine.memory._moving[0].clear()
    with pytest.raises(AssertionError, match="brought other bytes"):
        engine.reports([load])


def test_a_host_block_that_is_overwritten_while_it_is_read_is_noticed():
    engine = with_prompt_on_host()
    engine.starts("again", "abcd")
    (load,) = engine.steps().transfers
    engine.memory.host[0][load.copies[0].host_blocks[1]] = "of another store"
    with pytest.raises(AssertionError, match="was overwritten before it had ended"):
        engine.reports([load])


def test_a_device_block_that_is_overwritten_while_it_is_stored_is_noticed():
    engine = Engine()
    engine.starts("r", "ab")
    engine.computes("r")
    (store,) = engine.steps().transfers
    engine.memory.write(store.copies[0].device_blocks[:1], ["of another request"])
    with pytest.raises(AssertionError, match="was overwritten before it had ended"):
        engine.reports([store])


def test_a_request_that_reads_other_bytes_is_noticed():
    engine = Engine()
    engine.serves("ab")
    engine.memory.write([engine.gpu.find(b"a")], ["of another request"])
    with pytest.raises(AssertionError, match="r reads other bytes than those of a"):
        engine.starts("r", "abc")


def test_a_report_may_be_lost_come_late_and_come_again():
    engine = with_prompt_on_host(ranks=2)
    load = engine.starts("again", "abcd")
    engine.steps()
    assert engine.reports([load], rank=1) == []
    assert isinstance(engine.asks("abcd"), Pending)
    engine.steps()
    assert engine.reports([load], rank=1) == []
    assert [each.ok for each in engine.reports([load], rank=0)] == [True]
    assert engine.reports([load], rank=0) == []


def test_a_copy_that_fails_on_one_rank_leaves_torn_blocks_that_nobody_finds():
    engine = with_prompt_on_host(ranks=2)
    load = engine.starts("again", "abcd")
    engine.steps()
    engine.reports([load], rank=0)
    assert [each.ok for each in engine.reports(failed=[load], rank=1)] == [False]
    assert engine.asks("abcd") == Miss()
    engine.computes("again")
    engine.copies()
    engine.ends("again")
    engine.device_forgets()
    assert engine.starts("third", "abcd") is not None and engine.copies()


def test_blocks_are_taken_as_they_are_computed():
    engine = Engine(device=QueueSlots(4))
    engine.starts("r", "abcd", chunks=1)
    assert len(engine.device.waiting) == 3
    engine.computes("r", 3)
    assert len(engine.device.waiting) == 1
    with pytest.raises(PoolExhausted):
        engine.starts("other", "xy")


def test_a_process_that_begins_again_has_nothing():
    engine = with_prompt_on_host()
    engine.begins()
    assert engine.asks("abcd") == Miss() and engine.host == set() and not engine.memory.host[0]
