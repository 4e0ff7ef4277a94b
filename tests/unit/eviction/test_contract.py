"""The pool's requirements of any policy. A new one is added to POLICIES and nowhere else.

The order of victims, whatever happens, is held by property_tests/machines/test_pool_machine.py.
"""

import gc
import sys

import pytest

from cpu_prefix_cache import POLICIES, MisuseError
from cpu_prefix_cache.deciding import BlockPool, PoolExhausted
from property_tests.strategies import chain
from tests.support.story import Shelf

pytestmark = pytest.mark.parametrize("policy", POLICIES)
NUM_RINGS = 30  # an end of one is a mark, too


def test_childless_chunks_leave_first(policy):
    pool = BlockPool(4, policy)
    pool.commit(pool.allocate(4), chain("abcd"), pool.root, pool.touch(None))
    for left in (3, 2, 1, 0):
        pool.abort(pool.allocate(pool.statistics().free + 1))
        assert pool.resident_run(chain("abcd"), 0, 4) == left


def test_pinned_chunks_stay(policy):
    pool = BlockPool(3, policy)
    for key in (b"a", b"b", b"c"):
        pool.commit(pool.allocate(1), [key], pool.root, pool.touch(None))
    pin = pool.pin(pool.find(b"a"))
    pool.abort(pool.allocate(2))
    assert pool.find(b"a") is not None and pool.num_available == 2
    pool.unpin(pin)
    assert pool.num_available >= 3


def test_ancestors_of_a_pinned_chunk_stay_and_its_descendants_go(policy):
    shelf = Shelf(4, policy=policy)
    shelf.put("abc")
    shelf.put("x")
    shelf.pin("ab")
    shelf.pool.abort(shelf.pool.allocate(2))
    shelf.pool.check_valid()
    assert shelf.names == {"a", "ab"}


def test_the_question_changes_nothing(policy):
    shelf = Shelf(4, policy=policy)
    shelf.put("ab")
    shelf.put("x")
    shelf.put("ac")
    before = shelf.pool.statistics()
    assert shelf.order == shelf.order
    assert shelf.pool.statistics() == before
    shelf.pool.check_valid()


def test_the_answer_is_what_happens(policy):
    shelf = Shelf(8, policy=policy)
    for prompt in ("abc", "abd", "x", "xy", "abd"):
        shelf.put(prompt)
    foretold, gone = shelf.order, []
    while shelf.names:
        before = shelf.names
        shelf.pool.abort(shelf.pool.allocate(shelf.pool.statistics().free + 1))
        shelf.pool.check_valid()
        gone += before - shelf.names
    assert gone == foretold


def test_everything_can_leave_after_a_withdrawal(policy):
    pool = BlockPool(3, policy)
    pool.commit(pool.allocate(3), chain("abc"), pool.root, pool.touch(None))
    pin = pool.pin(pool.find(b"abc"))
    pool.withdraw(pool.find(b"ab"))
    assert pool.num_available == 0  # "a" stands above bytes that are still needed
    pool.unpin(pin)
    assert pool.num_available >= 3 and len(pool.allocate(3)) == 3


def test_a_withdrawal_hides_nothing_that_the_same_request_added_elsewhere(policy):
    """The chunk that an older request stored late below "ab" goes too, and "ac" is the last chunk left."""
    pool = BlockPool(4, policy)
    early, late = pool.touch(None), pool.touch(None)
    pool.commit(pool.allocate(2), chain("ab"), pool.root, late)
    pool.commit(pool.allocate(1), [b"abx"], pool.find(b"ab"), early)
    pool.commit(pool.allocate(1), [b"ac"], pool.find(b"a"), late)
    pool.withdraw(pool.find(b"ab"))
    pool.check_valid()
    assert [pool.key(block) for block in pool.soonest_evicted()] == [b"ac", b"a"]
    assert len(pool.allocate(4)) == 4


def test_a_store_may_fail_or_become_another_one(policy):
    pool = BlockPool(3, policy)
    a, b, c = pool.allocate(3, chain("abc"))
    pool.abort([b, c])
    pool.check_valid()
    pool.commit([a], [b"x"], pool.root, pool.touch(None))
    pool.check_valid()
    assert pool.find(b"x") == a and pool.statistics().free == 2


def test_the_same_chunk_may_be_written_twice_and_come_once(policy):
    """The slower writer comes after what the faster one wrote was evicted."""
    pool = BlockPool(2, policy)
    slow, fast = (pool.allocate(1, [b"a"])[0] for _ in range(2))
    pool.commit([fast], [b"a"], pool.root, pool.touch(None))
    pool.abort(pool.allocate(1, [b"b"]))
    assert pool.find(b"a") is None
    pool.commit([slow], [b"a"], pool.root, pool.touch(None))
    pool.check_valid()
    assert pool.find(b"a") == slow


def test_an_allocation_that_does_not_fit_is_refused_before_anything_is_learnt(policy):
    """The first of them was let in, and is given up again (rule 4)."""
    shelf = Shelf(2, policy=policy)
    shelf.put("ab")
    shelf.pin("a")
    with pytest.raises(PoolExhausted):
        shelf.pool.allocate(2, chain("xy"))
    assert shelf.names == {"a"} and shelf.pool.statistics().free == 1
    shelf.pool.check_valid()
    shelf.put("x")
    assert shelf.names == {"a", "x"}
    shelf.pool.check_valid()


def test_a_touch_of_before_a_reset_can_be_committed_after_it(policy):
    """Also one that named a chunk then, whose block was not handed out since. It is as old as it was."""
    shelf = Shelf(6, policy=policy)
    pool = shelf.pool
    before = pool.touch(None, chain("abcd"), 1.0)
    pool.commit(pool.allocate(4, chain("abcd")), chain("abcd"), pool.root, before)
    pool.reset()
    shelf.now = 1.0
    shelf.put("x")
    pool.commit(pool.allocate(2, chain("ab")), chain("ab"), pool.root, before)
    pool.check_valid()
    assert shelf.names == {"a", "ab", "x"}
    assert policy == "adaptive" or shelf.order == ["ab", "a", "x"]


def test_a_reset_leaves_nothing(policy):
    """Nothing keeps the keys of before, nor what the policy had of them, and no garbage collection was needed. What
    adaptive has learned of them stays.
    """
    pool = BlockPool(60, policy)
    keys = [bytes([97, at]) * 8 for at in range(40)]
    gc.disable()
    try:
        before = kept_of(keys)
        for now in range(40):
            one = keys[now : now + 1]
            pool.commit(pool.allocate(1, one), one, pool.root, pool.touch(None, one, float(now)))
        pool.reset()
        pool.check_valid()
        del one
        after = kept_of(keys)
    finally:
        gc.enable()
    known = 20 if policy == "adaptive" else 0  # prompts it learns from: as many as a third of the blocks
    assert after[0] == before[0] + known and after[1] <= before[1] + 2 * known + NUM_RINGS


def kept_of(keys):
    """How many of these keys somebody has besides, and how many marks and uses policies keep."""
    marks = sum(type(each).__name__ in ("Touch", "Segment", "Use") for each in gc.get_objects())
    return sum(sys.getrefcount(key) > 3 for key in keys), marks


def test_a_reset_in_the_middle_of_everything(policy):
    shelf = Shelf(5, policy=policy)
    shelf.put("ab")
    shelf.put("ab")
    writing = shelf.pool.allocate(2, chain("xy"))
    shelf.pool.reset()
    shelf.pool.check_valid()
    with pytest.raises(MisuseError, match="is RETIRED, not WRITING"):
        shelf.pool.commit(writing, chain("xy"), shelf.pool.root, shelf.pool.touch(None))
    shelf.put("abc")
    shelf.pool.abort(writing)
    shelf.pool.check_valid()
    assert shelf.names == {"a", "ab", "abc"} and shelf.pool.statistics().free == 2
