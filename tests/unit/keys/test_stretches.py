"""Stretches that are found from their last nodes on are those that the parents of all nodes lead to."""

import hashlib
import random
from itertools import pairwise

import pytest

from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.keyed.stretches import ends, holders

PROMPTS = [[hashlib.sha256(f"{prompt} {at}".encode()).digest() for at in range(12)] for prompt in range(3)]


def by_parents(pool, nodes):
    """Each node that is not the parent of the node after it, and where it stands."""
    return [
        (at, node)
        for at, (node, after) in enumerate(pairwise([*nodes, None]), 1)
        if node is not None and (after is None or pool.parent(after) != node)
    ]


def filled(draw):
    """A pool that got parts of prompts, each below the key before it or apart, and has evicted some."""
    pool = BlockPool(num_blocks=20)
    for _ in range(12):
        keys = draw.choice(PROMPTS)
        begin, end = sorted(draw.sample(range(len(keys) + 1), 2))
        missing = pool.missing(keys[begin:end])
        new = keys[begin : begin + len(missing)]
        if missing == new:
            above = pool.find(keys[begin - 1]) if begin else None
            with pool.pinned(*([] if above is None else [above])):
                pool.commit(pool.allocate(len(new)), new, pool.root if above is None else above, pool.touch(None))
    return pool


@pytest.mark.parametrize("seed", range(100))
def test_ends_are_those_that_parents_lead_to(seed):
    pool = filled(random.Random(seed))
    for keys in PROMPTS:
        for begin in range(len(keys)):
            nodes = pool.find_all(keys[begin:])
            assert [*ends(pool, nodes)] == by_parents(pool, nodes)[::-1]
            pin = pool.pin(*holders(pool, nodes, []))
            held = {each for node in pin.blocks for each in pool.path(node, pool.depth(node))}
            assert held >= {node for node in nodes if node is not None}
            pool.unpin(pin)


@pytest.mark.parametrize("seed", range(100))
def test_keys_in_any_order_have_the_ends_that_parents_lead_to(seed):
    draw = random.Random(seed)
    pool = filled(draw)
    keys = [key for prompt in PROMPTS for key in prompt]
    for _ in range(10):
        nodes = pool.find_all(draw.choices(keys, k=6) + draw.choice(PROMPTS)[2:6] + draw.choices(keys, k=3))
        assert [*ends(pool, nodes)] == by_parents(pool, nodes)[::-1]


def test_seeds_have_stretches_apart_and_missing_nodes():
    """The control of the one before."""
    pools = [filled(random.Random(seed)) for seed in range(100)]
    found = [(pool, pool.find_all(keys)) for pool in pools for keys in PROMPTS]
    assert any(None in nodes and len([*ends(pool, nodes)]) > 1 for pool, nodes in found)
    assert any(None not in nodes and len([*ends(pool, nodes)]) > 1 for pool, nodes in found)
