"""The staging ring: slots of device memory that slices of a transfer pass through, one after another.

    free   --through-->   in use: filled by one stream, then emptied by the other   --emptied-->   free

A slot has the ids of its blocks, too, in pinned memory here and in memory there: they are sent ahead of the kernel that
goes by them. When the slot is free that kernel has run, so both may be written again; no slice asks CUDA for memory.

A slot is handed out in rotation, and emptied behind the event that says it was filled. The host waits until it is free
before it asks for it to be filled, and never leaves that to a stream: streams share the few queues of the hardware, and
a wait for what is far off holds up whatever comes behind it, the other direction, or the engine. (Both ways at once
75 GB/s, or 95, by chance; with the host waiting always 95 to 99. One H200.)

The engine that copies to the host goes on with a stream as long as there is something in it: a few bytes of somebody
else, such as the tokens a step has sampled, then wait for all of a store (57 ms for 3 GB). So every BREATH slices a
store lets that stream run empty, for a moment.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from cpu_prefix_cache.copier.streams import Event, Passed, StreamPair
from cpu_prefix_cache.memory.driver import cuda_driver
from cpu_prefix_cache.messages.plan import Direction

SLOT_ALIGNMENT = 512  # bytes; what the device's own allocator gives
BREATH = 4  # slices: 2.3 ms that others wait at most
RING_BYTES = 124 * 1024 * 1024  # both rings; with ids, and what torch rounds up, they take less than 128 MiB
SLOTS = 2  # of each ring: 30 MiB cross in 0.6 ms, and are filled or emptied in a tenth of that
DIRECT_AHEAD = 4  # slices that cross without a slot: how far the host is ahead of them


class Slot:
    """`memory` is uint8 [bytes], from `address` on, and `ids` int64 [ids] beside it. `filled` is passed when the last
    slice has come, `free` when it has left."""

    def __init__(self, memory: torch.Tensor, num_ids: int, filled: Event, free: Event) -> None:
        self.memory, self.address = memory, memory.data_ptr()
        self.filled, self.free = filled, free
        is_on_cuda = memory.device.type == "cuda"
        self.ids = torch.empty(num_ids, dtype=torch.int64, device=memory.device)
        self._ids_here = torch.empty(num_ids, dtype=torch.int64, pin_memory=is_on_cuda)
        self._driver = cuda_driver() if is_on_cuda else None

    def write_ids(self, ids: Sequence[int]) -> None:
        """Once the slot is free. Through an array: torch itself takes eight times as long, 0.5 ms for 4,096."""
        self._ids_here[: len(ids)] = torch.frombuffer(array("q", ids), dtype=torch.int64)

    def send_ids(self, count: int, stream: int) -> None:
        """Have a stream, by its handle, bring so many there."""
        if self._driver is None:
            self.ids[:count] = self._ids_here[:count]
        else:
            num_bytes = count * self.ids.element_size()
            self._driver.copy(self.ids.data_ptr(), self._ids_here.data_ptr(), num_bytes, stream)


class Ring:
    """`num_slots` slots of `slot_bytes` bytes and `num_ids` ids for one direction, and the `streams` that fill and
    empty them. Before each slice `pause` is called.
    """

    def __init__(
        self,
        direction: Direction,
        streams: StreamPair,
        num_slots: int,
        slot_bytes: int,
        num_ids: int,
        device: torch.device,
        pause: Callable[[], object],
    ) -> None:
        self.streams = streams
        self._loads = direction is Direction.LOAD
        self._pause = pause
        self._fill, self._empty = (
            (streams.copies, streams.kernels) if self._loads else (streams.kernels, streams.copies)
        )
        memory = torch.empty(num_slots * slot_bytes + SLOT_ALIGNMENT, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % SLOT_ALIGNMENT :]
        self._slots = deque(
            Slot(memory[at * slot_bytes : (at + 1) * slot_bytes], num_ids, self._fill.record(), self._empty.record())
            for at in range(num_slots)
        )
        self._count = 0
        self._last: Event = Passed()  # of the slices of a store that have crossed or will
        self._crossing: deque[Event] = deque()

    @property
    def next_slot(self) -> Slot:
        """The one that the next slice passes through: that used longest ago."""
        return self._slots[0]

    def through(
        self,
        ids: Sequence[int],
        kernel: Callable[[torch.Tensor, torch.Tensor, int], object],
        link: Callable[[int], object],
    ) -> None:
        """Have a slice pass through the next slot: a store is kernel, then link, and a load the other way round.

        `kernel` is told the slot's memory and the `ids` of the slice's device blocks there.
        """
        self._pause()
        slot = self.next_slot
        slot.free.until_passed()
        self._slots.rotate(-1)
        gather_or_scatter = partial(kernel, slot.memory, slot.ids[: len(ids)])
        if self._loads:  # the link first: it is busy while the host writes the ids
            self._fill.submit(link)
            self._send_ids(slot, ids)
        else:
            self._send_ids(slot, ids)
            self._fill.submit(gather_or_scatter)
        self._fill.record_again(slot.filled)
        self._empty.wait(slot.filled)
        self._breathe()
        self._empty.submit(gather_or_scatter if self._loads else link)
        self._empty.record_again(slot.free)
        self._last = slot.free

    def _send_ids(self, slot: Slot, ids: Sequence[int]) -> None:
        slot.write_ids(ids)
        self.streams.kernels.submit(partial(slot.send_ids, len(ids)))

    def past(self, link: Callable[[int], object]) -> None:
        """Have a slice cross without a slot."""
        self._pause()
        self._breathe()
        self.streams.copies.submit(link)
        self._last = self.streams.copies.record()
        self._crossing.append(self._last)
        if len(self._crossing) > DIRECT_AHEAD:
            self._crossing.popleft().until_passed()

    def _breathe(self) -> None:
        """Of a store: before one slice in BREATH crosses, wait until the last one has."""
        self._count += 1
        if not self._loads and self._count % BREATH == 0:
            self._last.until_passed()
