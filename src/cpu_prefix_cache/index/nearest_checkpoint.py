"""Where a prefix can be resumed: the nearest chunk, at or above a given one, that has its checkpoint.

A prefix may have its last checkpoint 4,000 chunks from its end, and to walk there chunk by chunk takes 0.3 ms. So the
forest is cut, by depth, into segments of 64 chunks. The first chunk of a segment counts the checkpoints in it, on all
branches below that chunk, and a segment without any is passed in one step:

    depth     1 ... 64    65 ... 128    129 ... 192    193 ... 200
    count     0           1             0              0               from chunk 200: three steps to 128, then walk
"""

from array import array

from cpu_prefix_cache.index.forest import NONE, Forest

SEGMENT = 64  # chunks: as many steps within a segment as segments in a prefix of 4,096


class NearestCheckpoints:
    """Cached chunks that can be resumed from. Notified of every chunk that enters or leaves the forest."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._head = array("i")  # the first chunk of the segment
        self._count = array("i")  # of a first chunk: how many in its segment can be resumed from
        self.here = bytearray()  # whether a chunk can be resumed from

    def enter(self, chunk: int) -> None:
        """A chunk has been inserted into the forest; it cannot be resumed from yet."""
        if missing := len(self._forest.parent) - len(self._head):
            self._head.extend(array("i", [NONE]) * missing)
            self._count.extend(array("i", [0]) * missing)
            self.here.extend(bytes(missing))
        starts = self._forest.depth[chunk] % SEGMENT == 1
        self._head[chunk] = chunk if starts else self._head[self._forest.parent[chunk]]
        self.here[chunk] = False

    def set(self, chunk: int, resumable: bool) -> bool:
        """Whether a chunk can be resumed from, now; before it leaves the forest, it cannot. Whether that is new."""
        if self.here[chunk] == resumable:
            return False
        self.here[chunk] = resumable
        self._count[self._head[chunk]] += 1 if resumable else -1
        return True

    def nearest(self, chunk: int) -> int:
        """The deepest chunk at or above `chunk` that can be resumed from; the root if there is none."""
        parents, root = self._forest.parent, self._forest.root
        while chunk != root:
            head = self._head[chunk]
            if not self._count[head]:
                chunk = parents[head]
            elif self.here[chunk]:
                return chunk
            else:
                chunk = parents[chunk]
        return root

    def check_valid(self) -> None:
        """Assert that segments count what is in them. For tests: O(blocks)."""
        counts = dict.fromkeys(range(len(self._head)), 0)
        nodes = self._forest.nodes()
        for chunk, here in enumerate(self.here):
            if here:
                assert chunk in nodes, f"chunk {chunk} is gone and can be resumed from"
                counts[self._head[chunk]] += 1
        for chunk in nodes:
            if chunk < len(self._head) and self._head[chunk] == chunk:
                assert self._count[chunk] == counts[chunk], f"the segment of chunk {chunk} is miscounted"
