"""Nodes that have outlived a reset: nobody finds them, but their blocks are pinned or written until their owners end.

Each has *uses*: its pins, its writer, and the nodes that hang below it and have outlived the reset, too. The blocks of
a node are free when its last use has ended, and no other node shares them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cpu_prefix_cache.index.forest import NONE, Forest


@dataclass(slots=True, eq=False)
class OldNode:
    """A node from before a reset: its blocks, its uses, and what it hangs below, if that has outlived the reset too."""

    blocks: tuple[int, ...]
    pins: int = 0
    has_writer: bool = False
    below: int = 0  # nodes that hang below it
    above: "OldNode | None" = None

    @property
    def is_used(self) -> bool:
        return bool(self.pins or self.has_writer or self.below)


class Outlived:
    """Nodes from before resets, by the names under which their owners know them. A piece goes by each of its blocks."""

    def __init__(self) -> None:
        self._nodes: dict[int, OldNode] = {}
        self._holders = Counter[int]()  # of each block

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def is_pinned(self, name: int) -> bool:
        return name in self and self._nodes[name].pins > 0

    def has_writer(self, name: int) -> bool:
        return name in self and self._nodes[name].has_writer

    @property
    def blocks(self) -> Collection[int]:
        """The blocks that are held."""
        return self._holders.keys()

    @property
    def num_pinned(self) -> int:
        """How many of them have pins."""
        return len({node for node in self._nodes.values() if node.pins})

    def take_over(self, forest: Forest, writing: Collection[int], blocks_of: Callable[[int], Iterable[int]]) -> None:
        """The nodes of a forest that are pinned or `writing`, and what they hang below. O(nodes taken over)."""
        old = dict[int, OldNode]()
        for node in {*forest.pins, *writing}:
            below: OldNode | None = None
            for each in forest.held_by(node):
                is_new = each not in old
                if is_new:
                    old[each] = OldNode(tuple(block for block in blocks_of(each) if block != NONE))
                    self._holders.update(old[each].blocks)
                if below is not None:
                    below.above = old[each]
                    old[each].below += 1
                if not is_new:
                    break
                below = old[each]
            old[node].pins, old[node].has_writer = forest.pins.count(node), node in writing
            self._nodes[node] = old[node]

    def take_over_pieces(self, pinned: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """The blocks of pieces whose bytes are pinned, and how often."""
        for blocks, pins in pinned:
            self._holders.update(blocks)
            self._nodes.update(dict.fromkeys(blocks, OldNode(blocks, pins)))

    def end_pin(self, name: int) -> list[int]:
        """A pin has ended. The blocks that nobody holds any more."""
        self._nodes[name].pins -= 1
        return self._let_go(name)

    def end_writer(self, name: int) -> list[int]:
        """The same of the writer."""
        self._nodes[name].has_writer = False
        return self._let_go(name)

    def _let_go(self, name: int) -> list[int]:
        node: OldNode | None = self._nodes[name]
        if node is not None and not (node.pins or node.has_writer):
            for other in {name, *node.blocks}:
                if self._nodes.get(other) is node:
                    del self._nodes[other]
        freed = list[int]()
        while node is not None and not node.is_used:
            self._holders.subtract(node.blocks)
            freed += [block for block in node.blocks if not self._holders[block]]
            node = node.above
            if node is not None:
                node.below -= 1
        for block in freed:
            del self._holders[block]
        return freed
