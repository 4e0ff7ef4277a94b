"""ARC in stories. Its slow twin, on plain lists, is property_tests/models/model.py."""

import random

from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.eviction.rings import members
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.testing.engine import Engine, chain
from tests.support.story import Shelf

#  Three blocks, prompts of one chunk. Worked by hand from the paper; the oldest of each list comes first.
#
#  request  T1      T2      B1      B2      p     because
GOLDEN = """
  a        a       -       -       -       0     it finds room
  b        ab      -       -       -       0
  c        abc     -       -       -       0
  a        bc      a       -       -       0     a hit
  b        c       ab      -       -       0
  d        d       ab      c       -       0     |T1| = 1 > p, so T1 gives c
  e        e       ab      cd      -       0     |T1| + |B1| was 2 < 3: no ghost ends
  c        e       bc      d       a       1     in B1: p = 0 + max(0/2, 1). Now |T1| = p, so T2 gives a
  d        e       cd      -       ab      2     in B1: p = 1 + max(1/1, 1)
  a        -       cda     e       b       1     in B2: p = 2 - max(0/2, 1), and |T1| = p with B2: T1 gives e
  f        f       da      e       bc      1     |T1| = 0
  g        fg      a       e       cd      1     all four had 6: b, the oldest of B2, ends
  h        gh      a       f       cd      1     |T1| + |B1| was 3: e, the oldest of B1, ends; T1 gives f
  e        he      a       g       cd      1     forgotten, so a stranger again
  d        e       ad      gh      c       0     in B2: p = 1 - max(1/2, 1)
  a        e       da      gh      c       0     a hit
"""


def test_the_golden_trace():
    shelf = Shelf(3, policy="arc")
    hits = 0
    for line in GOLDEN.strip().splitlines():
        request, *expected = line.split()[:6]
        hits += request in shelf.names
        shelf.put(request)
        *found, p = lists(shelf)
        assert ["".join(each) or "-" for each in found] + [f"{p:g}"] == expected, f"after {request}: {line}"
    assert hits == 3


def test_a_scan_as_long_as_the_cache_leaves_no_ghosts():
    """With all of the cache in T1 there is no room in B1: the paper deletes the page for good."""
    shelf = Shelf(2, policy="arc")
    for prompt in "abcd":
        shelf.put(prompt)
    assert lists(shelf) == (["c", "d"], [], [], [], 0)


def test_a_scan_does_not_wash_out_what_is_used_again():
    """LRU, on the same prompts, loses it: the control."""
    for policy, kept in (("arc", {"a", "ab", "abc"}), ("lru", set())):
        shelf = Shelf(6, policy=policy)
        shelf.put("abc")
        shelf.put("abc")
        for prompt in "ghijklmnopqrstuvwxyz":
            shelf.put(prompt)
        assert shelf.names & {"a", "ab", "abc"} == kept


def test_stores_on_their_way_count_and_those_that_fail_do_not():
    engine = Engine(policy="arc")
    engine.starts("r", "abc")
    engine.computes("r")
    arc = engine.cache.pool._policy
    (store,) = engine.steps().transfers
    assert sizes(arc) == (3, 0)
    engine.reports(failed={store.id})
    assert sizes(arc) == (0, 0) and engine.host == set()


def test_a_chunk_in_t2_inherits_from_a_child_in_t1_and_stays_in_t2():
    """A request whose beginning the device has does not touch it, and adds what follows."""
    shelf = Shelf(3, policy="arc")
    for prompt in ("a", "a", "x", "x"):
        shelf.put(prompt)
    add(shelf, "ab", shelf.pool.touch(None))
    assert lists(shelf)[:2] == (["ab"], ["a", "x"])
    shelf.pool.abort(shelf.pool.allocate(1))
    assert lists(shelf)[:2] == ([], ["x", "a"])


def test_a_run_of_victims_ends_where_a_chunk_is_younger():
    shelf = Shelf(4, policy="arc")
    shelf.put("ab")
    shelf.put("x")
    add(shelf, "ac", shelf.pool.touch(None))
    shelf.withdraw("ac")  # "a" is now younger than "x", and "ab" is not
    shelf.pool.abort(shelf.pool.allocate(3))
    assert shelf.names == {"a"}


def test_ghosts_that_come_back_in_a_row_move_p_one_by_one():
    shelf = Shelf(5, policy="arc")
    for prompt in ("cd", "xyz", "cd", "wv", "w", "xyz"):
        shelf.put(prompt)
    # both are in B1, and T2 gives: p = 0 + max(0/2, 1), and with a ghost in B2 by then p = 1 + max(1/1, 1)
    assert lists(shelf)[2:] == ([], ["cd", "c"], 2)


def test_ghosts_are_bounded_however_often_the_prompts_change():
    shelf, prompts = Shelf(5, policy="arc"), random.Random(0).choices("abcdefghijkl", range(1, 13), k=300)
    most = [0, 0]
    for prompt in prompts:
        shelf.put(prompt)  # and check_valid, which knows the bounds
        _, _, *ghosts, _ = lists(shelf)
        assert len(ghosts[0]) + len(ghosts[1]) <= 5
        most = [max(before, len(now)) for before, now in zip(most, ghosts, strict=True)]
    assert min(most) >= 3  # there was something to bound


def test_a_chunk_that_comes_back_with_its_checkpoint_is_named_first():
    """They left the other way round, and of ghosts in a row the last one can be looked up."""
    pool = BlockPool(6, "arc", needs_checkpoint=lambda depth: True)

    def put(name):
        keys = [name.encode(), checkpoint_key(name.encode())]
        touch = pool.touch(None)
        pool.commit(pool.allocate(1, keys, [PieceNeed(name, 1)]), keys, pool.root, touch)

    put("x")
    pool.touch(pool.find(checkpoint_key(b"x")))
    put("v")
    put("w")
    pool.allocate(2, [b"y", b"yy"])
    assert pool._policy._ghosts.counts == [2, 0] and pool.find(b"v") is None
    new = pool.allocate(1, [b"v", checkpoint_key(b"v")], [PieceNeed("v", 1)])
    assert pool._policy._again.coming == 2
    pool.abort(new)


def add(shelf, prompt, touch):
    """Store the last chunk of a prompt, with a touch from before."""
    key = prompt.encode()
    shelf.pool.commit(shelf.pool.allocate(1, [key]), [key], shelf.at(prompt[:-1]), touch)
    shelf.pool.check_valid()


def sizes(arc):
    """|T1| and |T2|, with what is on its way there."""
    return tuple(ring.size for ring in arc._rings)


def lists(shelf):
    """The ends of T1 and T2 (chunks with no child in the same list), B1 and B2, and p; the oldest comes first."""
    arc = shelf.pool._policy
    ends = [[shelf.pool.key(touch.block).decode() for touch in members(ring)] for ring in arc._rings]
    ghosts = [[key.decode() for key in arc._ghosts.keys(which)] for which in (0, 1)]
    return (*ends, *ghosts, arc._target)


def test_no_fewer_than_no_chunks_are_accepted():
    """Small checkpoints make nodes smaller than chunks on average: more would leave for a chunk than T1 has."""
    pool = BlockPool(39, "arc", blocks_per_chunk=3, needs_checkpoint=lambda depth: True)
    for name in "abc":
        keys = [name.encode() * 16, name.encode() * 17]
        pool.commit(pool.allocate(1, keys, [PieceNeed(name, 1)]), keys, pool.root, pool.touch(None))
    pool.allocate(9, [bytes([at]) * 16 for at in range(9)])
    for name in "abc":
        pool.touch(pool.find(name.encode() * 17))  # all were used again: T1 has only what is being written
    assert pool.choose(pool.root, [b"x" * 16]) == 0


def test_a_parent_that_becomes_childless_behind_a_pinned_checkpoint_is_found():
    """A request stores a checkpoint after deeper chunks, so two of its places are equally old; the younger is pinned.
    The parent that the first victims leave behind enters before it, where the ring was walked already."""
    pool = BlockPool(4, "arc", needs_checkpoint=lambda depth: depth == 1)
    keys = chain("aaa")
    request = pool.touch(None, keys, 0.0)
    chunks = pool.allocate(3, keys)
    pool.commit(chunks, keys, pool.root, request)
    checkpoint = pool.allocate(0, [checkpoint_key(keys[0])], [PieceNeed("a", 1)])
    pool.commit(checkpoint, [checkpoint_key(keys[0])], chunks[0], request)
    pool.pin(checkpoint[0])
    pool.touch(chunks[0], chain("abc"), 1.0)
    assert pool.num_available >= 2
    assert sorted(pool.allocate(2, chain("abc")[1:])) == sorted(chunks[1:])
    pool.check_valid()


def test_chunks_that_find_no_room_are_not_expected():
    """Victims are counted as if each were as wide as the widest node. These are not, and no others are left."""
    pool = BlockPool(8, "arc", needs_checkpoint=lambda depth: True)
    pool.commit(pool.allocate(1), [b"a" * 16], pool.root, pool.touch(None))
    wide = pool.allocate(0, needs=[PieceNeed("wide", 3)])
    pool.commit(wide, [b"A" * 16], pool.find(b"a" * 16), pool.touch(None))
    pool.pin(*wide)
    for name in (b"x", b"y"):
        pool.commit(pool.allocate(1), [name * 16], pool.root, pool.touch(None))
    keys = [letter * 16 for letter in (b"p", b"q", b"r", b"s", b"t")]
    chunks = pool.take(5, keys)
    assert len(chunks) == 4
    pool.check_valid()
    pool.commit(chunks, keys[:4], pool.root, pool.touch(None))
    pool.check_valid()


def test_a_checkpoint_without_room_is_not_declined():
    """It is wanted, finds no room while all else is being written, and comes when that has ended."""
    pool = BlockPool(20, "arc", needs_checkpoint=lambda depth: True)
    pool.commit(pool.allocate(3, chain("abc")), chain("abc"), pool.root, pool.touch(None))
    pool.touch(pool.find(b"abc"))
    writing = pool.allocate(17)
    keys, needs = [*chain("xy"), checkpoint_key(b"xy")], [PieceNeed("states", 12)]
    assert pool.choose(pool.root, keys, needs) == 3
    assert pool.take(2, keys, needs) == [] and pool.statistics().evictions == 0
    pool.abort(writing)
    assert pool.choose(pool.root, keys, needs) == len(pool.take(2, keys, needs)) == 3
