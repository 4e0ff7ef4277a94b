"""The staging ring: slots of device memory that slices of a transfer pass through, one after another.

    free   --take-->   in use: filled by one queue, then emptied by the other   --emptied-->   free

Nobody waits for a slot on the host. It is handed out in rotation, filled behind the mark that says it was emptied, and
emptied behind the mark that says it was filled. But the host does not run further ahead of the device than RUN_AHEAD
slices: streams share the few queues of the hardware, and what waits at the head of one holds up all behind it.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from cpu_prefix_cache.copier.board import Board
from cpu_prefix_cache.copier.queues import Lane, Mark, Queue
from cpu_prefix_cache.plan import Direction

SLOT_ALIGNMENT = 512  # bytes; what the device's own allocator gives
RUN_AHEAD = 8  # slices of one direction: 240 MiB, 5 ms of the link; as long as Python may keep a thread waiting


Step = tuple[Queue, Callable[[int], object]]


class Slot:
    """`memory` is uint8 [bytes], from `address` on; `free` is passed when the last slice has left it."""

    def __init__(self, memory: torch.Tensor, free: Mark) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.free = free


class Ring:
    """`num_slots` slots of `slot_bytes` bytes for one direction, the lane whose queues fill and empty them, and the
    board for the ids of what passes through. They are 512 bytes more than that, and may be used once `free` is passed.
    """

    def __init__(
        self,
        direction: Direction,
        lane: Lane,
        board: Board,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
        free: Mark,
    ) -> None:
        self.lane = lane
        self.board = board
        self.slot_bytes = slot_bytes
        self._direction = direction
        memory = torch.empty(num_slots * slot_bytes + SLOT_ALIGNMENT, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % SLOT_ALIGNMENT :]
        self._slots = [Slot(memory[at * slot_bytes : (at + 1) * slot_bytes], free) for at in range(num_slots)]
        self._next = 0
        self._ahead: deque[Mark] = deque()

    @property
    def next_slot(self) -> Slot:
        """The one that the next slice passes through: that used longest ago."""
        return self._slots[self._next]

    def through(self, kernel: Callable[[torch.Tensor, int], object], link: Callable[[int], object]) -> None:
        """Have a slice pass through the next slot: a store is kernel, then link, and a load the other way round.

        `kernel` is told the slot's memory. The slot need not be free yet.
        """
        slot = self.next_slot
        self._next = (self._next + 1) % len(self._slots)
        steps: list[Step] = [(self.lane.kernels, partial(kernel, slot.memory)), (self.lane.copies, link)]
        if self._direction is Direction.LOAD:
            steps.reverse()
        (first, fill), (then, empty) = steps
        first.wait(slot.free)
        first.submit(fill)
        then.wait(first.mark())
        then.submit(empty)
        slot.free = then.mark()
        self._note(slot.free)

    def past(self, link: Callable[[int], object]) -> None:
        """Have a slice cross without a slot."""
        self.lane.copies.submit(link)
        self._note(self.lane.copies.mark())

    def _note(self, mark: Mark) -> None:
        self._ahead.append(mark)
        if len(self._ahead) > RUN_AHEAD:
            self._ahead.popleft().until_passed()
