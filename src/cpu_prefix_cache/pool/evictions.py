"""How much a pool evicts, and how much of it without any use: it was stored, and no request was ever given it.

A hit is noted at the deepest node that it uses. Nodes are evicted after all that hangs below them, so an evicted node
passes the note on to its parent, and a node that has none when it is evicted was never part of a hit.
"""

from collections.abc import Iterable, Sequence, Set

from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.pool.checkpoints import Checkpoints


class Evictions:
    """Counts evicted nodes, and the chunks and checkpoints among them that were never hit."""

    def __init__(self) -> None:
        self.total = 0
        self.unused_chunks = 0
        self.unused_checkpoints = 0

    def begin(self, forest: Forest, checkpoints: Checkpoints) -> None:
        """Go on counting with these, which have no nodes yet."""
        self._forest = forest
        self._checkpoints = checkpoints
        self._hit: set[int] = set()

    def hit(self, deepest: int) -> None:
        """A request is given the prefix that ends at `deepest`."""
        self._hit.add(deepest)

    def evicted(self, nodes: Sequence[int], absent: Set[int]) -> None:
        """These nodes leave, each after what hung below it. Of those that are `absent` the place leaves alone."""
        left = self.left(nodes)
        unused = [node for node in left if node not in absent] if absent else left
        checkpoints = sum(node in self._checkpoints for node in unused) if self._checkpoints else 0
        self.unused_checkpoints += checkpoints
        self.unused_chunks += len(unused) - checkpoints
        self.total += len(nodes) - len(absent)

    def left(self, nodes: Sequence[int]) -> Sequence[int]:
        """Nodes leave, or their places, each after what hung below it. They still show their parents. Those that were
        part of no hit; the parents of the others were.
        """
        hit, parents, unused = self._hit, self._forest.parent, list[int]()
        if not hit:
            return nodes
        for node in nodes:
            if node in hit:
                hit.remove(node)
                hit.add(parents[node])
            else:
                unused.append(node)
        hit.discard(self._forest.root)
        return unused

    def forget(self, nodes: Iterable[int]) -> None:
        """These nodes do not exist any more, and were not evicted."""
        self._hit.difference_update(nodes)
