"""The parent of each chunk on the device: an engine does not know which chunk another one hangs below.

A device block that is about to be evicted shows its key, not its parent's. So every confirmed chunk is remembered with
the key of its parent while the device has it, and forgotten some time after (`forgetting.py`). A chunk that is
forgotten and never reached the host was lost, unless the host declined it.

A checkpoint hangs below its chunk, and is remembered in the same way. In a model that needs them a chunk is stored only
with a checkpoint below it, so only checkpoints can be lost.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.forgetting import Forgetting
from cpu_prefix_cache.pool.block_pool import BlockPool


class Ancestry(Protocol):
    """Questions of lazy about the chunks and checkpoints on a device, and its reports. `lost`: see `Lazy.lost`."""

    lost: int

    def __len__(self) -> int: ...
    def add(self, keys: Sequence[bytes], start: int, stop: int) -> None: ...
    def add_checkpoint(self, checkpoint: CheckpointAt) -> None: ...
    def sweep(self) -> Collection[bytes]: ...
    def handed_out(self, keys: Sequence[bytes]) -> Sequence[bytes]: ...
    def is_dependent(self, key: bytes) -> bool: ...
    def checkpoint(self, key: bytes) -> CheckpointAt | None: ...
    def missing_above(
        self, key: bytes, is_covered: Callable[[bytes], bool]
    ) -> tuple[list[bytes], bytes | None] | None: ...
    def saved(self, keys: Sequence[bytes]) -> None: ...
    def unwanted(self, keys: Sequence[bytes]) -> None: ...
    def clear(self) -> None: ...


class Parents:
    """Parents of confirmed chunks, at most about twice as many as the device holds once `sweep` has caught up."""

    def __init__(self, device: Device, pool: BlockPool, planner: HybridChunkPlanner) -> None:
        self._device = device
        self._pool = pool
        self._planner = planner
        self._parent = OrderedDict[bytes, bytes | None]()
        self._checkpoints: dict[bytes, CheckpointAt] = {}
        self._dependent: set[bytes] = set()  # chunks that are no use without a checkpoint
        self._unsaved: set[bytes] = set()
        self._sweep = Forgetting()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._parent)

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Remember `keys[start:stop]`, each below the one before it."""
        known, above, new = self._parent, keys[start - 1] if start else None, list[bytes]()
        for key in keys[start:stop]:
            if key not in known:
                known[key] = above
                new.append(key)
            above = key
        self._sweep.added(len(new))
        # Below what has no place on the host nothing has one (rule 3).
        unsaved = set(new if self._pool.place(keys[start]) is None else self._pool.missing(new))
        if self._planner.has_checkpoints:
            depths = range(start + 1, stop + 1)
            dependent = {keys[at - 1] for at in depths if self._planner.needs_checkpoint(at)}.intersection(new)
            self._dependent |= dependent
            unsaved -= dependent
        self._unsaved |= unsaved

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

    def sweep(self) -> Sequence[bytes]:
        """Forget those of the oldest entries that have left the device, a portion at a time. Returns them."""
        if gone := self._sweep.gone(self._parent, self._are_here):
            self._forget(gone)
        return gone

    def handed_out(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Blocks that waited with these keys have left the order of eviction. Forgets what has left the device, and
        returns it.
        """
        before = len(self._parent)
        gone = [key for key, is_here in zip(keys, self._are_here(keys), strict=True) if not is_here]
        self._forget(gone)
        self._sweep.left(before - len(self._parent))
        return gone

    def is_dependent(self, key: bytes) -> bool:
        """Whether this is a chunk that is no use without a checkpoint."""
        return key in self._dependent

    def checkpoint(self, key: bytes) -> CheckpointAt | None:
        """The checkpoint with this key, if it is one that is remembered."""
        return self._checkpoints.get(key)

    def missing_above(self, key: bytes, is_covered: Callable[[bytes], bool]) -> tuple[list[bytes], bytes | None] | None:
        """The chunks from the first that is not covered down to `key`, and their parent; None when one of them is not
        remembered. What is above a covered chunk is covered too (rule 3), so it gallops upwards and then bisects.
        """
        parents = self._parent
        upwards: list[Any] = [key]  # keys; above a first chunk, None
        missing = 0  # so many of them are not covered
        while (top := upwards[-1]) is not None and not is_covered(top):
            if top not in parents:
                return None
            missing = len(upwards)
            while top in parents and len(upwards) < 2 * missing:
                top = parents[top]
                upwards.append(top)
        between = range(missing, len(upwards) - 1)
        missing += bisect_left(between, True, key=lambda at: is_covered(upwards[at]))
        return upwards[:missing][::-1], upwards[missing]

    def run_above(self, key: bytes, within: Callable[[bytes], bool]) -> tuple[list[bytes], bytes | None] | None:
        """`key`, and the chunks right above it as far as they are `within`, parents first, and the parent of the first
        of them; None when one of them is not remembered.
        """
        parents, run = self._parent, list[bytes]()
        above: bytes | None = key
        while above is not None and within(above):
            if above not in parents:
                return None
            run.append(above)
            above = parents[above]
        return run[::-1], above

    def saved(self, keys: Sequence[bytes]) -> None:
        """These chunks have reached the host."""
        self._unsaved.difference_update(keys)

    def unwanted(self, keys: Sequence[bytes]) -> None:
        """The host declined these chunks, or a load saves them: they are not lost when the device evicts them."""
        self._unsaved -= set(keys)

    def _are_here(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether the device has each of these chunks and checkpoints."""
        known, device = self._checkpoints, self._device
        if not known:
            return [found is not None for found in device.find_all(keys)]
        chunks = iter(device.find_all([key for key in keys if key not in known]))
        found = (device.find_checkpoint(known[key]) if key in known else next(chunks) for key in keys)
        return [each is not None for each in found]

    def clear(self) -> None:
        self._pool.drop_later(self._parent, self._checkpoints, self._dependent, self._unsaved)
        self._parent, self._checkpoints, self._dependent, self._unsaved = OrderedDict(), {}, set(), set()
        self._sweep = Forgetting()

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._parent.pop(key, None)
        for key in keys if self._checkpoints else ():
            self._checkpoints.pop(key, None)
        self._dependent.difference_update(keys)
        lost = self._unsaved.intersection(keys)
        self._unsaved -= lost
        self.lost += len(lost)
