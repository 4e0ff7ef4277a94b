"""The policy `adaptive` the slow way: the worth of buckets, segments, counts, and declined chunks."""

import random
from contextlib import suppress
from itertools import pairwise
from math import exp, inf
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import BlockPool, PoolExhausted
from cpu_prefix_cache.eviction import survival
from cpu_prefix_cache.eviction.adaptive import Adaptive
from cpu_prefix_cache.eviction.buckets import Buckets
from cpu_prefix_cache.eviction.kinds import HINTED
from cpu_prefix_cache.eviction.levels import STEP, Levels
from cpu_prefix_cache.eviction.survival import BINS, EDGES, PRIOR_SECONDS, WIDTHS, expected_reuses, worths
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from property_tests.strategies import chain, prompts

hints = st.none() | st.just(inf) | st.floats(0, 1e6)
rates = st.floats(-14, 2).map(lambda power: 10.0**power)


@settings(max_examples=500)
@given(st.lists(rates, min_size=BINS, max_size=BINS))
def test_the_worth_is_the_best_ratio_over_all_times_to_give_up(rates: list[float]) -> None:
    for begin, worth in enumerate(worths(rates)):
        chance = 0.0
        seconds = 0.0
        ratios = []
        for rate, width in list(zip(rates, WIDTHS, strict=True))[begin:]:
            still = 1 - chance
            ends_here = still * (1 - exp(-rate * width)) if rate * width > 1e-8 else still * rate * width
            seconds += ends_here / rate
            chance += ends_here
            ratios.append(chance / seconds)
        assert worth == pytest.approx(max(ratios), rel=1e-6)


@settings(max_examples=300)
@given(st.lists(prompts, min_size=1, max_size=12))
def test_a_segment_is_what_the_same_requests_used(story: list[str]) -> None:
    """In a cache where everything stays: a chunk is of the segment above it if no request had only that, or ended."""
    pool = BlockPool(100, "adaptive")
    for now, prompt in enumerate(story):
        use(pool, prompt, float(now))
        pool.check_valid()
    segments = pool._policy._mark
    for name in {prompt[:end] for prompt in story for end in range(2, len(prompt) + 1)}:
        requests, above = ({at for at, each in enumerate(story) if each.startswith(part)} for part in (name, name[:-1]))
        together = requests == above and name[:-1] not in story
        assert (segments[pool.find(name.encode())] is segments[pool.find(name[:-1].encode())]) == together


@settings(max_examples=200)
@given(
    story=st.lists(
        st.tuples(st.sampled_from("axk"), st.integers(1, 4), st.floats(0, 400), hints), min_size=1, max_size=25
    )
)
@example(story=[("a", 1, 0.0, None)] * 9)
def test_reuses_and_seconds_are_those_of_the_history(story: list[tuple[str, int, float, float | None]]) -> None:
    """Conversations that grow, each prompt all of the last one and some more: so nothing is ever cut. With hints or
    without.

    Its times are taken from the policy, which lets requests of one second share one and goes on where a clock stands.
    """
    with mock.patch.object(survival, "HALF_LIFE_REQUESTS", float("inf")):
        pool, now = BlockPool(200, "adaptive"), 0.0
        policy: Adaptive = pool._policy
        history: dict[object, list[tuple[float, int]]] = {}  # of a segment: when it was used, and its class then
        for who, more, pause, next_use in story:
            now += pause
            grown = max((len(name) for name in history if name[0] == who), default=0)
            prompt = who * (grown + (more if more < 3 or not grown else 0))
            use(pool, prompt, now, next_use)
            for end in range(1, len(prompt) + 1):
                segment = policy._mark[pool.find(prompt[:end].encode())]
                history.setdefault(prompt[:end], []).append((segment.use.at, segment.kind))
        now = policy._now  # later, where more requests had one moment than have by chance
        reuses, seconds = [0.0] * len(policy._buckets._survival.reuses), [0.0] * len(policy._buckets._survival.reuses)
        for name, uses in history.items():
            if policy._mark[pool.find(name.encode())].first != name.encode():
                continue  # counted with the first chunk of its segment
            for (begin, kind), (end, _) in pairwise([*uses, (now, -1)]):
                for bin in range(BINS):
                    inside = min(end - begin, EDGES[bin + 1]) - EDGES[bin]
                    seconds[kind * BINS + bin] += max(0.0, inside)
            for (begin, kind), (end, _) in pairwise(uses):
                reuses[kind * BINS + bin_of(end - begin)] += 1
        policy._buckets._ages.grow_old(now)  # the last requests may have shared a use, and not looked who is older
        known = policy._buckets._survival
        assert known.reuses == reuses
        so_far = [spent + inside * now for spent, inside in zip(known.seconds, known.inside, strict=True)]
        assert so_far == pytest.approx(seconds, abs=1e-6)


@settings(max_examples=300)
@given(story=st.lists(st.tuples(prompts, st.floats(0, 400), hints), min_size=1, max_size=15))
def test_a_hint_is_the_class_of_what_one_prompt_alone_goes_on_with(
    story: list[tuple[str, float, float | None]],
) -> None:
    """Beside a pool without hints, where everything stays: whatever else a prompt has is of the same class in both. The
    next prompts decide what it has alone, which is known only of chunks that two prompts continue differently.
    """
    hinted, plain = BlockPool(100, "adaptive"), BlockPool(100, "adaptive")
    now = 0.0
    for at, (prompt, pause, next_use) in enumerate(story):
        now += pause
        use(hinted, prompt, now, next_use)
        use(plain, prompt, now)
        hinted.check_valid()
        before = [each for each, *_ in story[: at + 1]]
        for name in (prompt[:end] for end in range(1, len(prompt) + 1)):
            kind, without = (pool._policy._mark[pool.find(name.encode())].kind for pool in (hinted, plain))
            after = {each[len(name)] for each in before if each.startswith(name) and len(each) > len(name)}
            if next_use is None or len(after) > 1:
                assert kind == without
            elif len(after) == 0:
                assert HINTED[kind] == (BINS if next_use == inf else bin_of(min(next_use, EDGES[-1] - 1)))


@given(sooner=st.integers(0, BINS), later=st.integers(0, BINS))
def test_a_class_begins_with_the_worth_of_its_hint(sooner: int, later: int) -> None:
    """The sooner it is expected, the more it is worth at first; and what is expected in a bin is worth most there."""
    early, late = (
        worths([n / s for n, s in zip(expected_reuses(bin), PRIOR_SECONDS, strict=True)]) for bin in (sooner, later)
    )
    assert sooner > later or early[0] >= late[0] * (1 - 1e-9)
    assert later == BINS or late[later] >= max(late[later + 1 :], default=0.0)


def bin_of(age: float) -> int:
    return max(bin for bin in range(BINS) if EDGES[bin] <= age)


@settings(max_examples=200)
@given(even_depth=st.floats(0.01, 1e9), depth=st.integers(1, 100_000))
def test_a_level_is_depths_of_about_the_same_cost(even_depth: float, depth: int) -> None:
    levels = Levels(even_depth)
    assert 1 - 1e-9 <= (1 + depth / even_depth) / levels.costs[levels.of(depth)] < STEP * (1 + 1e-9)
    assert Levels(inf).of(depth) == 0


@settings(max_examples=300)
@example(name="adaptive", story=["aaa", "abab", "ababa", "baaaa", "ab", "ababa"], blocks=9, seed=0, margin=1.0)
@given(
    name=st.sampled_from(["adaptive", "adaptive@2"]),
    story=st.lists(prompts, min_size=4, max_size=20),
    blocks=st.integers(4, 12),
    seed=st.integers(0, 10**6),
    margin=st.sampled_from([1.0, 1.6, 2.5]),
)
def test_declined_chunks_are_worth_less_than_those_that_would_leave(
    name: str, story: list[str], blocks: int, seed: int, margin: float
) -> None:
    """Whatever the buckets are worth: one by one, the least of what is here and of the end of what comes goes. What is
    here counts as `margin` times as much, and the larger that is, the less comes.
    """
    pool = BlockPool(blocks, name)
    policy: Adaptive = pool._policy
    with mock.patch.object(Buckets, "_learn"), mock.patch.object(Buckets, "is_by_age", False):  # it stays as it is here
        worth = policy._buckets._survival.worth
        worth[:] = random.Random(seed).choices([1.0, 2.0, 3.0], k=len(worth))
        for now, prompt in enumerate(story):
            keys = chain(prompt)[:blocks]
            have = pool.resident_run(keys, 0, len(keys))
            deepest = pool.find(keys[have - 1]) if have else None
            touch = pool.touch(deepest, chain(prompt), float(now))
            pin = pool.pin() if deepest is None else pool.pin(deepest)
            parent, new = pool.root if deepest is None else deepest, keys[have:]
            more = pool.choose(parent, new)
            accepted = pool.choose(parent, new, margin=margin)
            assert accepted == slow_answer(pool, new, margin) <= more
            gone_first = [pool.key(block) for block in pool.soonest_evicted()]
            before = pool.statistics().evictions
            pool.commit(pool.allocate(accepted, new[:accepted]), new[:accepted], parent, touch)
            evicted = pool.statistics().evictions - before
            assert all(pool.find(key) is None for key in gone_first[:evicted])
            pool.unpin(pin)
            pool.check_valid()


def known(policy: Adaptive, key: bytes) -> bytes | None:
    return None if policy._segments.find(key) is None else key


def slow_answer(pool: BlockPool, new: list[bytes], margin: float) -> int:
    """How many of these chunks stay, if the least one goes again and again; of what comes, the last one first."""
    policy: Adaptive = pool._policy
    owner: list[bytes | None] = []
    for key in new:  # a segment that begins within another one is a ghost from before that one was there
        begun = owner.index(owner[-1]) if owner and owner[-1] is not None else 0
        goes_on = owner and owner[-1] is not None and len(owner) - begun < policy._segments.find(owner[-1]).length
        owner.append(owner[-1] if goes_on or (owner and policy._segments.find(key) is None) else known(policy, key))
    above = policy._mark[pool.find(new[0][:-1])] if new and len(new[0]) > 1 and owner[0] is None else None
    here = [policy._buckets.rank(policy._mark[block]) for block in pool.soonest_evicted()]
    coming = [policy._buckets.rank(policy._segments.find(key) if key is not None else above) for key in owner]
    short = len(new) - pool.statistics().free
    while short > 0:
        if here and (here[0][0] * margin, *here[0][1:]) <= coming[-1]:
            here.pop(0)
        else:
            coming.pop()
        short -= 1
    return len(coming)


@settings(max_examples=80)
@given(
    policy=st.sampled_from(["adaptive", "adaptive@2"]),
    seed=st.integers(0, 2**32),
    blocks=st.integers(3, 14),
    has_checkpoints=st.booleans(),
)
def test_nothing_is_lost_by_what_was_forgotten(policy: str, seed: int, blocks: int, has_checkpoints: bool) -> None:
    """Requests store late, in parts, after others have cut their segments or these were forgotten, and what they store
    is withdrawn under them. With so few ghosts that most of what comes is unknown.
    """
    chance = random.Random(seed)
    pool = BlockPool(blocks, policy, needs_checkpoint=(lambda depth: True) if has_checkpoints else None)
    now, requests = 0.0, []
    for _ in range(50):
        what = chance.choices(["asks", "stores", "is withdrawn", "all is withdrawn"], [8, 12, 1, 0.3])[0]
        if what == "asks":
            now += chance.choice([0.0, 0.5, 3.0, 40.0, 4_000.0])
            requests.append(asks(pool, "".join(chance.choices("ab", k=chance.randint(1, 6))), now))
        elif what == "stores" and requests:
            stores(pool, chance, chance.choice(requests[-6:]), has_checkpoints)
        elif what == "is withdrawn" and (there := list(pool.soonest_evicted())):
            pool.withdraw(pool.path(chance.choice(there), 1)[0])
        elif what == "all is withdrawn":
            pool.reset()
        pool.check_valid()


def asks(pool: BlockPool, prompt: str, now: float) -> list[bytes]:
    keys = chain(prompt)
    have = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[have - 1]) if have else None
    pool.touch(pool.find(checkpoint_key(keys[have - 1])) or deepest if have else None, keys, now)
    return keys


def stores(pool: BlockPool, chance: random.Random, keys: list[bytes], has_checkpoints: bool) -> None:
    """A few of the chunks that a request lacks, one more that it decoded perhaps, perhaps with a checkpoint."""
    if chance.random() < 0.2:
        keys = [*keys, keys[-1] + b"z"]
    have = pool.resident_run(keys, 0, len(keys))
    new = keys[have : have + chance.randint(1, 3)]
    parent = pool.find(keys[have - 1]) if have else pool.root
    pin = pool.pin(parent) if have else pool.pin()
    checkpoint = checkpoint_key(new[-1] if new else keys[have - 1])
    with suppress(PoolExhausted):
        if has_checkpoints and chance.random() < 0.5 and pool.find(checkpoint) is None:
            needs = [PieceNeed(checkpoint, chance.randint(1, 2))]
            both = pool.allocate(len(new), [*new, checkpoint], needs)
            pool.commit(both, [*new, checkpoint], parent, None)
        else:
            new = new[: pool.choose(parent, new)]
            pool.commit(pool.allocate(len(new), new), new, parent, None)
    pool.unpin(pin)


def use(pool: BlockPool, prompt: str, now: float, next_use: float | None = None) -> None:
    keys = chain(prompt)
    have = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[have - 1]) if have else None
    touch = pool.touch(deepest, keys, now, next_use=next_use)
    pool.commit(pool.allocate(len(keys) - have), keys[have:], pool.root if deepest is None else deepest, touch)
