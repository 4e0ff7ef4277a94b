"""The log of boundaries that become and cease to be hits. Any order of events is held by property_tests/'s machines."""

import pytest

from cpu_prefix_cache.deciding import (
    BlockPool,
    BoundariesRemoved,
    BoundariesStored,
    HybridChunkPlanner,
    KVCacheCoordinator,
    StateGroup,
)
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import new_pool
from cpu_prefix_cache.testing.engine import ATTENTION, GRID, Engine, chain

STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=100)


def stored(*names, below=None):
    return BoundariesStored([name.encode() for name in names], below and below.encode())


def removed(*names):
    return BoundariesRemoved([name.encode() for name in names])


@pytest.fixture
def engine():
    return Engine(host=3, log_boundaries=True)


def test_there_is_no_log_unless_it_is_switched_on():
    engine = Engine()
    engine.serves("ab")
    assert engine.cache.take_events() == []
    pool = BlockPool(4)  # nobody would take it off one that is made so
    pool.commit(pool.allocate(1), [b"a"], pool.root, pool.touch(None))
    assert pool.take_events() == []


def test_chunks_are_logged_when_committed_and_when_evicted(engine):
    engine.starts("r", "ab")
    engine.computes("r")
    store = [transfer.id for transfer in engine.steps().transfers]
    assert engine.cache.take_events() == []  # on its way is not there
    engine.reports(done=store)
    assert engine.cache.take_events() == [stored("a", "ab")]
    assert engine.cache.take_events() == []
    engine.ends("r")
    engine.serves("xy")  # takes the third block, and that of "ab"
    assert engine.cache.take_events() == [removed("ab"), stored("x", "xy")]


def test_a_chunk_below_one_logged_before_names_it_as_its_parent(engine):
    engine.serves("a")
    engine.cache.take_events()
    engine.serves("abc")
    assert engine.cache.take_events() == [stored("ab", "abc", below="a")]


def test_neighbours_are_logged_in_one_event_and_strangers_in_two(engine):
    engine.serves("a")
    engine.serves("ab")
    engine.serves("x")
    assert engine.cache.take_events() == [stored("a", "ab"), stored("x")]


def test_a_reset_logs_every_removal_and_later_chunks_are_logged_again(engine):
    engine.serves("ab")
    engine.cache.take_events()
    engine.cache.reset()
    engine.device_forgets()
    engine.serves("a")
    assert engine.cache.take_events() == [removed("a", "ab"), stored("a")]


class Hybrid:
    """A pool for chunks of attention and the states after some of them."""

    def __init__(self, blocks, groups=(ATTENTION, STATE)):
        planner = HybridChunkPlanner(groups, max_model_len=1_000)
        self.pool = new_pool(planner, blocks, log_boundaries=True)
        self.coordinator = KVCacheCoordinator(planner, self.pool)
        self.touch = self.pool.touch(None)

    def puts(self, prompt):
        chunks = self.pool.allocate(len(prompt))
        self.pool.commit(chunks, chain(prompt), self.pool.root, self.touch)

    def keeps(self, prompt):
        keys = chain(prompt)
        new = self.pool.allocate(0, needs=self.coordinator.needs(self.coordinator.checkpoint_at(keys, len(keys))))
        self.pool.commit(new, [checkpoint_key(keys[-1])], self.pool.find(keys[-1]), self.touch)


def test_a_chunk_is_logged_with_its_checkpoint_and_leaves_with_it():
    host = Hybrid(blocks=6)
    host.puts("abc")
    assert host.pool.take_events() == []
    host.keeps("ab")
    assert host.pool.take_events() == [stored("ab", below="a")]
    host.keeps("abc")
    assert host.pool.take_events() == [stored("abc", below="ab")]
    host.pool.withdraw(host.pool.find(checkpoint_key(b"ab")))
    assert host.pool.take_events() == [removed("ab")]  # whose chunk stays
    host.pool.allocate(6)
    assert host.pool.take_events() == [removed("abc")]
    host.pool.check_valid()


def test_a_checkpoint_that_goes_with_its_chunk_is_logged_once():
    host = Hybrid(blocks=4)
    host.puts("ab")
    host.keeps("ab")
    host.keeps("a")
    host.pool.take_events()
    host.pool.withdraw(host.pool.find(b"ab"))
    assert host.pool.take_events() == [removed("ab")]
    host.pool.reset()
    assert host.pool.take_events() == [removed("a")]


def test_chunks_without_blocks_are_logged_by_numbers_beyond_the_blocks():
    """A model of states only."""
    host = Hybrid(blocks=2, groups=[STATE])
    host.puts("abc")
    host.keeps("ab")
    host.keeps("abc")
    assert host.pool.take_events() == [stored("ab", "abc", below="a")]
    host.keeps("a")
    assert host.pool.take_events() == [removed("abc"), stored("a")]
    host.pool.reset()
    assert host.pool.take_events() == [removed("a", "ab")]
