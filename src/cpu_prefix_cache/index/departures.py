"""The order in which nodes would leave a forest: each after what hangs below it. Changes nothing.

A policy walks its own order of ends, childless chunks, and asks of each whether it may leave. As the last child of a
chunk leaves, that chunk is the next end of its branch; the policy decides when it comes to it.
"""

from cpu_prefix_cache.index.forest import NONE, Forest


class Departures:
    """One walk over `forest`. What has left on it counts as gone."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._gone: dict[int, int] = {}  # how many children of a chunk have left

    def may_leave(self, block: int) -> bool:
        """Whether nothing hangs below it, and no pin is on it."""
        return block not in self._forest.pins.linked and self._forest.num_children(block) == self._gone.get(block, 0)

    def leave(self, block: int) -> int:
        """Let a chunk leave. The one above it, if nothing hangs below that any more; else, and below the root, NONE."""
        parent = self._forest.parent[block]
        if parent == self._forest.root:
            return NONE
        gone = self._gone[parent] = self._gone.get(parent, 0) + 1
        return parent if self._forest.num_children(parent) == gone else NONE
