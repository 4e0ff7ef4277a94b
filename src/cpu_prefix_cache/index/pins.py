"""Pins on the nodes of a forest, and what they protect.

A node with a pin stays, and so does all above it: what has a child does not leave. Pins are few, and what they protect
is counted when somebody asks: a walk goes up from each new pin until it meets what others protect. Once a pin has ended
all is walked anew.

A pin can come before its node is linked, and outlast its key. It protects what is above the node all the same.
"""

from collections.abc import Collection, Iterator, Sequence, Set


class Pins:
    """Pins on nodes of the forest with these keys, parents, and root."""

    def __init__(self, keys: Sequence[bytes | None], parents: Sequence[int], root: int) -> None:
        self._keys = keys
        self._parents = parents
        self._root = root
        self._count: dict[int, int] = {}  # by node
        self.linked: set[int] = set()  # those of them that are linked
        self._protected: set[int] = set()  # with a key, protected by a pin now or before; so is all above each of them
        self._since: set[int] = set()  # linked, and not walked up from yet
        self._is_exact = True  # no pin has ended since the walk that made `_protected`

    def __contains__(self, node: int) -> bool:
        return node in self._count

    def __iter__(self) -> Iterator[int]:
        """Nodes with a pin, linked or not."""
        return iter(self._count)

    def count(self, node: int) -> int:
        """How many pins are on a node."""
        return self._count.get(node, 0)

    def add(self, node: int, *, is_linked: bool) -> None:
        before = self._count.get(node, 0)
        self._count[node] = before + 1
        if is_linked and not before:
            self._enter(node)

    def remove(self, node: int) -> None:
        self._count[node] -= 1
        if self._count[node]:
            return
        del self._count[node]
        if node in self.linked:
            self.linked.remove(node)
            self._since.discard(node)
            self._is_exact = not self.linked
            if not self.linked:
                self._protected.clear()

    def entered(self, run: Sequence[int]) -> None:
        """These nodes are linked now."""
        if len(self._count) > len(self.linked):
            for node in self._count.keys() & run:
                self._enter(node)

    def left(self, run: Sequence[int]) -> None:
        """These have no key any more."""
        if self._protected:
            self._protected.difference_update(run)

    def protected_among(self, nodes: Collection[int]) -> Set[int]:
        """Nodes, of these, that pins protect now. Amortised O(1) a node, O(nodes protected) once a pin has ended."""
        return frozenset() if self._protected_before().isdisjoint(nodes) else self.protected().intersection(nodes)

    def protected(self) -> set[int]:
        """The nodes with a key that pins protect now."""
        if not self._is_exact:
            self._protected.clear()
            self._since = set(self.linked)
            self._is_exact = True
        return self._protected_before()

    def check_valid(self, linked: set[int], parents: Sequence[int]) -> None:
        """Assert that what is protected is known, given the linked nodes. For tests."""
        assert self.linked == self._count.keys() & linked, "pinned nodes are miscounted"
        assert all(self._keys[node] is not None for node in self._protected), "what is protected has no key"
        protected = {self._root, *self._protected}
        assert all(parents[node] in protected for node in self._protected), "what is above is not protected"
        for node in self.linked - self._since:
            assert self._keys[node] is None or node in protected, f"the pin on node {node} protects nothing"

    def _enter(self, node: int) -> None:
        self.linked.add(node)
        self._since.add(node)

    def _protected_before(self) -> set[int]:
        """The nodes that pins protect now, and some that pins protected which have ended."""
        protected, keys, parents, root = self._protected, self._keys, self._parents, self._root
        withdrawn: set[int] = set()
        for node in self._since:
            while node != root and node not in protected and node not in withdrawn:
                (withdrawn if keys[node] is None else protected).add(node)
                node = parents[node]
        self._since.clear()
        return protected
