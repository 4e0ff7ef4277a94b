"""Chunks evicted without ever having been hit, for any order of stores, hits, withdrawals and evictions.

The model keeps names: a chunk is hit if a request is given it or anything below it while it is here.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import HybridChunkPlanner, KVCacheCoordinator, PrefixGroup, StateGroup
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import new_pool
from property_tests.strategies import chain, prompts

FULL = PrefixGroup(name="full", block_tokens=4, block_bytes=100)
STATE = StateGroup(name="state", block_tokens=4, block_bytes=100)
ROOM = 8  # blocks

events = st.tuples(st.sampled_from(["store", "store", "store", "hit", "hit", "withdraw", "reset"]), prompts)


def stored(*prompts: str) -> list[tuple[str, str]]:
    return [("store", prompt) for prompt in prompts]


@example(history=[*stored("aaaa"), ("hit", "aaaa"), *stored("bbbb", "bbbbb", "bbbbbb", "cc")], has_states=False)
@example(
    history=[*stored("aaaa"), ("hit", "aaaa"), ("withdraw", "a"), *stored("bbbb", "abba", "bab")], has_states=False
)
@example(history=[*stored("aab"), ("hit", "aab"), *stored("bba", "abab", "bb")], has_states=True)
@given(history=st.lists(events, max_size=40), has_states=st.booleans())
def test_chunks_never_hit_are_counted_when_they_are_evicted(history, has_states: bool) -> None:
    planner = HybridChunkPlanner([FULL, STATE] if has_states else [FULL], max_model_len=1_000)
    pool = new_pool(planner, ROOM)
    coordinator = KVCacheCoordinator(planner, pool)
    hit: dict[str, bool] = {}  # by name; that of a checkpoint ends with "!"
    unused = {"chunk": 0, "checkpoint": 0}

    def here() -> set[str]:
        names = {name for name in hit if pool.find(name.encode()) is not None}
        return names | {f"{name}!" for name in hit if pool.find(checkpoint_key(name.encode())) is not None}

    def leave(names: set[str], evicted: bool) -> None:
        for name in names:
            was_hit = hit.pop(name)
            unused["checkpoint" if name.endswith("!") else "chunk"] += evicted and not was_hit

    for event, prompt in history:
        before = here()
        if event == "store":
            have = pool.resident_run(chain(prompt), 0, len(prompt))
            new = chain(prompt)[have:]
            parent = pool.find(chain(prompt)[have - 1]) if have else pool.root
            needs = coordinator.needs(coordinator.checkpoint_at(chain(prompt), len(prompt))) if has_states else None
            if needs is not None and pool.find(checkpoint_key(prompt.encode())) is not None:
                continue
            pin = None if parent == pool.root else pool.pin(parent)
            keys = [*new, *([checkpoint_key(prompt.encode())] if has_states else [])]
            if keys:
                nodes = pool.take(len(new), keys, needs)
                leave(before - here(), evicted=True)
                pool.commit(nodes, keys[: len(nodes)], parent, pool.touch(None))
                hit.update(dict.fromkeys((key.decode() for key in new[: len(nodes)]), False))
                if has_states and nodes:
                    hit[f"{prompt}!"] = False
            if pin is not None:
                pool.unpin(pin)
        elif event == "hit":
            depth = coordinator.longest_boundary(chain(prompt), 0, len(prompt) * 4 + 1) // 4
            node = coordinator.resume_node(chain(prompt), depth) if depth else None
            pool.touch(node)
            given_names = {prompt[:end] for end in range(1, depth + 1)} if node is not None else set()
            given_names |= {f"{prompt[:depth]}!"} if given_names and has_states else set()
            hit.update(dict.fromkeys(given_names, True))
        elif event == "withdraw" and pool.find(prompt.encode()) is not None:
            pool.withdraw(pool.find(prompt.encode()))
            leave(before - here(), evicted=False)
        elif event == "reset":
            pool.reset()
            leave(before, evicted=False)
    statistics = pool.statistics()
    assert (statistics.unused_chunks, statistics.unused_checkpoints) == (unused["chunk"], unused["checkpoint"])
