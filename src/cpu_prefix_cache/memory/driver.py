"""Interface of the driver of an accelerator for copies, and the driver that is here: CUDA's (cuda.py) or HIP's
(hip.py).

Both are the few calls that torch does not bind, through ctypes. A ROCm build of torch calls AMD's devices "cuda" too;
`torch.version` has their vendor.

Calls of microseconds keep Python's lock: a thread that releases it beside a busy engine has it back after milliseconds
(`sys.getswitchinterval`), and a slice of a copy makes a dozen calls. Calls that may take long, to pin memory or to copy
what is not pinned, release it.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

import torch

from cpu_prefix_cache.messages.errors import ConfigurationError

NOT_SUPPORTED = 801  # the number that both vendors give to "not supported"


class DriverError(RuntimeError):
    """The driver refused a call, for the reason that `code` is its number of."""

    def __init__(self, call: str, code: int, vendor: str = "the driver") -> None:
        super().__init__(f"{vendor} would not {call}: error {code}")
        self.code = code


class Driver(Protocol):
    """A thread that calls it must be `working_in` a device. Every call raises DriverError when it is refused."""

    name: str  # "CUDA" or "HIP"

    @property
    def has_batches(self) -> bool:
        """Whether `copy_batch` is there."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory."""

    def unregister(self, address: int) -> None:
        """Unpin what was pinned from `address` on. No copy of it may be in flight."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int, pinned: bool = False) -> None:
        """Have `stream` copy between device and host memory. If that is `pinned`, the call returns at once and keeps
        Python's lock; else it may block, and releases it."""

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Have `stream` carry out `count` copies of pinned memory. The first three are addresses of arrays of int64."""

    def wait(self, stream: int, event: int) -> None:
        """Have `stream` wait for `event`: torch's call of this releases Python's lock."""

    def working_in(self, device: int | None) -> AbstractContextManager[None]:
        """This thread works with a device as torch does; None: with the one that it works with already.

        Its calls do not disturb graphs that other threads capture. Otherwise even to query an event would end every
        capture of the process.
        """

    def pci_address(self, device: int) -> str:
        """Such as "0000:1b:00.0"."""


def check(vendor: str, call: str, code: int) -> None:
    if code:
        raise DriverError(call, code, vendor)


@cache
def accelerator_driver() -> Driver:
    """The driver of the devices that torch calls cuda. Raises ConfigurationError where it is missing, and where torch
    was built for neither CUDA nor HIP."""
    if torch.version.hip is not None:
        from cpu_prefix_cache.memory.hip import hip_driver  # here, because it imports the above

        return hip_driver()
    if torch.version.cuda is not None:
        from cpu_prefix_cache.memory.cuda import cuda_driver

        return cuda_driver()
    raise ConfigurationError(
        f"tensors on a device that torch calls cuda are copied by the driver of CUDA or HIP, and torch "
        f"{torch.__version__} was built for neither; install a build for CUDA or ROCm, or keep the tensors on the CPU"
    )
