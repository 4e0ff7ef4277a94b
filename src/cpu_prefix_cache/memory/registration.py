"""Pinning a region while the engine works.

    waiting  --start-->  pinning, slice by slice  ---->  whole
                                              `---->  refused: the rest stays pageable, and is copied more slowly

Kernel launches wait while the driver pins memory. So slices are small and a pause follows each: a launch is at most
1.2 ms late with 16 MiB, and was 8.9 ms late with 64 (one H200). Captures of graphs go on unharmed.
"""

import logging
import os
import threading

import torch

from cpu_prefix_cache.memory.driver import Driver, DriverError
from cpu_prefix_cache.memory.ending import end_outside_of
from cpu_prefix_cache.memory.moves import SEAM_BYTES
from cpu_prefix_cache.memory.pages import Pages

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.0015


class Registration:
    """Pins `region`, uint8 [bytes], from its first byte on, for the device number `device`, and keeps it alive."""

    def __init__(
        self, region: torch.Tensor, pages: Pages, driver: Driver, device: int, slice_bytes: int = SEAM_BYTES
    ) -> None:
        self._region, self._pages, self._slice_bytes = region, pages, slice_bytes
        self._driver, self._device = driver, device
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()
        self.num_bytes = 0  # pinned
        self.ready_bytes = 0  # pinned, or never to be pinned: may be copied to and from

    def start(self) -> None:
        """Begin, in a thread of its own. A second call does nothing."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True, name="pin-host-memory")
            thread.start()
            self._thread = thread

    def wait(self, seconds: float | None = None) -> bool:
        """Return when no more bytes become ready, or after `seconds`. Whether no more do."""
        return self._settled.wait(seconds)

    def close(self) -> None:
        """Unpin everything; in a forked process do nothing. No copy may be in flight.

        Raises DriverError when the driver would not unpin a slice, after all the others.
        """
        own = [] if self._thread is None else [self._thread]
        end_outside_of([*self._pages.threads, *own], self._process, self._end)

    def _end(self) -> None:
        self._stop.set()
        self._pages.close()
        if self._thread is not None:
            self._thread.join()
        pinned, self.num_bytes, self.ready_bytes = self.num_bytes, 0, 0
        if not pinned:
            return
        refused: list[DriverError] = []
        with self._driver.working_in(self._device):
            for first in range(0, pinned, self._slice_bytes):
                try:
                    self._driver.unregister(self._region.data_ptr() + first)
                except DriverError as error:
                    refused.append(error)
        if refused:
            raise refused[0]

    def _run(self) -> None:
        pins = True
        try:
            with self._driver.working_in(self._device):
                for first in range(0, self._region.numel(), self._slice_bytes):
                    if self._stop.is_set() or not self._pages.wait_for(first):
                        break
                    pins = pins and self._pin(first)
                    self.ready_bytes = self._end_of(first)
                    if pins:
                        self.num_bytes = self.ready_bytes
                        self._stop.wait(PAUSE_SECONDS)
        except DriverError:
            logger.exception("the host region is not pinned, and not used")
        finally:
            self._settled.set()

    def _end_of(self, first: int) -> int:
        return min(first + self._slice_bytes, self._region.numel())

    def _pin(self, first: int) -> bool:
        try:
            self._driver.register(self._region.data_ptr() + first, self._end_of(first) - first)
        except DriverError as error:
            logger.warning(
                "%s after %.2f of %.2f GB (see `ulimit -l`). The rest is used as it is: right bytes, slower copies",
                error,
                first / 1e9,
                self._region.numel() / 1e9,
            )
            return False
        return True
