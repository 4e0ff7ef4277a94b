"""The block ids of a transfer on their way to the device: pages of pinned memory here, and of device memory there.

    free   --upload-->   in use, until `free` is passed: whoever uploaded says when

With PAGES of them a free one hardly ever has to be waited for. They are made once and grow with the largest transfer,
so that no other transfer asks CUDA for memory.
"""

import torch

from cpu_prefix_cache.copier.queues import Mark, Passed

PAGES = 4
FIRST_IDS = 4096  # 32 KiB: 1 GiB in blocks of 256 KiB


class Page:
    """`free` is passed when nothing on the device reads the ids any more."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.here = torch.empty(num_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there = torch.empty(num_ids, dtype=torch.int64, device=device)
        self.free: Mark = Passed()


class Board:
    """Used by one thread at a time, with one queue as the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages = [Page(FIRST_IDS, device) for _ in range(PAGES)]
        self._next = 0

    def page_for(self, ids: torch.Tensor) -> Page:
        """A page that holds `ids`, int64, here; `there` is for the caller to fill, in the queue's order."""
        page = self._pages[self._next]
        page.free.until_passed()
        if len(page.here) < len(ids):
            page = self._pages[self._next] = Page(2 * len(ids), self._device)
        self._next = (self._next + 1) % PAGES
        page.here[: len(ids)] = ids
        return page
