"""The fast copier: fragments are gathered on the device into a ring of slots, and whole pieces cross the link.

An engine's block is many small fragments, one in each layer, and copies reach the link's speed only from some hundred
KiB on. So a transfer is cut into slices that fit a slot, and each slice takes two steps:

    store   kernels   gather fragments into a free slot      |   copies    then slot to host blocks
    load    copies    host blocks into a free slot           |   kernels   then scatter to fragments

While one slot crosses the link the next is gathered, so the link is always busy. Stores and loads have a ring and
streams of their own, and may be submitted by a thread each. Blocks that are large in every part cross without a slot.

Device blocks are touched only after all work that compute had when the copy was submitted: what writes a stored
block, and what reads or zeroes a loaded one (rule 11). `submit` waits until a slice may go (ring.py), and a store for
loads (loads_first.py).
"""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import sub

import torch

from cpu_prefix_cache.copier import triton_staging
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding, BoundGroup
from cpu_prefix_cache.copier.events import AllOf, Event, ReadsOf, Stored
from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.copier.loads_first import PATIENCE_SECONDS, LoadsFirst
from cpu_prefix_cache.copier.paths import SLOT_IDS, Direct, Misfits, ThroughRing, past_ring, round_up, without_ring
from cpu_prefix_cache.copier.ring import RING_BYTES, SLOT_ALIGNMENT, SLOTS, Ring
from cpu_prefix_cache.copier.sections import in_sections, numbers_of, together
from cpu_prefix_cache.copier.streams import LinkStreams, Streams, streams_for
from cpu_prefix_cache.copier.triton_staging import Tiling
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.ending import end_outside_of
from cpu_prefix_cache.memory.moves import SEAM_BYTES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

DIRECT_BYTES = 128 * 1024  # from here on direct copies are as fast as the ring's, and wait for no kernel (one H200)


Paths = Sequence[tuple[Direct | ThroughRing, GroupCopy]]  # copies, each with its path


class StagedCopier(Copier):
    """Copies what `binding` binds through two staging rings of `ring_bytes` bytes of device memory together. CPU
    tensors, which need Triton's interpreter, are for tests.

    The host region is contiguous; for tensors on a CUDA or HIP device it is pinned, or begins `pinned`, which is pinned
    later. Blocks of `direct_bytes` bytes or more in every part cross directly. With `loads_first` stores pause for
    loads (loads_first.py). `streams` and `seam_bytes` are for tests.

    Raises ConfigurationError when the rings are too small for the largest part, or Triton does not fit the device.
    """

    knows_pieces = True

    def __init__(
        self,
        binding: Binding,
        *,
        pinned: HostArena | None = None,
        ring_bytes: int = RING_BYTES,
        direct_bytes: int = DIRECT_BYTES,
        streams: Streams | None = None,
        seam_bytes: int = SEAM_BYTES,
        loads_first: bool = False,
    ) -> None:
        self._binding, host, device = binding, binding.host, binding.device
        _check_machine(device, host, pinned)
        self._working: Callable[[], AbstractContextManager[None]]  # lets any thread work on the device
        self._streams = streams_for(device, SLOTS) if streams is None else streams
        driver = self._streams.driver
        self._working = nullcontext if driver is None else partial(driver.working_in, device.index)
        self._loads_first = LoadsFirst(PATIENCE_SECONDS if loads_first else 0.0)
        self._region = region = HostRegion(host, driver, pinned, seam_bytes)
        groups = binding.groups
        direct = [without_ring(group, direct_bytes) for group in groups]
        staged = [group for group, whole in zip(groups, direct, strict=True) if whole is None]
        num_slots, slot_bytes = _slots(staged, ring_bytes // 2)
        num_ids = max(SLOT_IDS, *(group.piece.device_blocks for group in groups))
        stores, loads, sizes = self._streams.stores, self._streams.loads, (num_slots, slot_bytes, num_ids)
        with self._working():
            self._rings = {
                Direction.STORE: Ring(Direction.STORE, stores, *sizes, device, driver, self._loads_first.pause),
                Direction.LOAD: Ring(Direction.LOAD, loads, *sizes, device, driver, lambda: None),
            }
            self.here().until_passed()  # earlier owners may still use the memory of the rings
        # kernels may still use the memory of a copier that is dropped; none is reused when the process ends
        end = partial(_synchronize, self._working, stores, loads)
        weakref.finalize(self, end_outside_of, (), os.getpid(), end).atexit = False
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # kernels are compiled for it
            through = partial(ThroughRing, region=region, slot_bytes=slot_bytes, tiling=tiling_on(device))
            self._paths = [
                through(group) if whole is None else Direct(whole, region)
                for group, whole in zip(groups, direct, strict=True)
            ]
            cut = list(map(in_sections, groups))
            self._sections = [
                _by_section(sections, path, through, partial(without_ring, direct_bytes=direct_bytes), region)
                for sections, path in zip(cut, self._paths, strict=True)
            ]
        self._section_of = [
            [min(at, len(paths) - 1) for at in numbers_of(sections)]
            for sections, paths in zip(cut, self._sections, strict=True)
        ]
        names = [group.piece.group.name for group in direct if group is not None]
        self.paths = f"directly: {', '.join(names) or 'no group'}; through the ring: {len(staged)} groups"

    def here(self) -> Event:
        return self._streams.compute().record()

    def awaiting_stores(self) -> AbstractContextManager[None]:
        return self._loads_first.awaiting()

    def num_pieces(self, direction: Direction, copy: GroupCopy) -> int:
        return self._binding.num_pieces(direction, copy)

    def sections(self, group: int) -> Sequence[int]:
        return self._section_of[group]

    def part_pieces(self, copy: GroupCopy) -> int:
        return self._paths[copy.group].slice_pieces

    def behind(self, after: Event, stores: Sequence[Event]) -> Event:
        return AllOf([after, *map(ReadsOf, stores)])

    def hold_compute(self, event: Event) -> None:
        with self._working():  # the default stream is that of the device that the thread works with
            self._streams.compute().wait(event.event if isinstance(event, Stored) else event)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        return self._submit(direction, copies, after)

    def submit_part(self, direction: Direction, copy: GroupCopy, after: Event) -> Event:
        return self._submit(direction, [copy], after, is_part=True)

    def submit_sections(self, copies: Sequence[GroupCopy], after: Event, submitted: Callable[[Event], object]) -> None:
        self._binding.check(Direction.LOAD, copies)
        ring = self._rings[Direction.LOAD]
        filled = [copy for copy in copies if copy.host_blocks]
        count = max((len(self._sections[copy.group]) for copy in filled), default=1)
        num_bytes = sum(len(copy.host_blocks) for copy in filled) * self._region.block_bytes
        with self._submitting(ring.streams, self._loads_first.loading()):
            for run in together(count, num_bytes):
                paths = [(path, copy) for copy in filled for path in self._sections[copy.group][run.start : run.stop]]
                self._copy(Direction.LOAD, paths, after, run.start > 0, [])
                end = ring.streams.record()
                for _ in run:
                    submitted(end)

    @contextmanager
    def _submitting(self, streams: LinkStreams, beside: AbstractContextManager[None]) -> Iterator[None]:
        try:
            with self._working(), beside, torch.inference_mode():  # memory may have been made in it
                yield
        except BaseException:  # after this every slot is free again, and nothing of the transfer can touch a block
            _synchronize(self._working, streams)
            raise

    def _submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event, is_part: bool = False) -> Event:
        self._binding.check(direction, copies)
        ring = self._rings[direction]
        loading = self._loads_first.loading() if direction is Direction.LOAD else nullcontext()
        paths = [(self._paths[copy.group], copy) for copy in copies if copy.host_blocks]
        coded = list[Misfits]()  # kernels write to their flags: nothing but an end may drop them
        with self._submitting(ring.streams, loading):
            self._copy(direction, paths, after, is_part, coded)
            event = ring.streams.record()
        if direction is Direction.LOAD:
            return event
        *kernels, _ = event.events
        are_gathered = all(isinstance(self._paths[copy.group], ThroughRing) for copy in copies)
        reads = AllOf(kernels) if are_gathered else event
        return Stored(event, reads, lambda: [b for unfit in coded for b in unfit()])

    def _copy(self, direction: Direction, paths: Paths, after: Event, is_part: bool, coded: list[Misfits]) -> None:
        """Copies that need no slot come first: the link is busy with them while kernels wait for a multiprocessor."""
        ring = self._rings[direction]
        direct = [(path, copy) for path, copy in paths if isinstance(path, Direct)]
        past_ring(direction, direct, ring, self._region, after, is_part)
        for path, copy in paths:
            unfit = path.submit(direction, copy, ring, after, is_part) if isinstance(path, ThroughRing) else None
            if unfit is not None:
                coded.append(unfit)


def _by_section(
    sections: Sequence[BoundGroup],
    whole: Direct | ThroughRing,
    through: Callable[[BoundGroup], ThroughRing],
    without: Callable[[BoundGroup], BoundGroup | None],
    region: HostRegion,
) -> Sequence[Direct | ThroughRing]:
    """The paths of a group's sections: of the kind that the whole group takes, else that one alone."""
    if len(sections) == 1:
        return [whole]
    if isinstance(whole, ThroughRing):
        return list(map(through, sections))
    direct = [group for group in map(without, sections) if group is not None]
    return [Direct(group, region) for group in direct] if len(direct) == len(sections) else [whole]


def _synchronize(working: Callable[[], AbstractContextManager[None]], *pairs: LinkStreams) -> None:
    with working():
        for pair in pairs:
            pair.synchronize()


def _check_machine(device: torch.device, host: torch.Tensor, pinned: HostArena | None) -> None:
    if host.device.type != "cpu" or not host.is_contiguous():
        raise ConfigurationError("the host region must be one contiguous tensor in host memory")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"staged copies are for CUDA and HIP devices, got {device}; the reference copier takes any"
        )
    if device.type == "cuda" and pinned is None and not host.is_pinned():
        raise ConfigurationError("the host region is not pinned; make it with HostArena(..., pinned_for=device)")
    if (device.type == "cpu") != triton_staging.INTERPRETED:
        raise ConfigurationError(
            "staged copies of CPU tensors need TRITON_INTERPRET=1 before the kernels are imported "
            "(or take the reference copier), and those of tensors on a CUDA or HIP device need it unset"
        )


def tiling_on(device: torch.device) -> Tiling:
    """By the size of the waves there: 32 on CUDA devices, 64 on most of AMD's."""
    if device.type == "cpu":
        return triton_staging.TILING
    return triton_staging.tiling_for(torch.cuda.get_device_properties(device).warp_size)


def _slots(groups: Sequence[BoundGroup], ring_bytes: int) -> tuple[int, int]:
    """How many slots a ring has, and of how many bytes: a share of it, or what the largest part of a piece needs."""
    sizes = chain.from_iterable(map(sub, group.offsets[1:], group.offsets) for group in groups)
    largest = max(sizes, default=0)
    if not largest:
        return 0, 0
    needed = round_up(largest, SLOT_ALIGNMENT)
    if ring_bytes < 2 * needed:
        raise ConfigurationError(
            f"staging rings of {2 * ring_bytes} bytes together are too small for a part of {largest} bytes; "
            f"ring_bytes={4 * needed} works"
        )
    slot_bytes = max(needed, ring_bytes // SLOTS // SLOT_ALIGNMENT * SLOT_ALIGNMENT)
    return ring_bytes // slot_bytes, slot_bytes
