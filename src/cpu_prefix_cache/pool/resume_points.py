"""After which chunks a request can resume, and which chunks are useless because no request can (rule 9).

In a model without checkpoints, a request can resume after every chunk. In one with checkpoints, a childless, unpinned
chunk after which no request can resume is useless once the request that stored it has ended, and is evicted first.
Whether a chunk is useless changes with its children, its pins and its checkpoint. So there is no list of useless
chunks, but one of chunks that may be useless, the latest last: each is checked when it is taken.
"""

from collections.abc import Callable, Iterable, Sequence

from cpu_prefix_cache.index.boundary_log import BoundaryLog
from cpu_prefix_cache.index.forest import NONE, Forest
from cpu_prefix_cache.index.nearest_checkpoint import NearestCheckpoints
from cpu_prefix_cache.pool.checkpoints import Checkpoints


class ResumePoints:
    """Follows every node that is cached or no longer is; notifies the log where a request can resume.

    `needs_checkpoint` is true of a depth, in chunks, where resuming takes a checkpoint; None: it never does.
    """

    def __init__(
        self,
        forest: Forest,
        checkpoints: Checkpoints,
        needs_checkpoint: Callable[[int], bool] | None,
        log: BoundaryLog | None,
    ) -> None:
        self._forest = forest
        self._checkpoints = checkpoints
        self._needs_checkpoint = needs_checkpoint or (lambda depth: False)
        self._log = log
        self._nearest = None if needs_checkpoint is None else NearestCheckpoints(forest)
        self._candidates: dict[int, None] = {}  # chunks that may be useless

    def nearest(self, chunk: int) -> int:
        """The deepest chunk, at or above a cached one, from which a request can resume; the root if there is none."""
        return chunk if self._nearest is None else self._nearest.nearest(chunk)

    def found(self, nodes: Sequence[int], parent: int) -> None:
        """Nodes are cached now, the first below `parent`, each further one below the one before it."""
        if self._nearest is None:
            if self._log is not None:
                self._log.stored(nodes)
            return
        for node in nodes:
            if node in self._checkpoints:
                resumable = parent
            else:
                self._nearest.enter(node)
                resumable = NONE if self._needs_checkpoint(self._forest.depth[node]) else node
            if resumable != NONE and self._nearest.set(resumable, True) and self._log is not None:
                self._log.stored((resumable,))
            parent = node

    def lost(self, nodes: Sequence[int]) -> None:
        """Nodes are not cached any more: their parents may be useless now."""
        if self._nearest is None:
            if self._log is not None:
                self._log.removed(nodes)
            return
        parents, child = self._forest.parent, self._forest.child
        for node in nodes:
            parent = parents[node]
            chunk = parent if node in self._checkpoints else node
            if chunk == parent and not self._needs_checkpoint(self._forest.depth[chunk]):
                continue  # a request can resume there without it
            if self._nearest.set(chunk, False) and self._log is not None:
                self._log.removed((chunk,))
            if child[parent] == NONE:
                self.may_be_useless(parent)

    def resumable(self, cached: bytearray) -> bytearray:
        """By chunk, from the first on: whether a request can resume after it. `cached`: whether it is cached."""
        return cached if self._nearest is None else self._nearest.here

    def may_be_useless(self, node: int) -> None:
        """A chunk has lost a child, a pin or its checkpoint, or the request that stored it has ended."""
        if self._nearest is not None:
            self._candidates.pop(node, None)
            self._candidates[node] = None

    def forget(self, nodes: Iterable[int]) -> None:
        """These nodes do not exist any more; their numbers will be other nodes'."""
        for node in nodes:
            self._candidates.pop(node, None)

    def take_useless(self) -> int | None:
        """The next useless chunk, for eviction; None if there is none."""
        while self._candidates:
            node, _ = self._candidates.popitem()
            if self._is_useless(node):
                return node
        return None

    def useless(self) -> list[int]:
        """Chunks that `take_useless` would return, one after the other. Changes nothing."""
        return [node for node in reversed(self._candidates) if self._is_useless(node)]

    def check_valid(self) -> None:
        """Assert that a chunk can be resumed from if its checkpoint is here, or it needs none. For tests."""
        forest = self._forest
        if self._nearest is None:
            return
        self._nearest.check_valid()
        cached = [node for node in forest.subtree(forest.root) if forest.key[node] is not None]
        with_checkpoint = {forest.parent[node] for node in cached if node in self._checkpoints}
        for chunk in cached:
            if chunk not in self._checkpoints:
                resumable = chunk in with_checkpoint or not self._needs_checkpoint(forest.depth[chunk])
                assert (self.nearest(chunk) == chunk) == resumable, f"chunk {chunk} can be resumed from, or not"
        assert with_checkpoint <= set(cached), "a checkpoint stands below a chunk that is not cached"

    def _is_useless(self, node: int) -> bool:
        forest = self._forest
        if forest.key[node] is None or forest.child[node] != NONE or node in forest.pins or node in self._checkpoints:
            return False
        return self._nearest is not None and not self._nearest.here[node]
