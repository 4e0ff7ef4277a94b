"""Ancestry of chunks where the device is a pool of ours: its forest knows all parents, so nothing is remembered.

What the pool evicts before it was stored is counted when it has left: the pool keeps the keys until then.
"""

from collections.abc import Callable

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.ancestry import Ancestry
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.pool.block_pool import BlockPool


class HostAncestry(Ancestry):
    """The chunks of `host` and their parents, for stores into the tier."""

    def __init__(self, host: BlockPool, stores: StorePlanner) -> None:
        self._host, self._planner, self._is_covered = host, stores.planner, stores.is_covered
        self.settled = set[bytes]()
        self.lost = 0
        host.log_departures()

    def __len__(self) -> int:
        return 0

    def sweep(self) -> None:
        """Count what has left the host unsaved."""
        departed = self._host.take_departed()
        self.lost += sum(not (key in self.settled or self._is_covered(key)) for key in departed)
        self.settled.difference_update(departed)

    def is_dependent(self, key: bytes) -> bool:
        host, node = self._host, self._host.find(key)
        if node is None or not self._planner.has_checkpoints or node in host.checkpoints:
            return False
        return self._planner.needs_checkpoint(host.depth(node))

    def independent(self, key: bytes) -> bytes | None:
        """The deepest of this chunk and those above it that is of use without a checkpoint. None: there is none."""
        node = self._host.find(key)
        if node is None or not self.is_dependent(key):
            return key
        depth = self._host.depth(node)
        unaided = self._planner.unaided_depth(depth)
        return self._host.key(self._host.path(node, 1 + depth - unaided)[0]) if unaided else None

    def checkpoint(self, key: bytes) -> CheckpointAt | None:
        node = self._host.find(key)
        if node is None or node not in self._host.checkpoints:
            return None
        chunk = self._host.parent(node)
        depth = self._host.depth(chunk)
        return CheckpointAt(depth, tuple(map(self._key, self._host.path(chunk, self._planner.reach(depth)))))

    def missing_above(self, key: bytes, is_covered: Callable[[bytes], bool]) -> tuple[list[bytes], bytes | None] | None:
        host, node = self._host, self._host.find(key)
        if node is None:
            return None
        run: list[bytes] = []
        while node != host.root and not is_covered(above := self._key(node)):
            run.append(above)
            node = host.parent(node)
        return run[::-1], None if node == host.root else self._key(node)

    def clear(self) -> None:
        self._host.take_departed()
        self.settled.clear()

    def _key(self, node: int) -> bytes:
        key = self._host.key(node)
        return b"" if key is None else key
