"""Ancestry: lazy's questions about the chunks and checkpoints on a device, and what became of them.

A checkpoint hangs below its chunk, and is remembered as chunks are. In a model that needs them a chunk is stored only
with a checkpoint below it, so only checkpoints can be lost. What is forgotten and never reached the host was lost,
unless the host declined it.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.parents import Parents
from cpu_prefix_cache.pool.block_pool import BlockPool


class Ancestry(Protocol):
    """Questions of lazy about the chunks and checkpoints on a device, and its reports; a device that knows them already
    takes none. `lost`: see `Offload.lost`.
    """

    lost: int

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> Sequence[bytes]:
        return ()

    def add_checkpoint(self, checkpoint: CheckpointAt) -> None:
        return

    def handed_out(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return ()

    def saved(self, keys: Sequence[bytes]) -> None:
        return

    def __len__(self) -> int: ...
    def sweep(self) -> Collection[bytes]: ...
    def is_dependent(self, key: bytes) -> bool: ...
    def checkpoint(self, key: bytes) -> CheckpointAt | None: ...
    def missing_above(
        self, key: bytes, is_covered: Callable[[bytes], bool]
    ) -> tuple[list[bytes], bytes | None] | None: ...
    def unwanted(self, keys: Sequence[bytes]) -> None: ...
    def clear(self) -> None: ...


class DeviceAncestry(Parents):
    """Ancestry on a device that reports nothing: what is not known to have left is looked up."""

    def __init__(self, device: Device, pool: BlockPool, planner: HybridChunkPlanner) -> None:
        super().__init__(self._are_on_device)
        self._device = device
        self._pool = pool
        self._planner = planner
        self._checkpoints: dict[bytes, CheckpointAt] = {}
        self._dependent: set[bytes] = set()  # chunks that are no use without a checkpoint
        self._unsaved: set[bytes] = set()

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> Sequence[bytes]:
        new = super().add(keys, start, stop)
        # Below what has no place on the host nothing has one (rule 3).
        unsaved = set(new if self._pool.place(keys[start]) is None else self._pool.missing(new))
        if self._planner.has_checkpoints:
            depths = range(start + 1, stop + 1)
            dependent = {keys[at - 1] for at in depths if self._planner.needs_checkpoint(at)}.intersection(new)
            self._dependent |= dependent
            unsaved -= dependent
        self._unsaved |= unsaved
        return new

    def add_checkpoint(self, checkpoint: CheckpointAt) -> None:
        """Remember a checkpoint, whose chunk is remembered."""
        key = checkpoint_key(checkpoint.tail[-1])
        if key in self._parent:
            return
        self._checkpoints[key] = checkpoint
        self._parent[key] = checkpoint.tail[-1]
        self._sweep.added(1)
        if self._pool.find(key) is None:
            self._unsaved.add(key)

    def handed_out(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Blocks that waited with these keys have left the order of eviction. Forgets what has left the device, and
        returns it.
        """
        before = len(self._parent)
        gone = [key for key, is_here in zip(keys, self._are_on_device(keys), strict=True) if not is_here]
        self._forget(gone)
        self._sweep.left(before - len(self._parent))
        return gone

    def is_dependent(self, key: bytes) -> bool:
        """Whether this is a chunk that is no use without a checkpoint."""
        return key in self._dependent

    def checkpoint(self, key: bytes) -> CheckpointAt | None:
        """The checkpoint with this key, if it is one that is remembered."""
        return self._checkpoints.get(key)

    def saved(self, keys: Sequence[bytes]) -> None:
        """These chunks have reached the host."""
        self._unsaved.difference_update(keys)

    def unwanted(self, keys: Sequence[bytes]) -> None:
        """The host declined these chunks: they are not lost when the device evicts them."""
        self._unsaved.difference_update(keys)

    def _are_on_device(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether the device has each of these chunks and checkpoints."""
        known, device = self._checkpoints, self._device
        if not known:
            return [found is not None for found in device.find_all(keys)]
        chunks = iter(device.find_all([key for key in keys if key not in known]))
        found = (device.find_checkpoint(known[key]) if key in known else next(chunks) for key in keys)
        return [each is not None for each in found]

    def clear(self) -> None:
        super().clear()
        self._checkpoints, self._dependent, self._unsaved = {}, set(), set()

    def _forget(self, keys: Sequence[bytes]) -> None:
        super()._forget(keys)
        for key in keys if self._checkpoints else ():
            self._checkpoints.pop(key, None)
        self._dependent.difference_update(keys)
        lost = self._unsaved.intersection(keys)
        self._unsaved -= lost
        self.lost += len(lost)
