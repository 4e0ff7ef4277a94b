"""How much memory a host region may take, by what the system, the control group and /dev/shm say."""

import os
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError

# Left to everybody else on the machine when the region is sized: one mistake here ends in the kernel killing us.
RESERVED_BYTES = 256 * 1024 * 1024
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def check_fits(num_bytes: int, shared: int | None = None) -> None:
    """Raise ConfigurationError, with the number that fits, when `num_bytes` are more than this process may use.

    `shared` is the file descriptor of a shared region, of which nobody has taken anything yet.
    """
    usable = usable_bytes()
    if shared is not None:
        room = os.fstatvfs(shared)
        usable = min(usable, room.f_bavail * room.f_frsize)
    if num_bytes > usable:
        where = "of host memory" if shared is None else "of shared host memory"
        raise ConfigurationError(
            f"{num_bytes / 1e9:.2f} GB {where} were asked for, but this process may use {usable / 1e9:.2f} GB; "
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
