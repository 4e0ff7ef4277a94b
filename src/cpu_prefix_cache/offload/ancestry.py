"""Ancestry: lazy's questions about the chunks and checkpoints on a device, and what became of them.

A checkpoint hangs below its chunk, and is remembered as chunks are. In a model that needs them a chunk is stored only
with a checkpoint below it, so only checkpoints can be lost. What leaves the device, and is neither covered nor settled
then, was lost.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.parents import Parents
from cpu_prefix_cache.offload.stores import StorePlanner


class Ancestry(Protocol):
    """Questions of lazy about the chunks and checkpoints on a device, and its reports; a device that knows them already
    takes none. `lost`: see `Offload.lost`. `settled` is what was stored once or declined, until it leaves the device;
    lazy adds to it, and takes off what is used or computed again.
    """

    lost: int
    settled: set[bytes]

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> Sequence[bytes]:
        return ()

    def add_checkpoint(self, checkpoint: CheckpointAt) -> None:
        return

    def handed_out(self, keys: Sequence[bytes]) -> None:
        return

    def __len__(self) -> int: ...
    def sweep(self) -> object: ...
    def is_dependent(self, key: bytes) -> bool: ...
    def checkpoint(self, key: bytes) -> CheckpointAt | None: ...
    def missing_above(
        self, key: bytes, is_covered: Callable[[bytes], bool]
    ) -> tuple[list[bytes], bytes | None] | None: ...
    def clear(self) -> None: ...


class DeviceAncestry(Parents):
    """Ancestry on a device that reports nothing: what is not known to have left is looked up."""

    def __init__(self, stores: StorePlanner) -> None:
        super().__init__(self._are_on_device)
        self._device, self._planner, self._is_covered = stores.device, stores.planner, stores.is_covered
        self._checkpoints: dict[bytes, CheckpointAt] = {}
        self._dependent: set[bytes] = set()  # chunks that are no use without a checkpoint
        self.settled = set[bytes]()

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> Sequence[bytes]:
        new = super().add(keys, start, stop)
        if self._planner.has_checkpoints:
            depths = range(start + 1, stop + 1)
            self._dependent |= {keys[at - 1] for at in depths if self._planner.needs_checkpoint(at)}.intersection(new)
        return new

    def add_checkpoint(self, checkpoint: CheckpointAt) -> None:
        """Remember a checkpoint, whose chunk is remembered."""
        key = checkpoint_key(checkpoint.tail[-1])
        if key in self._parent:
            return
        self._checkpoints[key] = checkpoint
        self._parent[key] = checkpoint.tail[-1]
        self._sweep.added(1)

    def handed_out(self, keys: Sequence[bytes]) -> None:
        """Blocks that waited with these keys have left the order of eviction. Forgets what has left the device."""
        before = len(self._parent)
        self._forget([key for key, is_here in zip(keys, self._are_on_device(keys), strict=True) if not is_here])
        self._sweep.left(before - len(self._parent))

    def is_dependent(self, key: bytes) -> bool:
        """Whether this is a chunk that is no use without a checkpoint."""
        return key in self._dependent

    def checkpoint(self, key: bytes) -> CheckpointAt | None:
        """The checkpoint with this key, if it is one that is remembered."""
        return self._checkpoints.get(key)

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
        self._checkpoints, self._dependent, self.settled = {}, set(), set()

    def _forget(self, keys: Sequence[bytes]) -> None:
        left = (key for key in keys if key in self._parent and key not in self._dependent)
        self.lost += sum(not (key in self.settled or self._is_covered(key)) for key in left)
        super()._forget(keys)
        for key in keys if self._checkpoints else ():
            self._checkpoints.pop(key, None)
        self._dependent.difference_update(keys)
        self.settled.difference_update(keys)
