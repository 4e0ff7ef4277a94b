"""Stretches of the nodes that some keys have in a pool, in their order: those that hang one below the other."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cpu_prefix_cache.pool.block_pool import BlockPool

Nodes = Sequence[int | None]  # of some keys in a pool: None where it has none


def ends(pool: BlockPool, nodes: Nodes) -> Iterator[tuple[int, int]]:
    """Where each stretch ends, and its last node. A pin on that holds all of it."""
    parent = pool.parent
    for at, (node, after) in enumerate(pairwise((*nodes, None)), 1):
        if node is not None and (after is None or parent(after) != node):
            yield at, node


def whole(nodes: Nodes) -> list[int] | None:
    """All of these; None if one is missing."""
    here = [node for node in nodes if node is not None]
    return here if len(here) == len(nodes) else None


def presence(found: Sequence[Nodes]) -> list[bool]:
    """Whether any of some pools has a node of each key; `found`: the nodes of each pool."""
    first, *others = found
    here = [node is not None for node in first]
    for nodes in others:
        here = [is_here or node is not None for is_here, node in zip(here, nodes, strict=True)]
    return here
