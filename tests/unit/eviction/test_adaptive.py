"""`adaptive` as a story: its lessons, the chunks that it declines, and the arguments that it requires."""

import heapq
import random
from math import inf, nan
from unittest import mock

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.eviction.buckets import Buckets
from cpu_prefix_cache.eviction.survival import BINS, EDGES, HALF_LIFE_REQUESTS, Survival
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from property_tests.strategies import chain
from tests.support.story import Shelf


def test_conversations_stay_and_one_off_prompts_go():
    """Ten conversations go on every minute; between their turns come three times as many prompts that never return."""
    hits = {policy: share_of_hits(policy) for policy in ("lru", "adaptive")}
    assert hits["lru"] == 0 and hits["adaptive"] > 0.7


def share_of_hits(policy):
    shelf = Shelf(60, policy=policy)
    hits = 0
    chunks = 0
    for turn, prompt, pause in conversations():
        if turn > 30 and prompt[0] < "z":
            hits += shelf.pool.resident_run(chain(prompt), 0, len(prompt))
            chunks += len(prompt)
        shelf.put(prompt, after=pause)
    return hits / chunks


@pytest.mark.parametrize("lasts", [True, False])
def test_chunks_go_by_age_while_an_lru_would_find_nearly_all(lasts):
    """Each of 20 agents goes on at once and then is gone for good: an LRU finds all. Then they come back in turns."""
    pool = BlockPool(100, "adaptive")
    policy = pool._policy
    now = 0.0
    for agent in range(60):
        for length in range(1, 6):
            now += 2.0
            asks(pool, chain(chr(100 + agent) * length), now)
            policy._buckets._recency._served *= 0.99  # as if something had been lost that an LRU has
    assert policy._buckets.is_by_age
    for number in range(0 if lasts else 300):
        now += 2.0
        asks(pool, chain(chr(100 + number % 60) * 6), now)
    assert policy._buckets.is_by_age == lasts


def asks(pool, keys, now, needs=None):
    """A request, with a checkpoint of these blocks at its end, if any."""
    have = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[have - 1]) if have else None
    touch = pool.touch(deepest, keys, now)
    new, count = keys[have:], len(keys) - have
    if needs is not None and pool.find(checkpoint_key(keys[-1])) is None:
        new = [*new, checkpoint_key(keys[-1])]
    if new:
        pin = pool.pin() if deepest is None else pool.pin(deepest)
        nodes = pool.allocate(count, new, needs if len(new) > count else None)
        pool.commit(nodes, new, pool.root if deepest is None else deepest, touch)
        pool.unpin(pin)


@pytest.mark.parametrize("needs_checkpoint", [None, lambda depth: depth % 5 == 0])
def test_an_lru_has_room_for_nodes_not_blocks(needs_checkpoint):
    """It loses 12 prompts in turn that take 60 chunks, where 50 chunks fit, or 30 with their checkpoints."""
    pool = BlockPool(200, "adaptive", blocks_per_chunk=4, needs_checkpoint=needs_checkpoint)
    for number in range(500):
        keys = chain(chr(100 + number % 12) * 5)
        asks(pool, keys, 2.0 * number, needs=[PieceNeed(f"state {number}", 13)] if needs_checkpoint else None)
        assert not pool._policy._buckets.is_by_age


def test_chunks_that_others_serve_are_found_as_well():
    """A device has all that the host has, and asks it for nothing."""
    pool = BlockPool(100, "adaptive")
    asks(pool, chain("a" * 50), 0.0)
    for number in range(1, 400):
        pool.touch(None, chain("a" * 50), 2.0 * number)
        assert not pool._policy._buckets.is_by_age


def test_after_a_reset_an_lru_has_nothing():
    pool = BlockPool(100, "adaptive")
    for number in range(300):
        if number == 280:
            pool.reset()
        asks(pool, chain(chr(100 + number % 20) * 5), 2.0 * number)
        assert not pool._policy._buckets.is_by_age


def test_a_checkpoint_that_comes_back_is_as_young_as_its_chunks():
    """Room for four prompts: the first one leaves, and is stored anew."""
    pool = BlockPool(32, "adaptive", needs_checkpoint=lambda depth: depth == 2)
    with mock.patch.object(Buckets, "is_by_age", True):
        for number, prompt in enumerate("abcdea"):
            asks(pool, chain(prompt * 2), 10.0 * number, needs=[PieceNeed(prompt, 6)])
            pool.check_valid()
        last = [key for key in map(pool.key, pool.soonest_evicted()) if key == checkpoint_key(b"aa")]
        assert last and list(map(pool.key, pool.soonest_evicted()))[-3:].count(last[0]) == 1


def test_a_checkpoint_that_comes_back_late_takes_no_time_back():
    """Its request was admitted long before it has computed the chunk that the checkpoint hangs below."""
    pool = BlockPool(32, "adaptive", needs_checkpoint=lambda depth: depth == 2)
    for number, prompt in enumerate("abcde"):
        asks(pool, chain(prompt * 2), 10.0 * number, needs=[PieceNeed(prompt, 6)])
    keys = chain("aa")
    new = [*keys[pool.resident_run(keys, 0, 2) :], checkpoint_key(keys[-1])]
    assert pool.find(new[-1]) is None
    touch = pool.touch(None, keys, 50.0)
    nodes = pool.allocate(len(new) - 1, new, [PieceNeed("late", 6)])
    pool.touch(None, chain("x"), 5_000.0)
    pool.commit(nodes, new, pool.root if len(new) == 3 else pool.find(keys[-len(new)]), touch)
    pool.check_valid()


@pytest.mark.parametrize(("policy", "next_use"), [("adaptive@100", None), ("adaptive", 60.0)])
def test_where_costs_differ_or_clients_give_hints_nothing_goes_by_age(policy, next_use):
    """An LRU knows of neither."""
    pool = BlockPool(100, policy)
    for number in range(200):
        keys = chain("a" * 5)
        pool.touch(pool.find(keys[-1]), keys, 2.0 * number, next_use=next_use)
        if not number:
            pool.commit(pool.allocate(5, keys), keys, pool.root, pool.touch(None))
        pool._policy._buckets._recency._served = 0.0
    assert not pool._policy._buckets.is_by_age


def conversations():
    """Turn, prompt, and seconds since the one before."""
    for turn in range(60):
        for number in range(10):
            yield turn, chr(ord("a") + number) * min(3 + turn // 20, 5), 3.0
            for once in range(2):
                yield turn, chr(1000 + turn * 20 + number * 2 + once) * 5, 1.5


@pytest.mark.slow
def test_prompts_in_bursts_of_one_moment_are_distinguished_all_the_same():
    """150 requests have the time of the first of them. With a clock that waits for the next burst nothing is hit."""
    shelf = Shelf(50, policy="adaptive")
    now = 0.0
    found = 0
    asked = 0
    for number, (turn, prompt, pause) in enumerate(conversations()):
        now += pause
        if turn > 30 and prompt[0] < "z":
            found += prompt in shelf.names
            asked += 1
        shelf.put(prompt, after=now - shelf.now if number % 150 == 0 else 0.0)
    assert found > 0.7 * asked


@pytest.mark.slow
def test_times_in_whole_minutes_find_nine_tenths_of_what_exact_ones_do():
    """Some 50 requests to a minute, of agents that come back after 5 to 60 seconds, or never."""
    exact, rounded = (hits_of_agents(unit) for unit in (None, 60))
    assert rounded > 0.9 * exact


def hits_of_agents(unit):
    """With all times, or those rounded to so many seconds."""
    shelf = Shelf(40, policy="adaptive")
    chance = random.Random(1)
    hits = 0
    others = 1000
    agents = [(chance.random() * 60, number, 3) for number in range(25)]  # when, who, with how many chunks
    heapq.heapify(agents)
    for number in range(3_000):
        now, who, length = heapq.heappop(agents)
        prompt = chr(1000 + who) * length
        hits += number > 1_500 and shelf.pool.resident_run(chain(prompt), 0, length)
        shelf.put(prompt, after=(now if unit is None else now // unit * unit) - shelf.now)
        goes_on = chance.random() < 0.9
        others += not goes_on
        after = now + chance.uniform(5, 60)
        heapq.heappush(agents, (after, who, min(12, length + 1)) if goes_on else (after, others, 3))
    return hits


@pytest.mark.parametrize("step", [1.0, 0.05], ids=["a log in whole seconds", "the steps of an engine"])
def test_many_requests_a_step_do_not_let_its_clock_run_away(step):
    """40 at each. In the first of them they count a second each, as nothing is known yet; from then on as they come."""
    pool = BlockPool(50, "adaptive")
    for number in range(4_000):
        now = number // 40 * step
        asks_alone(pool, number, now)
        assert 0 <= pool._policy._now - now <= 40


@pytest.mark.parametrize("length", [1, 5, 40, 200])
@pytest.mark.parametrize("policy", ["arc", "adaptive"])
def test_a_scan_of_one_off_prompts_leaves_what_is_used_again(policy, length):
    """A burst of prompts that never come back, of any length, longer than the cache too: eight caches full of them."""
    shelf, regulars = Shelf(40, policy=policy), "abcde"
    for turn in range(30):
        for each in regulars:
            shelf.put(each * 3)
        shelf.put(chr(5000 + turn) * 2)
    for number in range(-(-320 // length)):
        shelf.put(chr(1000 + number) * min(length, 40), after=0.01)
    there = sum(shelf.pool.resident_run(chain(each * 3), 0, 3) for each in regulars)
    assert there >= 15 - 40 // 5
    lru = Shelf(40)
    for prompt in (*(each * 3 for each in regulars), *(chr(1000 + number) * 40 for number in range(8))):
        lru.put(prompt)
    assert not lru.pool.resident_run(chain("aaa"), 0, 1)


def test_the_end_of_a_prompt_is_declined_first():
    shelf = Shelf(10, policy="adaptive")
    for _ in range(20):
        shelf.put("aaaaaaaa", after=3.0)
    shelf.put("zzzzz", after=0.1)
    assert "a" * 8 in shelf.names and {"z", "zz"} <= shelf.names and "zzz" not in shelf.names


def test_room_that_is_free_is_given_to_anybody():
    shelf = Shelf(10, policy="adaptive")
    for _ in range(20):
        shelf.put("aaaa")
    shelf.put("zzzzzz")
    assert {"a" * 4, "z" * 6} <= shelf.names


def test_a_checkpoint_is_declined_with_its_chunks():
    """It hangs below the last of them; alone it could never be found (rule 9)."""
    pool = BlockPool(8, "adaptive", needs_checkpoint=lambda depth: True)
    for turn in range(20):
        stores_with_checkpoint(pool, "aaaaa", 3.0 * turn)
    before = pool.statistics()
    keys = chain("zz")
    pool.touch(None, keys, 57.1)
    assert pool.choose(pool.root, [*keys, checkpoint_key(keys[-1])], [PieceNeed("state of z", 2)]) < 3
    assert pool.statistics() == before


def stores_with_checkpoint(pool, prompt, now):
    keys = chain(prompt)
    there = pool.find(checkpoint_key(keys[-1]))
    touch = pool.touch(there, keys, now)
    if there is None:
        new = [*keys, checkpoint_key(keys[-1])]
        pool.commit(pool.allocate(len(keys), new, [PieceNeed(prompt, 2)]), new, pool.root, touch)
    pool.check_valid()


def test_a_checkpoint_that_is_resumed_from_is_used_again():
    pool = BlockPool(8, "adaptive", needs_checkpoint=lambda depth: True)
    stores_with_checkpoint(pool, "aaaaa", 0.0)
    checkpoint = pool._policy._mark[pool.find(checkpoint_key(b"aaaaa"))]
    before = checkpoint.use
    stores_with_checkpoint(pool, "aaaaa", 9.0)
    assert checkpoint.use is not before and checkpoint.use.at == 9.0


def test_ghosts_are_learned_from_and_are_few():
    """A prompt that comes back after all of it was evicted is not a first turn, and shows how long that took."""
    shelf = Shelf(9, policy="adaptive")
    shelf.put("aaa")
    for number in range(30):
        shelf.put(chr(1000 + number) * 9)
    assert shelf.pool._policy._num_ghosts <= 3
    shelf.put("bbb")
    pool = shelf.pool
    pool.reset()
    reuses = sum(pool._policy._buckets._survival.reuses)
    shelf.put("bbb")
    assert sum(pool._policy._buckets._survival.reuses) > 0.9 * reuses + 0.9


def test_the_end_of_a_prompt_is_forgotten_first():
    pool = BlockPool(6, "adaptive")  # remembers two ghosts
    for now, prompt in enumerate(("ab", "ac", "x")):
        pool.touch(None, chain(prompt), float(now))
    assert knows(pool) == {"a", "x"}


def test_cached_chunks_outweigh_ghosts_of_a_later_prompt():
    """The prompt "abc" is forgotten, and "abd" is known, when the chunks of "abc" come."""
    pool = BlockPool(3, "adaptive")  # remembers one ghost
    late = pool.touch(None, chain("abc"), 0.0)
    pool.touch(None, chain("x"), 1.0)
    pool.touch(None, chain("abd"), 2.0)
    pool.commit(pool.allocate(3), chain("abc"), pool.root, late)
    pool.touch(pool.find(b"ab"), chain("abd"), 3.0)
    assert knows(pool) == {"a", "abc", "abd"}


def knows(pool):
    """The first chunks of all segments."""
    names = ("a", "ab", "abc", "abd", "ac", "x")
    return {name for name in names if pool._policy._segments.find(name.encode()) is not None}


def test_the_answer_of_a_request_belongs_to_its_prompt():
    """Its chunks come one at a time while it decodes, and no prompt has had them: one segment all the same."""
    pool = BlockPool(20, "adaptive")
    keys = chain("promptanswer")
    touch = pool.touch(None, keys[:6], 0.0)
    pool.commit(pool.allocate(6), keys[:6], pool.root, touch)
    for at in range(6, 12):
        pool.commit(pool.allocate(1), [keys[at]], pool.find(keys[at - 1]), touch)
        pool.check_valid()
    assert len({pool._policy._mark[pool.find(key)] for key in keys}) == 1
    pool.touch(pool.find(keys[-1]), [*keys, b"promptanswerx"], 5.0)
    pool.check_valid()


def test_the_keys_of_each_request_and_the_time_are_required():
    pool = BlockPool(4, "adaptive")
    pool.commit(pool.allocate(1), [b"a"], pool.root, pool.touch(None))  # nobody's
    with pytest.raises(MisuseError, match="needs the keys of every request and the time"):
        pool.touch(pool.find(b"a"))
    with pytest.raises(MisuseError, match="needs the keys"):
        pool.touch(None, [b"a"])
    pool.touch(None, [b"a"], 5.0)
    for now in (4.0, nan, inf):
        with pytest.raises(MisuseError, match=f"cannot be admitted at {now} s: it is 5.0 s already"):
            pool.touch(None, [b"a"], now)


def test_time_that_stood_still_for_long_is_caught_up_with():
    """After a pause of a day many uses are old at once; no call moves all of them, and none is lost."""
    shelf = Shelf(1_000, policy="adaptive")
    for number in range(300):
        shelf.put(chr(1000 + number), after=1.5)
    ages = shelf.pool._policy._buckets._ages
    began_before = shelf.now
    shelf.put("a", after=86_400.0)
    assert any(use.bin < BINS - 1 for use in ages.uses() if use.at < began_before)
    for _ in range(60):
        shelf.put("a", after=86_400.0)
    assert {use.bin for use in ages.uses() if use.at < began_before} == {BINS - 1}


def test_many_requests_of_one_moment_do_not_upset_what_is_learned():
    """At 500 requests a second most come after the chunks that they share were learned, in this very second."""
    shelf = Shelf(50, policy="adaptive")
    for number in range(1_500):
        shelf.now += 0.002
        shelf.put(chr(1000 + number % 40) + "a" + chr(5000 + number), after=0.0)


def test_late_lessons_do_not_turn_the_clock_back():
    """After a long pause a class is learned while many uses still wait for their next bin."""
    pool = BlockPool(1_000, "adaptive")
    buckets, now = pool._policy._buckets, 0.0
    for number in range(480):
        now += 2.5
        asks_alone(pool, number, now)
    now += 100_000.0
    for _ in range(60):
        now += 1.0
        asks_alone(pool, 5_000, now)
        buckets._survival.check_valid(now)


def asks_alone(pool, number, now):
    """One chunk that nobody else has."""
    key = number.to_bytes(16, "little")
    there = pool.find(key)
    touch = pool.touch(there, [key], now)
    if there is None:
        pool.commit(pool.allocate(1, [key]), [key], pool.root, touch)


def test_requests_of_one_moment_grow_old_a_part_in_each_call():
    """10,000 at once, and then one an hour: none of these has to wait until all the others have moved."""
    pool = BlockPool(20_000, "adaptive")
    for number in range(10_000):
        asks_alone(pool, number, number * 1e-6)
    move_leaves, moved = Buckets._move_leaves, []

    def counted(buckets, use):
        moved.extend(use.leaves)
        move_leaves(buckets, use)

    with mock.patch.object(Buckets, "_move_leaves", counted):
        for hour in range(1, 200):
            began = len(moved)
            pool.touch(None, [b"a"], hour * 3_600.0)
            assert len(moved) - began <= 4_000
        assert len(moved) >= 10_000 * (BINS - 1)


def test_both_parts_of_a_cut_segment_have_been_in_its_bin_since_it_came_there():
    """Both parts of a prompt of 100 seconds ago have spent 36 of them in the bin that begins at 64."""
    shelf = Shelf(20, policy="adaptive")
    shelf.put("abcd")
    kind = shelf.pool._policy._mark[shelf.at("abcd")].kind
    with mock.patch.object(Buckets, "_learn"):
        shelf.put("abxy", after=100.0)
    survival, bucket = shelf.pool._policy._buckets._survival, kind * BINS + EDGES.index(64.0)
    assert survival.seconds[bucket] + survival.inside[bucket] * shelf.now == pytest.approx(2 * 36)


def test_reuses_of_long_ago_count_less():
    survival = Survival([(0,)], {})
    survival.begin(0)
    survival.reuses[0] = survival.seconds[0] = 8.0
    survival.begin_round(HALF_LIFE_REQUESTS)
    survival.learn(0, now=1.0)
    assert survival.reuses[0] == survival.seconds[0] == pytest.approx(4.0)


def test_a_chunk_does_not_leave_for_what_is_to_hang_below_it():
    """Even if nobody holds it, and it is worth the least."""
    pool = BlockPool(2, "adaptive")
    pool.commit(pool.allocate(1), [b"a"], pool.root, pool.touch(None, [b"a"], 0.0))
    policy = pool._policy
    pool.touch(None, chain("bcd"), 1.0)
    pool.touch(pool.find(b"a"), chain("abc"), 2.0)
    above, below = policy._segments.find(b"a"), policy._segments.find(b"ab")
    worth = policy._buckets._survival.worth
    worth[above.kind * BINS], worth[below.kind * BINS] = 1.0, 2.0
    assert pool.choose(pool.find(b"a"), [b"ab", b"abc"]) == 2
    held = pool.pin(pool.find(b"a"))
    assert len(pool.take(2, [b"ab", b"abc"])) == 1
    pool.unpin(held)


@pytest.mark.slow
def test_a_log_without_times_is_learned_from_all_the_same():
    """Documents of very different popularity, all at one moment: without ages nothing but the kinds of uses counts."""
    hits = {policy: hits_at_one_moment(policy) for policy in ("lru", "adaptive")}
    assert hits["adaptive"] > 1.3 * hits["lru"]


def hits_at_one_moment(policy):
    chance = random.Random(7)
    shelf = Shelf(60, policy=policy)
    hits = 0
    for number in range(4_000):
        prompt = chr(1000 + int(2_000 ** chance.random())) * 3
        hits += number > 2_000 and shelf.pool.resident_run(chain(prompt), 0, 3)
        shelf.put(prompt, after=0.0)
    return hits


def test_victims_that_free_nothing_leave_once():
    """Two checkpoints share both blocks: the first of them leaves, and no room is made by it."""
    pool = BlockPool(5, "adaptive", needs_checkpoint=lambda depth: True)
    touch = pool.touch(None, chain("ab"), 0.0)
    for name, above in ((b"a", None), (b"ab", b"a")):
        parent = pool.root if above is None else pool.find(above)
        nodes = pool.allocate(1, [name, checkpoint_key(name)], [PieceNeed("shared", 2)])
        pool.commit(nodes, [name, checkpoint_key(name)], parent, touch)
    pool.touch(None, chain("cde"), 1.0)
    assert pool.choose(pool.root, chain("cde")) == len(pool.take(3, chain("cde"))) == 3
    pool.check_valid()


def test_a_chunk_of_no_use_that_left_first_is_not_taken_again():
    """It is among the next victims, too, and leaves before them (rule 9)."""
    pool = BlockPool(2, "adaptive", needs_checkpoint=lambda depth: True)
    for name in (b"a", b"x"):
        pool.commit(pool.allocate(1, [name]), [name], pool.root, pool.touch(None, [name], 0.0))
    pool.unpin(pool.pin(pool.find(b"a")))
    pool.touch(None, chain("cd"), 1.0)
    assert pool.choose(pool.root, chain("cd")) == len(pool.take(2, chain("cd"))) == 2


FIRST_LESSONS, PAUSES = 300, {"a": (10.0, 20.0), "b": (60.0, 120.0), "c": None}
RIGHT, OPPOSITE = {"a": 15.0, "b": 90.0, "c": inf}, {"a": inf, "b": 1.0, "c": 15.0}
WRONG = {"a": inf, "b": inf, "c": 15.0}  # about whether there is a next use


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adaptive", "adaptive@8"])
def test_hints_distinguish_what_looks_alike(policy):
    """Conversations that go on soon, late or never, in a cache for a third of them. Right hints bring hits, also with
    a quarter of wrong ones. Hints that are the opposite of what happens are corrected: they still distinguish.
    """
    chance = random.Random(5)
    none = hits_of_sorts(policy, lambda sort: None)
    assert hits_of_sorts(policy, RIGHT.get) > 1.2 * none
    assert hits_of_sorts(policy, lambda sort: (RIGHT if chance.random() < 0.75 else WRONG)[sort]) > 1.1 * none
    assert hits_of_sorts(policy, OPPOSITE.get) > 1.1 * none


def hits_of_sorts(policy, hint):
    shelf = Shelf(16, policy=policy)
    chance = random.Random(3)
    hits = 0
    queue = [(float(number), number, chance.choice("abc"), 2) for number in range(20)]
    for at in range(1_500):
        now, who, sort, length = heapq.heappop(queue)
        prompt = chr(1000 + who) * length
        hits += at > FIRST_LESSONS and shelf.pool.resident_run(chain(prompt), 0, length)
        shelf.put(prompt, after=now - shelf.now, next_use=hint(sort))
        if PAUSES[sort] is None or length == 6:
            heapq.heappush(queue, (now + 5.0, 20 + at, chance.choice("abc"), 2))
        else:
            heapq.heappush(queue, (now + chance.uniform(*PAUSES[sort]), who, sort, length + 1))
    return hits
