"""Chunks of no use: where boundaries need checkpoints, a childless, unpinned chunk without one goes first (rule 9).

Whether a chunk is of no use changes with its children, its pins and its checkpoint. So nobody keeps a list of those
that are, but one of those that may have become so, the latest last: each is judged when it is taken.
"""

from collections.abc import Callable

from cpu_prefix_cache.index.forest import Forest


class UselessChunks:
    """Candidates, by node. `is_cached_chunk` and `can_resume` say of a node whether it is a chunk that can be found,
    and whether a request can resume after it.
    """

    def __init__(
        self, forest: Forest, is_cached_chunk: Callable[[int], bool], can_resume: Callable[[int], bool]
    ) -> None:
        self._forest = forest
        self._is_cached_chunk = is_cached_chunk
        self._can_resume = can_resume
        self._candidates: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def may_be(self, node: int) -> None:
        """It has lost a child, a pin or its checkpoint, or whoever brought it is done."""
        self._candidates.pop(node, None)
        self._candidates[node] = None

    def forget(self, node: int) -> None:
        """It is gone: the next node of this number is another one."""
        self._candidates.pop(node, None)

    def take(self) -> int | None:
        """The next one to be evicted, which is no candidate any more; None if there is none."""
        while self._candidates:
            node, _ = self._candidates.popitem()
            if self._is_useless(node):
                return node
        return None

    def in_order(self) -> list[int]:
        """Those that `take` would answer with, in that order. Changes nothing."""
        return [node for node in reversed(self._candidates) if self._is_useless(node)]

    def _is_useless(self, node: int) -> bool:
        if not self._is_cached_chunk(node):
            return False
        return not (self._forest.children[node] or self._forest.pins[node] or self._can_resume(node))
