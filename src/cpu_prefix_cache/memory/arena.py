"""The host region of one rank: one mapping of equal blocks, whose pages are taken and pinned while the engine works.

made       addresses, checked against what the machine may use; threads take pages, the driver knows nothing
register   from the engine's first step on: pinned from the first block up; `ready_blocks` grows
close      unpinned, and unmapped when its last tensor is gone
"""

import mmap
import weakref
from functools import partial

import torch

from cpu_prefix_cache.memory import claims, mapping
from cpu_prefix_cache.memory.driver import Driver, accelerator_driver
from cpu_prefix_cache.memory.moves import SEAM_BYTES
from cpu_prefix_cache.memory.pages import Pages, processors_near, processors_of_nodes
from cpu_prefix_cache.memory.registration import Registration
from cpu_prefix_cache.messages.errors import ConfigurationError


class HostArena:
    """`num_blocks` blocks of `block_bytes` bytes, as a uint8 tensor `blocks` of shape [num_blocks, block_bytes].

    `pinned_for` is the device whose tensors are copied to and from it. For a CUDA or HIP device it is pinned; for any
    other, and for None, it is ready at once and takes pages when they are first written. `region` is one that several
    processes map (`memory/mapping.py`); without, it is made here, and this process's own. A copier that is given the
    arena as `pinned` keeps it alive. Other copies must not cross a multiple of 16 MiB of a pinned region
    (`memory/moves.py`).

    Raises ConfigurationError when the region is larger than this process may use, with a size that fits, and when it is
    to be pinned where there is no such device. `driver` and `slice_bytes` are for tests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        pinned_for: torch.device | None = None,
        region: mmap.mmap | None = None,
        driver: Driver | None = None,
        slice_bytes: int = SEAM_BYTES,
    ) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigurationError(f"a host region has blocks of some bytes, got {num_blocks} of {block_bytes} bytes")
        if pinned_for is not None and pinned_for.type != "cuda":
            pinned_for = None
        if pinned_for is not None and driver is None:
            driver = _driver_for(pinned_for)  # first, because it may raise
        num_bytes, is_shared = num_blocks * block_bytes, region is not None
        if region is None:
            region = mapping.private(num_bytes, taken_ahead=pinned_for is not None)
        memory = torch.frombuffer(region, dtype=torch.uint8)
        self.blocks = memory.view(num_blocks, block_bytes)
        self.registration: Registration | None = None
        if pinned_for is not None and driver is not None:
            device = torch.cuda.current_device() if pinned_for.index is None else pinned_for.index
            near = processors_of_nodes() if is_shared else [processors_near(driver.pci_address(device))]
            pages = Pages(memory, near, slice_bytes, partial(claims.count, region))
            self.registration = Registration(memory, pages, driver, device, slice_bytes)
            self._closing = weakref.finalize(self, self.registration.close)  # at the end of the process at the latest

    @property
    def pinned_bytes(self) -> int:
        """How many bytes of the region, from its first on, are pinned by now."""
        return 0 if self.registration is None else self.registration.num_bytes

    @property
    def ready_blocks(self) -> int:
        """How many blocks, from the first, may be copied to and from by now."""
        if self.registration is None:
            return self.blocks.shape[0]
        return self.registration.ready_bytes // self.blocks.shape[1]

    def register(self) -> None:
        """Begin to pin the region, in a thread. A second call does nothing."""
        if self.registration is not None:
            self.registration.start()

    def wait_until_ready(self, seconds: float | None = None) -> bool:
        """Pin the region, and return when no more blocks become ready, or after `seconds`. Whether no more do."""
        self.register()
        return self.registration is None or self.registration.wait(seconds)

    def close(self) -> None:
        """Unpin the memory, and give it back when its last tensor is gone. No copy may be in flight."""
        if self.registration is not None:
            self._closing()
        self.registration = None
        self.blocks = torch.empty(0, self.blocks.shape[1], dtype=torch.uint8, device="cpu")


def _driver_for(device: torch.device) -> Driver:
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"host memory is pinned for a CUDA or HIP device, and there is no {device} here; leave out pinned_for"
        )
    torch.cuda.init()
    return accelerator_driver()
