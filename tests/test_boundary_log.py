"""What can be hit, told as it comes and goes. Any order of events is held by the machines in property_tests/."""

import pytest

from cpu_prefix_cache import (
    BlockPool,
    BoundariesRemoved,
    BoundariesStored,
    Group,
    GroupKind,
    HybridChunkPlanner,
    KVCacheCoordinator,
)
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import new_pool
from tests.story import ATTENTION, GRID, Engine, chain

STATE = Group(name="state", kind=GroupKind.STATE, block_tokens=GRID, block_bytes=100)


def stored(*names, below=None):
    return BoundariesStored([name.encode() for name in names], below and below.encode())


def removed(*names):
    return BoundariesRemoved([name.encode() for name in names])


@pytest.fixture
def engine():
    return Engine(host=3, log_boundaries=True)


def test_without_being_asked_for_there_is_no_log():
    engine = Engine()
    engine.serves("ab")
    assert engine.cache.take_events() == []
    pool = BlockPool(4)  # nobody would take it off one that is made so
    pool.commit(pool.allocate(1), [b"a"], pool.root, pool.touch(None))
    assert pool.take_events() == []


def test_chunks_are_told_when_they_are_committed_and_when_they_are_evicted(engine):
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


def test_what_hangs_below_what_was_told_before_says_so(engine):
    engine.serves("a")
    engine.cache.take_events()
    engine.serves("abc")
    assert engine.cache.take_events() == [stored("ab", "abc", below="a")]


def test_neighbours_are_told_together_and_strangers_apart(engine):
    engine.serves("a")
    engine.serves("ab")
    engine.serves("x")
    assert engine.cache.take_events() == [stored("a", "ab"), stored("x")]


def test_a_reset_takes_everything_back_and_what_comes_later_is_told_again(engine):
    engine.serves("ab")
    engine.cache.take_events()
    engine.cache.reset()
    engine.device_forgets()
    engine.serves("a")
    assert engine.cache.take_events() == [removed("a", "ab"), stored("a")]


def test_what_a_failed_load_withdraws_is_taken_back(engine):
    engine.serves("ab")
    engine.device_forgets()
    engine.cache.take_events()
    load = engine.starts("r", "ab")
    engine.steps()
    engine.reports(failed=[load])
    assert engine.cache.take_events() == [removed("ab", "a")]


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


def test_a_chunk_is_told_with_its_checkpoint_and_leaves_with_it():
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


def test_a_checkpoint_that_goes_with_its_chunk_is_told_once():
    host = Hybrid(blocks=4)
    host.puts("ab")
    host.keeps("ab")
    host.keeps("a")
    host.pool.take_events()
    host.pool.withdraw(host.pool.find(b"ab"))
    assert host.pool.take_events() == [removed("ab")]
    host.pool.reset()
    assert host.pool.take_events() == [removed("a")]


def test_chunks_without_blocks_are_told_by_numbers_beyond_the_blocks():
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
