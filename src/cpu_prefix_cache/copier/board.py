"""The block ids of a transfer on their way to the device: pages of pinned memory here, and of device memory there.

    free   --take-->   in use: sent for the first kernel that needs it; until `free` is passed, as its taker says

With PAGES of them a free one hardly ever has to be waited for. A transfer with more ids than a page takes goes page by
page: no transfer asks CUDA for memory.
"""

from collections.abc import Sequence

import torch

from cpu_prefix_cache.copier.binding import as_tensor
from cpu_prefix_cache.copier.streams import Event, Passed
from cpu_prefix_cache.memory.driver import cuda_driver

PAGES = 4
PAGE_IDS = 8192  # 64 KiB: 2 GiB in blocks of 256 KiB


class Page:
    """int64 [ids] on both sides. `free` is passed when nothing on the device reads it any more."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.free: Event = Passed()
        self._here = torch.empty(num_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = torch.empty(num_ids, dtype=torch.int64, device=device)
        self._driver = cuda_driver() if device.type == "cuda" else None
        self._ids: Sequence[int] = ()  # to be sent

    def write(self, ids: Sequence[int]) -> None:
        """Let the page hold these from its beginning."""
        self._ids = ids

    def on_device(self, stream: int) -> torch.Tensor:
        """The page there, for work that comes later on `stream`, a handle of CUDA's."""
        if self._ids:
            self._send(as_tensor(self._ids), stream)
            self._ids = ()
        return self._there

    def _send(self, ids: torch.Tensor, stream: int) -> None:
        self._here[: len(ids)] = ids
        if self._driver is None:
            self._there[: len(ids)] = self._here[: len(ids)]
        else:
            self._driver.copy(self._there.data_ptr(), self._here.data_ptr(), ids.nbytes, stream)


class Board:
    """Used by one thread at a time. `page_ids` is how many ids a page takes."""

    def __init__(self, device: torch.device, page_ids: int) -> None:
        self.page_ids = page_ids
        self._pages = [Page(page_ids, device) for _ in range(PAGES)]
        self._next = 0

    def take(self, ids: Sequence[int]) -> Page:
        """A page with these ids."""
        page = self._pages[self._next]
        self._next = (self._next + 1) % PAGES
        page.free.until_passed()
        page.write(ids)
        return page
