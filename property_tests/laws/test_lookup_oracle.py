"""Rule 6, the slow way: the largest boundary at which every chunk is there, found by looking at each."""

from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import BlockPool, HybridChunkPlanner, KVCacheCoordinator, PrefixGroup
from property_tests.models.model import longest_boundary
from property_tests.strategies import chain, forests, positions, prompts

GRID = 4
PLANNER = HybridChunkPlanner([PrefixGroup(name="attention", block_tokens=GRID, block_bytes=1)], max_model_len=1_000)


def plant(forest: list[str]) -> tuple[BlockPool, set[str]]:
    """A pool that holds these prompts, with all that comes before them."""
    pool = BlockPool(64)
    names = {prompt[:end] for prompt in forest for end in range(1, len(prompt) + 1)}
    for name in sorted(names, key=len):
        parent = pool.find(name[:-1].encode()) if len(name) > 1 else pool.root
        pool.commit(pool.allocate(1), [name.encode()], parent, pool.touch(None))
    return pool, names


@given(forests, prompts, st.integers(0, 30), st.integers(0, 30))
def test_nothing_longer_would_do(forest: list[str], prompt: str, n0: int, num_tokens: int) -> None:
    """O8.12, S7.30. `n0` may be anywhere, and past the end of everything."""
    pool, names = plant(forest)
    found = KVCacheCoordinator(PLANNER, pool).longest_boundary(chain(prompt), n0, num_tokens)
    # Chunks before n0 are the device's: only then may the bisection take them to be there.
    on_host = names | {prompt[:end] for end in range(1, n0 // GRID + 1)}
    have_before = all(prompt[:end] in names for end in range(1, n0 // GRID + 1))
    if have_before:
        assert found == longest_boundary(GRID, n0, num_tokens, prompt, on_host)
    assert n0 <= found


@given(forests, prompts, positions, positions)
def test_the_end_of_a_run_is_where_the_first_chunk_is_missing(forest: list[str], prompt: str, a: int, b: int) -> None:
    pool, names = plant(forest)
    keys = chain(prompt)
    start, stop = sorted((a % (len(keys) + 1), b % (len(keys) + 1)))
    if prompt[:start] not in names:
        start = 0
    by_hand = next((at for at in range(start, stop) if prompt[: at + 1] not in names), stop)
    assert pool.resident_run(keys, start, stop) == by_hand


@given(st.integers(0, 300), st.integers(0, 300))
def test_galloping_finds_every_end(have: int, start: int) -> None:
    pool = BlockPool(301)
    keys = [f"{at:03}".encode() for at in range(300)]
    pool.commit(pool.allocate(have), keys[:have], pool.root, pool.touch(None))
    start = min(start, have)
    assert pool.resident_run(keys, start, 300) == have
    assert pool.resident_run(keys, start, start) == start


@given(forests, prompts, st.text("ab", max_size=3))
def test_more_on_the_host_never_makes_a_hit_shorter(forest: list[str], prompt: str, more: str) -> None:
    """O8.13"""
    tokens = len(prompt) * GRID + 1
    less = KVCacheCoordinator(PLANNER, plant(forest)[0]).longest_boundary(chain(prompt), 0, tokens)
    assert less <= KVCacheCoordinator(PLANNER, plant([*forest, more])[0]).longest_boundary(chain(prompt), 0, tokens)
