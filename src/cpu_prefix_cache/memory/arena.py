"""The host region: one mapping of equal blocks, checked against what the machine may use before it is made."""

import contextlib
import mmap
from pathlib import Path

import torch

from cpu_prefix_cache.errors import ConfigurationError

# Left to everybody else on the machine when the region is sized: one mistake here ends in the kernel killing us.
RESERVED_BYTES = 256 * 1024 * 1024
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


class HostArena:
    """`num_blocks` blocks of `block_bytes` bytes, as a uint8 tensor `blocks` of shape [num_blocks, block_bytes].

    Pages are taken from the system when they are first written. Huge pages are asked for, and not insisted on.

    Raises ConfigurationError, with the number that fits, when the region is more than this process may use.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        num_bytes = num_blocks * block_bytes
        check_fits(num_bytes)
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
            region.madvise(mmap.MADV_HUGEPAGE)
        self.blocks = torch.frombuffer(region, dtype=torch.uint8).view(num_blocks, block_bytes)


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
