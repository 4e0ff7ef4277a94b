"""Stretches of the nodes that some keys have in a pool, in their order: those that hang one below the other."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import eq

from cpu_prefix_cache.pool.block_pool import BlockPool

Nodes = Sequence[int | None]  # of some keys in a pool: None where it has none


def ends(pool: BlockPool, nodes: Nodes) -> Iterator[tuple[int, int]]:
    """Where each stretch ends, and its last node, from the last stretch to the first. A pin on that holds all of it."""
    at = len(nodes)
    while at > 0:
        node = nodes[at - 1]
        if node is None:
            at -= 1
            continue
        yield at, node
        path = pool.path(node, min(at, pool.depth(node)))
        begin = at - len(path)
        if path == [*nodes[begin:at]]:  # as always where the keys follow each other in one prompt
            at = begin
        else:
            at -= sum(takewhile(bool, map(eq, reversed(path), reversed(nodes[begin:at]))))


def holders(pool: BlockPool, chunks: Nodes, sides: Nodes) -> list[int]:
    """The nodes that hold all of these if they are pinned."""
    return [node for _, node in ends(pool, chunks)] + [node for node in sides if node is not None]


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
