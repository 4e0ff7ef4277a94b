"""The fast copier: fragments are gathered on the device into a ring of slots, and whole pieces cross the link.

An engine's block is many small fragments, one in each layer; the copy engines reach the link's speed only from some
hundred KiB at a time. So a transfer is cut into slices that fit a slot, and each slice takes two steps:

    store   kernels   wait for the slot, gather fragments into it   |   copies    wait for that, slot to host blocks
    load    copies    wait for the slot, host blocks into it        |   kernels   wait for that, scatter to fragments

While one slot crosses the link the next is gathered, so the link is always busy. Stores and loads have a ring and two
streams each, and a thread each may submit them. Blocks that are large in every part cross the link as they are.

The gather of a store waits for all that compute had been given when the copy was asked for, so for what wrote the
blocks. So does the scatter of a load: for the last reader of the blocks, and for whoever zeroes them (rule 12).
`submit` waits for slots only; nobody uses the blocks before the event it returns.

When a step cannot be submitted, what has been is waited for, so that every slot is free again and nothing of the
transfer can touch a block later; then the error goes on to whoever asked.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from cpu_prefix_cache.copier import triton_staging
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding, Shapes, Tensors
from cpu_prefix_cache.copier.link import Region
from cpu_prefix_cache.copier.loads_first import LoadsFirst
from cpu_prefix_cache.copier.paths import SLOT_IDS, Direct, StagedGroup, ThroughRing, round_up
from cpu_prefix_cache.copier.ring import SLOT_ALIGNMENT, Ring
from cpu_prefix_cache.copier.streams import Event, StreamPair, Streams, streams_for
from cpu_prefix_cache.copier.triton_staging import Tiling
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import cuda_driver
from cpu_prefix_cache.memory.moves import SEAM_BYTES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

RING_BYTES = 124 * 1024 * 1024  # both rings; with ids, and what torch rounds up, they take less than 128 MiB
SLOTS = 2  # of each ring: 30 MiB cross in 0.6 ms, and are filled or emptied in a tenth of that
DIRECT_BYTES = 1024 * 1024  # from there on direct copies are 99 % of the link, and take less of the host (one H200)


class StagedCopier(Copier):
    """Copies through two staging rings of `ring_bytes` bytes of device memory together. On CPU tensors, in Triton's
    interpreter, it is for tests. `host` is contiguous; for CUDA tensors `pinned` says how far it is pinned by now
    (a `HostArena` does), and without that it is pinned as a whole.

    Arguments and errors are otherwise those of Binding; ConfigurationError also when the rings are too small for the
    largest part, or Triton does not fit the device. Blocks of `direct_bytes` or more in every part cross directly.
    With `loads_first` stores pause for loads (loads_first.py). `streams`, `tiling` and `seam_bytes` are for tests and
    measurements.
    """

    def __init__(
        self,
        shapes: Shapes,
        tensors: Tensors,
        host: torch.Tensor,
        *,
        null_block: int | None = None,
        pinned: HostArena | None = None,
        ring_bytes: int = RING_BYTES,
        slots: int = SLOTS,
        direct_bytes: int = DIRECT_BYTES,
        streams: Streams | None = None,
        tiling: Tiling | None = None,
        seam_bytes: int = SEAM_BYTES,
        loads_first: bool = False,
    ) -> None:
        self._binding = Binding(shapes, tensors, host, null_block)
        device = self._binding.device
        _check_machine(device, host, pinned)
        self._working: Callable[[], AbstractContextManager[None]]  # has any thread work on the device
        self._working = partial(cuda_driver().working_in, device.index) if device.type == "cuda" else nullcontext
        self._streams = streams_for(device) if streams is None else streams
        region = Region(host, device, pinned, seam_bytes)
        groups = [StagedGroup(group, region, direct_bytes) for group in self._binding.groups]
        slot_bytes = _slot_bytes(groups, ring_bytes // 2, slots)
        self._loads_first = LoadsFirst() if loads_first else None
        num_ids = max(SLOT_IDS, *(group.device_blocks for group in groups))
        pairs = {Direction.STORE: self._streams.stores, Direction.LOAD: self._streams.loads}
        with self._working():
            self._rings = {
                direction: self._ring(direction, pair, ring_bytes // 2, slot_bytes, num_ids)
                for direction, pair in pairs.items()
            }
        tiling = triton_staging.default_tiling() if tiling is None else tiling
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # kernels are compiled for it
            self._paths = [
                Direct(group) if group.is_direct else ThroughRing(group, slot_bytes, tiling) for group in groups
            ]
        direct = [group.name for group in groups if group.is_direct]
        self.paths = (
            f"directly: {', '.join(direct) or 'no group'}; through the ring: {len(groups) - len(direct)} groups"
        )

    def here(self) -> Event:
        return self._streams.compute()

    def hold_compute(self, event: Event) -> None:
        self._streams.hold_compute(event)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        self._binding.check(direction, copies)
        ring = self._rings[direction]
        loads_first = self._loads_first if direction is Direction.LOAD else None
        loading = nullcontext() if loads_first is None else loads_first.loading()
        try:
            with self._working(), loading:
                for copy in copies:
                    if copy.host_blocks:
                        self._paths[copy.group].submit(direction, copy, ring, after)
                event = ring.streams.record()
        except BaseException:
            with self._working():
                ring.streams.synchronize()
            raise
        return event

    def _ring(self, direction: Direction, pair: StreamPair, num_bytes: int, slot_bytes: int, num_ids: int) -> Ring:
        slots, device = num_bytes // slot_bytes if slot_bytes else 0, self._binding.device
        pause = _no_pause if self._loads_first is None or direction is Direction.LOAD else self._loads_first.pause
        return Ring(direction, pair, slots, slot_bytes, num_ids, device, self._streams.compute, pause)


def _no_pause() -> None:
    pass


def _check_machine(device: torch.device, host: torch.Tensor, pinned: HostArena | None) -> None:
    if host.device.type != "cpu" or not host.is_contiguous():
        raise ConfigurationError("the host region must be one contiguous tensor in host memory")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"staged copies need CUDA tensors, got {device}; the reference copier takes any")
    if device.type == "cuda" and triton_staging.INTERPRETED:
        raise ConfigurationError("TRITON_INTERPRET=1 runs kernels on the CPU; unset it for CUDA tensors")
    if device.type == "cuda" and pinned is None and not host.is_pinned():
        raise ConfigurationError("the host region is not pinned; make it with HostArena(..., pinned_for=device)")
    if device.type == "cpu" and not triton_staging.INTERPRETED:
        raise ConfigurationError(
            "on CPU tensors the staged copier runs in Triton's interpreter only; set TRITON_INTERPRET=1 before the "
            "kernels are imported, or take the reference copier"
        )


def _slot_bytes(groups: Sequence[StagedGroup], ring_bytes: int, slots: int) -> int:
    """How large the slots of a ring are: a share of it, or what the largest part of a piece needs. 0: none needed."""
    largest = max((group.largest_part for group in groups if not group.is_direct), default=0)
    if not largest:
        return 0
    needed = round_up(largest, SLOT_ALIGNMENT)
    if ring_bytes < 2 * needed:
        raise ConfigurationError(
            f"staging rings of {2 * ring_bytes} bytes together are too small for a part of {largest} bytes; "
            f"ring_bytes={4 * needed} works"
        )
    return max(needed, ring_bytes // slots // SLOT_ALIGNMENT * SLOT_ALIGNMENT)
