"""Laws of eviction that a machine of single steps does not state: batches, and the lists of ghosts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache import POLICIES, BlockPool
from cpu_prefix_cache.eviction.ghosts import Ghosts
from cpu_prefix_cache.forest import NONE
from property_tests.strategies import chain, prompts

requests = st.lists(st.tuples(prompts, st.booleans()), min_size=4, max_size=25)


@settings(max_examples=400)
@given(policy=st.sampled_from(sorted(POLICIES)), blocks=st.integers(6, 9), story=requests)
def test_a_batch_of_n_is_n_singles(policy: str, blocks: int, story: list[tuple[str, bool]]) -> None:
    """Whether a request allocates its chunks together or one by one: the same ones leave, in the same order."""
    batch, singles = BlockPool(blocks, policy), BlockPool(blocks, policy)
    for prompt, is_named in story:
        for pool, width in ((batch, len(prompt)), (singles, 1)):
            put(pool, prompt, width, is_named)
            pool.check_valid()
        assert order(batch) == order(singles)


def put(pool: BlockPool, prompt: str, width: int, is_named: bool) -> None:
    keys = chain(prompt)
    have = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[have - 1]) if have else None
    touch = pool.touch(deepest)
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


names = st.sampled_from([bytes([letter]) * 16 for letter in range(12)])
steps = st.lists(
    st.tuples(st.sampled_from(["add", "take", "drop", "renew"]), st.integers(0, 1), st.lists(names, max_size=5)),
    max_size=40,
)


@settings(max_examples=400)
@given(expected=st.integers(1, 20), story=steps)
def test_ghosts_are_two_lists(expected: int, story: list[tuple[str, int, list[bytes]]]) -> None:
    ghosts, lists = Ghosts(expected), ([], [])
    for what, which, keys in story:
        new = [key for key in dict.fromkeys(keys) if key not in lists[0] + lists[1]]
        mine = lists[which]
        if what == "add":
            ghosts.add(which, new)
            mine += new
        elif what == "renew":
            new = new[: len(mine)]
            ghosts.renew(which, new)
            mine[:] = mine[len(new) :] + new
        elif what == "drop":
            count = min(len(keys), len(mine))
            ghosts.drop_oldest(which, count)
            del mine[:count]
        else:
            for key in keys:
                found = next((each for each in (0, 1) if key in lists[each]), NONE)
                assert ghosts.take(key) == found
                if found != NONE:
                    lists[found].remove(key)
        ghosts.check_valid()
        assert ghosts.counts == [len(lists[0]), len(lists[1])]
        assert [ghosts.hashes(each) for each in (0, 1)] == [[hash(key) for key in each] for each in lists]
        there = [key in lists[0] + lists[1] for key in keys]
        assert ghosts.first_ghost(keys, 0) == (there.index(True) if True in there else len(keys))
