"""The block ids of a transfer on their way to the device: pages of pinned memory here, and of device memory there.

    free   --take-->   in use, until `free` is passed: whoever took it says when

With PAGES of them a free one hardly ever has to be waited for. A transfer with more ids than a page takes goes page by
page: no transfer asks CUDA for memory.
"""

import torch

from cpu_prefix_cache.copier.queues import Mark, Passed
from cpu_prefix_cache.memory.driver import cuda_driver

PAGES = 4
PAGE_IDS = 4096  # 32 KiB: 1 GiB in blocks of 256 KiB


class Page:
    """int64 [ids] on both sides. `free` is passed when nothing on the device reads it any more."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self._driver = cuda_driver() if device.type == "cuda" else None
        self.here = torch.empty(num_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there = torch.empty(num_ids, dtype=torch.int64, device=device)
        self.free: Mark = Passed()

    def upload(self, ids: torch.Tensor, stream: int) -> None:
        """Bring `ids`, int64 here, to the beginning of the page there. `stream` is a handle of CUDA's."""
        here, there = self.here[: len(ids)], self.there[: len(ids)]
        here.copy_(ids)
        if self._driver is None:
            there.copy_(here)
        else:
            self._driver.copy(there.data_ptr(), here.data_ptr(), ids.nbytes, stream)


class Board:
    """Used by one thread at a time. `page_ids` is how many ids a page takes."""

    def __init__(self, device: torch.device, page_ids: int) -> None:
        self.page_ids = page_ids
        self._pages = [Page(page_ids, device) for _ in range(PAGES)]
        self._next = 0

    def take(self) -> Page:
        """A page that may be written to."""
        page = self._pages[self._next]
        self._next = (self._next + 1) % PAGES
        page.free.until_passed()
        return page
