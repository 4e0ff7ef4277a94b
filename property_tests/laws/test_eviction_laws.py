"""Laws of eviction that a machine of single steps does not state: batches, and the lists of ghosts."""

from itertools import cycle
from math import inf
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpu_prefix_cache import POLICIES
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.eviction import ghosts as ghosts_module
from cpu_prefix_cache.eviction.ghosts import Ghosts
from cpu_prefix_cache.eviction.rings import members
from cpu_prefix_cache.eviction.touches import Touch, TouchRing
from property_tests.strategies import chain, prompts

NAMED = "named"  # a request that gives its keys to the policy
UNNAMED = "unnamed"  # one that does not
WITHDRAWN = "withdrawn"  # bad bytes
requests = st.lists(st.tuples(prompts, st.sampled_from([NAMED, UNNAMED, WITHDRAWN])), min_size=4, max_size=25)
hints = st.sampled_from([None, 0.0, 3.0, 30.0, 1e9, inf])


@settings(max_examples=400)
@example(  # two chunks become childless one after the other, and had the same place in the order
    policy="adaptive",
    blocks=9,
    next_uses=[None],
    story=[(prompt, UNNAMED) for prompt in ("a", "bbaaaa", "bbbaa", "aaaaa", "abaaa", "b", "aa", "ba")],
)
@example(  # of the ghosts that come back with the last prompt, one finds room, and others do not
    policy="arc",
    blocks=7,
    next_uses=[None],
    story=[
        *[(prompt, NAMED) for prompt in ("b", "aa", "aba", "b", "bba", "aa")],
        ("aab", WITHDRAWN),
        ("baba", NAMED),
        ("bba", NAMED),
        ("a", WITHDRAWN),
        ("abaa", NAMED),
    ],
)
@given(
    policy=st.sampled_from([*sorted(POLICIES), "adaptive@2"]),
    blocks=st.integers(6, 9),
    next_uses=st.lists(hints, min_size=1, max_size=6),
    story=requests,
)
def test_a_batch_of_n_is_n_singles(
    policy: str, blocks: int, next_uses: list[float | None], story: list[tuple[str, str]]
) -> None:
    """Whether a request allocates its chunks together or one by one: the same ones leave, in the same order."""
    batch, singles = BlockPool(blocks, policy), BlockPool(blocks, policy)
    for now, ((prompt, how), next_use) in enumerate(zip(story, cycle(next_uses), strict=False)):
        for pool, width in ((batch, len(prompt)), (singles, 1)):
            if how == WITHDRAWN:
                withdraw(pool, prompt)
            else:
                put(pool, prompt, width, how == NAMED, float(now), next_use)
            pool.check_valid()
        assert order(batch) == order(singles)


@settings(max_examples=300)
@given(policy=st.sampled_from(["lru", "arc"]), story=st.lists(st.tuples(prompts, hints), min_size=4, max_size=20))
def test_a_policy_that_learns_nothing_takes_no_hint(policy: str, story: list[tuple[str, float | None]]) -> None:
    hinted, plain = BlockPool(7, policy), BlockPool(7, policy)
    for now, (prompt, next_use) in enumerate(story):
        put(hinted, prompt, len(prompt), True, float(now), next_use)
        put(plain, prompt, len(prompt), True, float(now))
        assert order(hinted) == order(plain)


@given(stamps=st.lists(st.integers(1, 9), max_size=12), stamp=st.integers(1, 9))
def test_a_touch_enters_old_before_those_of_its_age_and_young_behind_them(stamps: list[int], stamp: int) -> None:
    for enter in (TouchRing.enter_old, TouchRing.enter_young):
        ring = TouchRing()
        for block, each in enumerate(sorted(stamps)):
            ring.enter_young(Touch(each, ring), block)
        new = Touch(stamp, ring)
        enter(ring, new, len(stamps))
        order = list(members(ring))
        is_older = (lambda each: each < stamp) if enter is TouchRing.enter_old else (lambda each: each <= stamp)
        assert order.index(new) == sum(map(is_older, stamps))
        assert [touch.stamp for touch in order] == sorted([*stamps, stamp])


def withdraw(pool: BlockPool, prompt: str) -> None:
    node = pool.find(chain(prompt)[-1])
    if node is not None:
        pool.withdraw(node)


def put(pool: BlockPool, prompt: str, width: int, is_named: bool, now: float, next_use: float | None = None) -> None:
    keys = chain(prompt)
    have = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[have - 1]) if have else None
    touch = pool.touch(deepest, keys, now, next_use=next_use)
    pin = pool.pin() if deepest is None else pool.pin(deepest)
    blocks = []
    for at in range(have, len(keys), width):
        some = keys[at : at + width]
        blocks += pool.allocate(len(some), some if is_named else ())
    if blocks:
        pool.commit(blocks, keys[have:], pool.root if deepest is None else deepest, touch)
    pool.unpin(pin)


def order(pool: BlockPool) -> list[bytes | None]:
    return [pool.key(block) for block in pool.soonest_evicted()]


CHUNKS = range(14)  # a tree: the parent of 3 and 4 is 1, that of 1 and 2 is 0
steps = st.lists(
    st.tuples(st.sampled_from(["add", "take", "drop"]), st.integers(0, 1), st.sampled_from(CHUNKS), st.integers(1, 5)),
    max_size=40,
)


def path(chunk: int) -> list[int]:
    """From here up to the first chunk of the prompt."""
    return [chunk, *path((chunk - 1) // 2)] if chunk else [0]


@settings(max_examples=400)
@given(story=steps, longest=st.sampled_from([2, 3, 4_096]))
def test_ghosts_are_two_lists(story: list[tuple[str, int, int, int]], longest: int) -> None:
    """Chunks leave from the end of a prompt to its beginning, and come the other way (rule 3)."""
    with mock.patch.object(ghosts_module, "LONGEST_RUN", longest):
        tell(story)


def tell(story: list[tuple[str, int, int, int]]) -> None:
    ghosts, lists = Ghosts(), ([], [])
    for what, which, chunk, count in story:
        mine = lists[which]
        up, known = path(chunk), {*lists[0], *lists[1]}
        here = [each for each in up if each not in known]
        if what == "add":
            leaving = here[:count]
            run = [each for at, each in enumerate(leaving) if each == up[at]]
            above = (run[-1] - 1) // 2 if run and run[-1] else None
            ghosts.add(which, run, above)
            mine += run
        elif what == "drop":
            count = min(count, len(mine))
            ghosts.drop_oldest(which, count)
            del mine[:count]
        else:
            coming = up[::-1]
            at = 0
            while at < len(coming):
                following = coming[at:]
                ghost = next((at + found for found, each in enumerate(following) if each in known), len(coming))
                assert ghosts.first_ghost(coming, at) == ghost
                if ghost == len(coming):
                    break
                had, row = ghosts.row(coming, ghost, len(coming))
                assert ghosts.take(coming[ghost], row) == had
                at = ghost + row
                for each in coming[ghost:at]:
                    lists[had].remove(each)
        ghosts.check_valid()
        assert ghosts.counts == [len(lists[0]), len(lists[1])]
        assert [ghosts.keys(which) for which in (0, 1)] == [*lists]
