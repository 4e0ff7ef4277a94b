"""What an engine cannot tell: which chunk each chunk on its device hangs below.

A device block that is about to be evicted shows its key, not its parent's. So every chunk confirmed as computed is
remembered with the key of its parent for as long as the device holds it, and forgotten some time after, by a sweep
that looks at two of the oldest entries for each new one. What is swept without ever having reached the host was lost.
"""

from collections import deque
from collections.abc import Callable, Sequence


class Lineage:
    """Parents of confirmed chunks, at most about twice as many as the device holds."""

    def __init__(self, on_device: Callable[[bytes], bool], on_host: Callable[[bytes], bool]) -> None:
        self._on_device = on_device
        self._on_host = on_host
        self._parent: dict[bytes, bytes | None] = {}
        self._oldest: deque[bytes] = deque()
        self._unsaved: set[bytes] = set()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, key: bytes) -> bool:
        return key in self._parent

    def parent(self, key: bytes) -> bytes | None:
        """The chunk above `key`, or None for a first chunk. KeyError for one that is not remembered."""
        return self._parent[key]

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Remember `keys[start:stop]`, each below the one before it."""
        for at in range(start, stop):
            key = keys[at]
            if key in self._parent:
                continue
            self._parent[key] = keys[at - 1] if at else None
            self._oldest.append(key)
            if not self._on_host(key):
                self._unsaved.add(key)
            self._sweep()
            self._sweep()

    def saved(self, key: bytes) -> None:
        """The chunk has reached the host."""
        self._unsaved.discard(key)

    def clear(self) -> None:
        self._parent.clear()
        self._oldest.clear()
        self._unsaved.clear()

    def _sweep(self) -> None:
        if not self._oldest:
            return
        key = self._oldest.popleft()
        if self._on_device(key):
            self._oldest.append(key)
            return
        del self._parent[key]
        if key in self._unsaved:
            self._unsaved.remove(key)
            self.lost += 1
