"""Pinning a region for CUDA while the engine works, so that nobody waits and nothing breaks.

    waiting  --start-->  pinning, slice by slice  ---->  whole
                                              `---->  refused: the rest stays pageable, and is copied more slowly

While CUDA pins memory it launches no kernel. So a slice is small and a pause follows it: with 64 MiB a launch came up
to 8.9 ms late, with 16 MiB at most 1.2 ms, and 8 GiB took 1.4 s (one H200). Captures of CUDA graphs go on unharmed.
"""

import logging
import threading
from contextlib import nullcontext

import torch

from cpu_prefix_cache.memory.driver import Driver, DriverError, Working
from cpu_prefix_cache.memory.moves import SEAM_BYTES
from cpu_prefix_cache.memory.pages import Pages

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.0015


class Registration:
    """Of `region`, uint8 [bytes], from its first byte on, for the CUDA device of that number.

    It keeps the region, which must not be unmapped before.
    """

    def __init__(
        self, region: torch.Tensor, pages: Pages, driver: Driver, device: int, slice_bytes: int = SEAM_BYTES
    ) -> None:
        self._region, self._pages, self._slice_bytes = region, pages, slice_bytes
        self._driver, self._device = driver, device
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()
        self.num_bytes = 0  # pinned
        self.ready_bytes = 0  # pinned, or never to be

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self._region.numel()

    def start(self) -> None:
        """Begin, in a thread of its own. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="pin-host-memory")
            self._thread.start()

    def wait(self) -> None:
        """Until it is whole, or will not become so."""
        self._settled.wait()

    def close(self) -> None:
        """Unpin everything. Nothing copies to or from the region any more."""
        self._stop.set()
        self._pages.close()
        if self._thread is not None:
            self._thread.join()
        pinned, self.num_bytes, self.ready_bytes = self.num_bytes, 0, 0
        with self._working() if pinned else nullcontext():
            for first in range(0, pinned, self._slice_bytes):
                self._driver.unregister(self._region.data_ptr() + first)

    def _working(self) -> Working:
        return self._driver.working_in(self._driver.primary_context(self._device))

    def _run(self) -> None:
        with self._working():
            for first in range(0, self._region.numel(), self._slice_bytes):
                if self._stop.is_set() or not self._pages.wait_for(first) or not self._pin(first):
                    break
                self._stop.wait(PAUSE_SECONDS)
        self._settled.set()

    def _pin(self, first: int) -> bool:
        last = min(first + self._slice_bytes, self._region.numel())
        try:
            self._driver.register(self._region.data_ptr() + first, last - first)
        except DriverError as error:
            logger.warning(
                "%s after %.2f of %.2f GB (see `ulimit -l`). The rest is used as it is: right bytes, slower copies",
                *(error, first / 1e9, self._region.numel() / 1e9),
            )
            self.ready_bytes = self._region.numel()
            return False
        self.num_bytes = self.ready_bytes = last
        return True
