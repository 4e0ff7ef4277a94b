"""BlockPool in stories. Any order of events is held by property_tests/machines/test_pool_machine.py."""

from string import ascii_letters
from types import SimpleNamespace

import pytest

from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.deciding import BlockPool, PoolExhausted
from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.pool.shape import Beside
from cpu_prefix_cache.pool.states import BlockState
from property_tests.strategies import chain
from tests.support.story import Shelf, make_scarce


def test_unpinning_twice_is_the_callers_mistake():
    """L5.25, S7.4"""
    shelf = Shelf(2)
    shelf.put("a")
    held, other = shelf.pin("a"), shelf.pin("a")
    shelf.pool.unpin(held)
    with pytest.raises(MisuseError, match="released before"):
        shelf.pool.unpin(held)
    assert shelf.pool.is_pinned(shelf.at("a"))
    shelf.pool.unpin(other)
    assert not shelf.pool.is_pinned(shelf.at("a"))


def test_keys_are_given_for_all_chunks_or_for_none():
    pool = BlockPool(3)
    with pytest.raises(MisuseError, match="2 keys were given for 3 chunks"):
        pool.allocate(3, chain("ab"))
    assert len(pool.allocate(2, chain("ab"))) == 2 and len(pool.allocate(1)) == 1


def test_a_chunk_is_committed_only_below_a_committed_parent():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    with pytest.raises(MisuseError, match="rule 3"):
        pool.commit([b], [b"ab"], a, pool.touch(None))
    pool.commit([a], [b"a"], pool.root, pool.touch(None))
    pool.commit([b], [b"ab"], a, pool.touch(None))
    with pytest.raises(MisuseError, match="already holds"):
        pool.commit([c], [b"ab"], a, pool.touch(None))


@pytest.mark.parametrize(("twice", "keys"), [(False, "abc"), (False, "a"), (True, "ab")])
def test_each_key_that_is_committed_has_a_block_of_its_own(twice, keys):
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(MisuseError, match=f"different blocks were given for {len(keys)} keys"):
        pool.commit(2 * blocks[:1] if twice else blocks, chain(keys), pool.root, pool.touch(None))


def test_a_reset_takes_each_node_over_once(monkeypatch):
    """Whoever holds a prompt chunk by chunk has a pin on each."""
    shelf = Shelf(40)
    shelf.put(ascii_letters[:40])
    pins = [shelf.pin(ascii_letters[:length]) for length in range(1, 41)]
    walked = list[int]()
    held_by = Forest.held_by
    monkeypatch.setattr(
        Forest, "held_by", lambda self, node: (walked.append(each) or each for each in held_by(self, node))
    )
    shelf.pool.reset()
    assert len(walked) <= 80
    assert shelf.pool.statistics().pinned == shelf.pool.statistics().retired == 40
    for pin in pins:
        shelf.pool.unpin(pin)
        shelf.pool.check_valid()
    assert shelf.pool.statistics().free == 40


def test_a_block_that_is_written_and_pinned_at_a_reset_waits_for_both():
    pool = BlockPool(2)
    [node] = pool.allocate(1)
    pin = pool.pin(node)
    pool.reset()
    pool.abort([node])
    with pytest.raises(MisuseError, match="is RETIRED, not WRITING"):
        pool.abort([node])
    assert pool.statistics().retired == pool.statistics().pinned == 1
    pool.unpin(pin)
    assert pool.statistics().free == 2 and pool.statistics().pinned == 0


def test_a_retired_writer_goes_on_and_ends_with_abort():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.retire(blocks)
    assert pool.statistics().retired == 2 and pool.num_available == 0
    with pytest.raises(MisuseError, match="is RETIRED, not WRITING"):
        pool.commit(blocks, chain("ab"), pool.root, pool.touch(None))
    with pytest.raises(MisuseError, match="is RETIRED, not WRITING"):
        pool.retire(blocks)
    with pytest.raises(MisuseError, match="is RETIRED, not CACHED"):
        pool.withdraw(blocks[0])
    pool.abort(blocks)
    assert pool.statistics().free == 2
    with pytest.raises(MisuseError, match="is FREE, not WRITING"):
        pool.abort(blocks)


def test_a_pinned_block_that_is_aborted_is_freed_at_unpin():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pin = pool.pin(block)
    pool.abort([block])
    assert pool.state(block) is BlockState.RETIRED
    pool.unpin(pin)
    assert pool.state(block) is BlockState.FREE
    with pytest.raises(MisuseError, match="free"):
        pool.pin(block)


def test_a_parent_that_becomes_childless_is_among_the_soonest_evicted():
    shelf = Shelf(6)
    for prompt in ("ab", "ac", "x"):
        shelf.put(prompt)
    shelf.withdraw("ac")  # "a" keeps its younger touch
    assert shelf.order == ["ab", "a", "x"]


def test_a_pool_grows_and_never_shrinks():
    pool = BlockPool(6, ready=0)
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    for asked, ready in ((2, 2), (1, 2), (5, 5), (100, 6)):
        pool.grow(asked)
        assert pool.statistics().ready == pool.statistics().free == ready
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_chunks_below_several_pins_are_counted_once():
    """Many requests below one long prefix: a sum of depths would count more blocks than there are (rule 16)."""
    shelf = Shelf(40)
    prefix = ascii_letters[:20]
    prompts = [prefix + letter for letter in "ABCDEFGH"]
    pins = []
    for prompt in prompts:
        shelf.put(prompt)
        pins.append(shelf.pin(prompt))
    assert shelf.pool.num_available == 40 - 28
    for pin in pins[1:]:
        shelf.pool.unpin(pin)
    assert shelf.pool.num_available == 40 - 21
    shelf.put("xyz")
    late = shelf.pin("xyz")  # its walk upwards meets nothing that was held before
    shelf.pool.unpin(pins[0])
    assert shelf.pool.num_available == 40 - 3
    shelf.pool.unpin(late)


def test_many_pins_on_a_prefix_that_was_withdrawn_are_walked_up_once():
    shelf = Shelf(40)
    shelf.put(ascii_letters[:30])
    pins = [shelf.pin(ascii_letters[:30]) for _ in range(20)] + [shelf.pin(ascii_letters[:at]) for at in range(1, 30)]
    shelf.pool.reset()

    class Counted(list):
        reads = 0

        def __getitem__(self, at):
            Counted.reads += 1
            return super().__getitem__(at)

    forest = shelf.pool._forest
    forest.pins._parents = Counted(forest.parent)
    assert not forest.pins.protected() and Counted.reads <= 30
    forest.pins._parents = forest.parent
    for pin in pins:
        shelf.pool.unpin(pin)
    assert shelf.pool.num_available == 40


def test_a_pool_is_checked_at_the_door():
    with pytest.raises(ConfigurationError, match="policy must be one of adaptive, arc, lru; got 'mru'"):
        BlockPool(4, policy="mru")
    for blocks, per_chunk in ((0, 1), (2, 3), (4, 0)):
        with pytest.raises(ConfigurationError, match="needs at least"):
            BlockPool(blocks, blocks_per_chunk=per_chunk)


def test_a_duplicate_stays_for_no_pin_that_has_ended():
    """A load pins "ab", and something else is pinned all the time. When the load has landed, its chunks leave first."""
    pool = BlockPool(4, beside=Beside(4))
    make_scarce(pool)

    def put(prompt):
        keys = chain(prompt)
        pool.commit(pool.allocate(len(keys), keys), keys, pool.root, pool.touch(None))

    for prompt in ("ab", "x", "w"):
        put(prompt)
    pool.pin(pool.find(b"x"))
    load = pool.pin(pool.find(b"ab"))
    pool.duplicated([pool.find(b"w")])
    put("y")  # while the load is under way
    pool.touch(pool.find(b"ab"), chain("ab"), 1.0)
    pool.unpin(load)
    pool.duplicated([pool.find(b"ab"), pool.find(b"a")])
    put("z")
    put("v")
    assert pool.find(b"y") is not None and pool.find(b"ab") is pool.find(b"a") is None
    pool.check_valid()


def test_the_note_of_a_hit_goes_with_a_duplicate_that_leaves():
    """Its number is given to another chunk, which nobody has used."""
    pool = BlockPool(4, beside=Beside(20))
    make_scarce(pool)

    def put(key):
        pool.commit(pool.allocate(1, [key]), [key], pool.root, pool.touch(None))

    put(b"hit")
    pool.touch(pool.find(b"hit"), [b"hit"], 0.0)
    pool.duplicated([pool.find(b"hit")])
    for key in b"abcdefgh":
        put(bytes([key]))
    before = pool.statistics().unused_chunks
    for key in b"ijkl":
        put(bytes([key]))
    assert pool.find(b"hit") is None and pool.statistics().unused_chunks == before + 4


def test_duplicates_leave_first_where_evicted_chunks_are_requested_again():
    pool = BlockPool(4, beside=Beside(4))

    def put(key):
        pool.commit(pool.allocate(1, [key]), [key], pool.root, pool.touch(None))

    for key in (b"a", b"b", b"c", b"d"):
        put(key)
    pool.duplicated([pool.find(b"d")])
    put(b"e")
    assert pool.find(b"a") is None and pool.find(b"d") is not None  # the oldest, as in any pool
    pool.missed([b"never here"])
    assert not pool.is_scarce
    pool.missed([b"a"])
    put(b"f")
    assert pool.find(b"d") is None and pool.find(b"b") is not None
    for at in range(20):  # none of which is requested again
        put(b"%d" % at)
    assert not pool.is_scarce
    pool.missed([b"b"])  # so long gone that the room beside would not have kept them
    assert not pool.is_scarce


def test_duplicates_stay_above_what_a_request_would_load_with_them():
    """Two levels above what only this pool has; and they are not in the way of the policy."""
    pool = BlockPool(4, beside=Beside(8, overlap=2))
    pool._duplicates.scarcity = SimpleNamespace(holds=True, evicted=lambda keys: None)
    for prompt in ("x", "abc"):
        keys = chain(prompt)
        pool.commit(pool.allocate(len(keys), keys), keys, pool.root, pool.touch(None))
    pool.duplicated([pool.find(b"a"), pool.find(b"ab")])
    pool.allocate(1)
    assert pool.find(b"x") is None
    assert all(pool.find(key) is not None for key in chain("abc"))
