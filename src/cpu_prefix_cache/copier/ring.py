"""The staging ring: slots of device memory that the slices of a transfer pass through in rotation.

    free   --through-->   in use: filled by one stream, then emptied by the other   --emptied-->   free

A slot also has the ids of its blocks, in pinned host memory and in device memory. They are copied ahead of the kernel
that reads them, which has run when the slot is free. So no slice allocates memory.

A slice that needs no slot goes past the ring. Little is under way at a time, in SLOTS slots or PAST_BYTES past them:
the engine that copies to the host serves a stream until it is empty, so what others copy, as the tokens of a step,
waits for all that a store has submitted. The host waits until a slice may go. No stream does: streams share the few
queues of the hardware, and one that waits for a distant event holds up others (docs/copy_paths.md).
"""

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.streams import LinkStreams, Stream
from cpu_prefix_cache.memory.driver import Driver
from cpu_prefix_cache.messages.plan import Direction

RING_BYTES = 124 * 1024 * 1024  # of both rings; less than 128 MiB with ids, and with what torch rounds up
SLOTS = 2  # of each ring: 31 MiB cross in 0.6 ms, and are filled or emptied in a tenth of that
SLOT_ALIGNMENT = 512  # bytes, as of torch's allocator
PAST_BYTES = 64 * 1024 * 1024  # as in two slots: they cross in 1.2 ms, and more do not cross faster


class Slot:
    """`memory` is uint8 [bytes] on the device, from `address` on, and `ids` int64 [ids]. Kernels that work on it run in
    the stream `kernels`. `filled` is passed when the last slice has come, `free` when it has left."""

    def __init__(
        self, memory: torch.Tensor, num_ids: int, kernels: Stream, filled: Event, free: Event, driver: Driver | None
    ) -> None:
        self.memory, self.address = memory, memory.data_ptr()
        self.kernels, self.filled, self.free = kernels, filled, free
        self.ids = torch.empty(num_ids, dtype=torch.int64, device=memory.device)
        self._is_pinned = memory.device.type == "cuda"
        self._host_ids = torch.empty(num_ids, dtype=torch.int64, device="cpu", pin_memory=self._is_pinned)
        self._driver = driver

    def send_ids(self, ids: Sequence[int]) -> None:
        """Have the kernels' stream copy ids to the device. Only if the slot is free."""
        # through an array, because torch takes eight times as long: 0.5 ms for 4,096
        self._host_ids[: len(ids)] = torch.frombuffer(array("q", ids), dtype=torch.int64)
        self.kernels.submit(partial(self._copy_ids, len(ids)))

    def _copy_ids(self, count: int, stream: int) -> None:
        if self._driver is None:
            self.ids[:count] = self._host_ids[:count]
        else:
            to, of, num_bytes = self.ids.data_ptr(), self._host_ids.data_ptr(), count * self.ids.element_size()
            self._driver.copy(to, of, num_bytes, stream, self._is_pinned)


class Ring:
    """`num_slots` slots of `slot_bytes` bytes and `num_ids` ids for one direction, and the `streams` that fill and
    empty them: kernels have one for each slot. `pause` is called before each slice. Without a `driver`, for host
    memory, ids are copied at once."""

    def __init__(
        self,
        direction: Direction,
        streams: LinkStreams,
        num_slots: int,
        slot_bytes: int,
        num_ids: int,
        device: torch.device,
        driver: Driver | None,
        pause: Callable[[], object],
    ) -> None:
        self.streams = streams
        self._loads = direction is Direction.LOAD
        self._pause = pause
        memory = torch.empty(num_slots * slot_bytes + SLOT_ALIGNMENT, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % SLOT_ALIGNMENT :]
        self._slots = deque[Slot]()
        for at, kernels in enumerate(streams.kernels[:num_slots]):
            fill, empty = self._ends(kernels)
            begin = at * slot_bytes
            slot = memory[begin : begin + slot_bytes]
            self._slots.append(Slot(slot, num_ids, kernels, fill.record(), empty.record(), driver))
        self._turn = threading.Lock()
        self._past: deque[tuple[int, Event]] = deque()  # slices that went past: their bytes and their ends

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Entered for each slice, which may have to pause first."""
        self._pause()
        with self._turn:
            yield

    def _ends(self, kernels: Stream) -> tuple[Stream, Stream]:
        """The streams that fill and empty a slot with these kernels."""
        copies = self.streams.copies
        return (copies, kernels) if self._loads else (kernels, copies)

    @property
    def next_slot(self) -> Slot:
        """The slot that the next slice passes through."""
        return self._slots[0]

    def through(
        self,
        ids: Sequence[int],
        kernel: Callable[[torch.Tensor, torch.Tensor, int], object],
        link: Callable[[int], object],
        after: Event,
    ) -> None:
        """Submit a slice through the next slot: of a store `kernel`, then `link`; of a load the other way round.

        `ids` are those of the slice's device blocks. `kernel` runs behind `after`. It is called with the slot's memory,
        the ids on the device and the handle of its stream, `link` with the handle of its stream.
        """
        slot = self.next_slot
        slot.free.until_passed()
        self._slots.rotate(-1)
        fill, empty = self._ends(slot.kernels)
        gather_or_scatter = partial(kernel, slot.memory, slot.ids[: len(ids)])
        if self._loads:  # first, so that the link is busy while the host writes the ids
            fill.submit(link)
        slot.send_ids(ids)
        slot.kernels.wait(after)
        if not self._loads:
            fill.submit(gather_or_scatter)
        fill.record(slot.filled)
        empty.wait(slot.filled)
        empty.submit(gather_or_scatter if self._loads else link)
        empty.record(slot.free)

    def past(self, num_bytes: int, link: Callable[[int], object]) -> None:
        """Submit a slice of so many bytes that needs no slot."""
        while self._past and sum(size for size, _ in self._past) + num_bytes > PAST_BYTES:
            self._past[0][1].until_passed()
            self._past.popleft()
        self.streams.copies.submit(link)
        self._past.append((num_bytes, self.streams.copies.record()))
