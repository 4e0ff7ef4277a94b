"""The staging ring: slots of device memory that slices of a transfer pass through, one after another.

    free   --take-->   in use: filled by one queue, then emptied by the other   --emptied-->   free

Nobody waits for a slot on the host. It is handed out in rotation, filled behind the mark that says it was emptied, and
emptied behind the mark that says it was filled.
"""

from collections.abc import Callable

import torch

from cpu_prefix_cache.copier.queues import Lane, Mark
from cpu_prefix_cache.plan import Direction

SLOT_ALIGNMENT = 512  # bytes; what the device's own allocator gives


class Slot:
    """`memory` is uint8 [bytes]; `free` is passed when the last slice has left it."""

    def __init__(self, memory: torch.Tensor, free: Mark) -> None:
        self.memory = memory
        self.free = free


class Ring:
    """`num_slots` slots of `slot_bytes` bytes for one direction, and the lane whose queues fill and empty them.

    The memory may be used once `free` is passed.
    """

    def __init__(
        self, direction: Direction, lane: Lane, num_slots: int, slot_bytes: int, device: torch.device, free: Mark
    ) -> None:
        self.lane = lane
        self.slot_bytes = slot_bytes
        self._direction = direction
        memory = torch.empty(num_slots * slot_bytes + SLOT_ALIGNMENT, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % SLOT_ALIGNMENT :]
        self._slots = [Slot(memory[at * slot_bytes : (at + 1) * slot_bytes], free) for at in range(num_slots)]
        self._next = 0

    def take(self) -> Slot:
        """The slot taken longest ago. It need not be free yet: `through` sees to that."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def through(self, slot: Slot, kernel: Callable[[], object], link: Callable[[], object]) -> None:
        """Have a slice pass through `slot`: a store is kernel, then link, and a load the other way round."""
        steps = [(self.lane.kernels, kernel), (self.lane.copies, link)]
        if self._direction is Direction.LOAD:
            steps.reverse()
        (first, fill), (then, empty) = steps
        first.wait(slot.free)
        first.submit(fill)
        then.wait(first.mark())
        then.submit(empty)
        slot.free = then.mark()
