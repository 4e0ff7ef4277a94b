"""Planning one store: from a chain of keys to device blocks that are held and host blocks that wait for them.

A chain is a run of chunks, each the child of the one before, that the host does not have and nobody is writing.
Of a chain the longest part is stored that hangs together: it ends before a chunk the device has lost, and where the
pool is full of what cannot be evicted (rule 4).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.coordinator import KVCacheCoordinator
from cpu_prefix_cache.device import Device
from cpu_prefix_cache.errors import InternalError, MisuseError
from cpu_prefix_cache.plan import Direction
from cpu_prefix_cache.transfers import Place, Transfer, TransferLedger


class Stop(enum.Enum):
    """Why a chain was not stored to its end."""

    NOT_ON_DEVICE = "not on the device"  # it cannot be stored at all until it is computed again
    POOL_FULL = "pool full"  # it can be stored later


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """`transfer` covers the first `planned` chunks of the chain; None when there are none."""

    transfer: Transfer | None = None
    stopped_by: Stop | None = None

    @property
    def planned(self) -> int:
        return 0 if self.transfer is None else len(self.transfer.keys)


class StorePlanner:
    """Plans stores from a device into the coordinator's pool, through the ledger."""

    def __init__(self, coordinator: KVCacheCoordinator, device: Device, ledger: TransferLedger) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._device = device
        self._ledger = ledger
        self._width = coordinator.planner.device_blocks_per_chunk
        self.refusals = 0

    def is_covered(self, key: bytes) -> bool:
        """Whether the host has this chunk, or will when a store in flight ends well."""
        return self._pool.find(key) is not None or key in self._ledger.writing

    def plan(
        self,
        parent_key: bytes | None,
        keys: Sequence[bytes],
        touch: Any,
        *,
        in_place: bool = False,
        behind: Place | None = None,
    ) -> StoreDecision:
        """Plan a store of the chain `keys`, which hangs below `parent_key` (None: a first chunk).

        With `in_place`, those of them that wait to be evicted go back to where they waited: behind that block.
        """
        follows = None if parent_key is None else self._ledger.writing.get(parent_key)
        parent = self._pool.root if parent_key is None else self._pool.find(parent_key)
        if parent is not None and parent != self._pool.root:
            pin = self._pool.pin(parent)  # before anything is evicted for the children
        elif parent is not None or follows is not None:
            pin = None
        else:
            raise InternalError("a store was to be planned below a chunk that is neither on the host nor on its way")
        room = self._pool.available(len(keys))
        device_blocks = self._on_device(keys[:room])
        count = len(device_blocks) // self._width
        if count < room:
            stopped_by: Stop | None = Stop.NOT_ON_DEVICE
        else:
            stopped_by = Stop.POOL_FULL if room < len(keys) else None
            self.refusals += len(keys) - room
        if not count:
            if pin is not None:
                self._pool.unpin(pin)
            return StoreDecision(stopped_by=stopped_by)
        waiting, in_use = self._sides(keys[:count], device_blocks) if in_place else ([], device_blocks)
        chunks = self._pool.allocate(count, keys[:count])
        copies = self._coordinator.copies(chunks, self._coordinator.device_blocks_by_group(device_blocks))
        num_bytes = count * self._coordinator.planner.chunk_bytes
        transfer = Transfer(
            self._ledger.new_plan(Direction.STORE, copies, num_bytes),
            tuple(keys[:count]),
            chunks,
            hold=self._device.hold(in_use),
            hold_in_place=self._device.hold(waiting) if waiting else None,
            behind=behind,
            pin=pin,
            touch=touch,
            parent_key=parent_key,
            follows=follows,
        )
        self._ledger.add(transfer)
        return StoreDecision(transfer, stopped_by)

    def _on_device(self, keys: Sequence[bytes]) -> list[int]:
        """The device blocks of the longest beginning of `keys` that the device has."""
        blocks: list[int] = []
        for key in keys:
            found = self._device.find(key)
            if found is None:
                break
            if len(found) != self._width:
                raise MisuseError(f"the device has {len(found)} blocks for a chunk that takes {self._width} of them")
            blocks.extend(found)
        return blocks

    def _sides(self, keys: Sequence[bytes], device_blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The blocks of those chunks that wait to be evicted, and the blocks of those in use."""
        waiting: list[int] = []
        in_use: list[int] = []
        for at, key in enumerate(keys):
            blocks = device_blocks[at * self._width : (at + 1) * self._width]
            (waiting if self._device.is_waiting(blocks[0], key) else in_use).extend(blocks)
        return waiting, in_use
