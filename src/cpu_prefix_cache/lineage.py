"""What an engine cannot tell: which chunk each chunk on its device hangs below.

A device block that is about to be evicted shows its key, not its parent's. So every chunk confirmed as computed is
remembered with the key of its parent for as long as the device holds it, and forgotten some time after, by a sweep
that looks at two of the oldest entries for each new one. What is swept without ever having reached the host was lost,
unless the host did not want it.

A checkpoint hangs below its chunk, and is remembered in the same way. In a model that needs them, chunks are worth
storing for a checkpoint's sake only, so that only checkpoints can be lost.
"""

from collections import deque
from collections.abc import Callable, Sequence

from cpu_prefix_cache.hashing import checkpoint_key
from cpu_prefix_cache.request import CheckpointAt


class Lineage:
    """Parents of confirmed chunks, at most about twice as many as the device holds.

    `on_device` is asked of chunks by their keys and of checkpoints by themselves. `needs_checkpoint` says of a depth,
    in chunks, whether resuming there takes a checkpoint.
    """

    def __init__(
        self,
        on_device: Callable[[bytes | CheckpointAt], bool],
        on_host: Callable[[bytes], bool],
        needs_checkpoint: Callable[[int], bool] = lambda depth: False,
    ) -> None:
        self._on_device = on_device
        self._on_host = on_host
        self._needs_checkpoint = needs_checkpoint
        self._checkpoints: dict[bytes, CheckpointAt] = {}
        self._dependent: set[bytes] = set()  # chunks that are of no use without a checkpoint
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
            dependent = self._needs_checkpoint(at + 1)
            if dependent:
                self._dependent.add(key)
            self._remember(key, keys[at - 1] if at else None, may_be_lost=not dependent)

    def add_checkpoint(self, checkpoint: CheckpointAt) -> None:
        """Remember a checkpoint, whose chunk is remembered."""
        key = checkpoint_key(checkpoint.tail[-1])
        if key not in self._parent:
            self._checkpoints[key] = checkpoint
            self._remember(key, checkpoint.tail[-1], may_be_lost=True)

    def is_dependent(self, key: bytes) -> bool:
        """Whether this is a chunk that is of no use without a checkpoint."""
        return key in self._dependent

    def checkpoint(self, key: bytes) -> CheckpointAt | None:
        """The checkpoint with this key, if it is one that is remembered."""
        return self._checkpoints.get(key)

    def saved(self, key: bytes) -> None:
        """The chunk has reached the host."""
        self._unsaved.discard(key)

    def unwanted(self, key: bytes) -> None:
        """The chunk is not to be stored: it is not lost when the device evicts it."""
        self._unsaved.discard(key)

    def clear(self) -> None:
        self._parent.clear()
        self._checkpoints.clear()
        self._dependent.clear()
        self._oldest.clear()
        self._unsaved.clear()

    def _remember(self, key: bytes, parent: bytes | None, may_be_lost: bool) -> None:
        self._parent[key] = parent
        self._oldest.append(key)
        if may_be_lost and not self._on_host(key):
            self._unsaved.add(key)
        self._sweep()
        self._sweep()

    def _sweep(self) -> None:
        if not self._oldest:
            return
        key = self._oldest.popleft()
        if self._on_device(self._checkpoints.get(key, key)):
            self._oldest.append(key)
            return
        del self._parent[key]
        self._checkpoints.pop(key, None)
        self._dependent.discard(key)
        if key in self._unsaved:
            self._unsaved.remove(key)
            self.lost += 1
