"""The host region: one mapping of equal blocks, checked against what the machine may use before it is made."""

import contextlib
import mmap
from pathlib import Path
from typing import Any

import torch

from cpu_prefix_cache.errors import ConfigurationError

# Left to everybody else on the machine when the region is sized: one mistake here ends in the kernel killing us.
RESERVED_BYTES = 256 * 1024 * 1024
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


class HostArena:
    """`num_blocks` blocks of `block_bytes` bytes, as a uint8 tensor `blocks` of shape [num_blocks, block_bytes].

    Pages are taken from the system when they are first written. Huge pages are asked for, and not insisted on.

    A `pinned` region is registered with CUDA, so that the copy engines reach it at the speed of the link, and stays so
    until `close` or the end of the process. That takes its pages at once, and in one call: 4.2 s for 16 GiB, in which
    no kernel is launched. (Registering in slices, between steps, is an issue of its own.)

    Raises ConfigurationError, with the number that fits, when the region is more than this process may use, and when
    CUDA will not pin it.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, pinned: bool = False) -> None:
        num_bytes = num_blocks * block_bytes
        check_fits(num_bytes)
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
            region.madvise(mmap.MADV_HUGEPAGE)
        self.blocks = torch.frombuffer(region, dtype=torch.uint8).view(num_blocks, block_bytes)
        if pinned:
            _pin(self.blocks)

    def close(self) -> None:
        """Give the pages back to the system, once nothing uses the blocks any more, if CUDA held them."""
        if self.blocks.data_ptr() in _PINNED:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self.blocks.data_ptr()), "unpin the host region")
            del _PINNED[self.blocks.data_ptr()]


# Pinned regions by address. Memory that CUDA still has registered must not be unmapped, whoever forgets its arena.
_PINNED: dict[int, torch.Tensor] = {}


def _pin(blocks: torch.Tensor) -> None:
    if not torch.cuda.is_available():
        raise ConfigurationError("host memory is pinned for a CUDA device, and there is none; ask for pinned=False")
    torch.cuda.init()
    action = f"pin {blocks.numel() / 1e9:.2f} GB of host memory (see `ulimit -l`, or ask for less)"
    _check_cuda(torch.cuda.cudart().cudaHostRegister(blocks.data_ptr(), blocks.numel(), 0), action)
    _PINNED[blocks.data_ptr()] = blocks


def _check_cuda(result: Any, action: str) -> None:
    """`result` is what torch's binding of the CUDA runtime gave back: an enum member, or its number."""
    code = int(getattr(result, "value", result))
    if code:
        raise ConfigurationError(f"CUDA would not {action}: error {code}")


def check_fits(num_bytes: int) -> None:
    """Raise ConfigurationError when `num_bytes` of host memory are more than this process may use."""
    usable = usable_bytes()
    if num_bytes > usable:
        raise ConfigurationError(
            f"{num_bytes / 1e9:.2f} GB of host memory were asked for, but this process may use {usable / 1e9:.2f} GB; "
            f"ask for at most {usable} bytes"
        )


def usable_bytes() -> int:
    """What the system has available and the control group still allows, less a reserve."""
    limits = [_available_bytes()]
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used)
    return max(0, min(limits) - RESERVED_BYTES)


def _available_bytes() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError(f"{MEMINFO} does not say how much memory is available")


def _number(file: Path) -> int | None:
    """The number in a control file; None where there is no such file, or it says "max"."""
    if not file.exists():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
