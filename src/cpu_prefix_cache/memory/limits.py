"""How much memory a host region may take, by what the system, the control groups and /dev/shm say.

The system    MemAvailable; where there is no Linux, all the memory the machine has.
Groups        A control group limits all that is below it, so every group from this process's own up to the root counts,
              of both versions of cgroup. Of what a group uses, files that were read and not used again lately do not
              count: the kernel takes their pages back before it refuses any. (A process that has just read 140 GB of
              weights could have no region otherwise. Kubernetes calls the rest the working set.) Nothing of a tmpfs,
              such as /dev/shm, is among them.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError

# Left to everybody else on the machine when the region is sized: one mistake here ends in the kernel killing us.
RESERVED_BYTES = 256 * 1024 * 1024
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class _Files(NamedTuple):
    """What a version of cgroup calls a group's limit, its use, and in `memory.stat` the files that count as free."""

    limit: str
    used: str
    reclaimable: str


VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


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
    """What the system has available and every control group still allows, less a reserve."""
    return max(0, min(_available_bytes(), *_allowed_bytes()) - RESERVED_BYTES)


def _available_bytes() -> int:
    if sys.platform != "linux":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError(f"{MEMINFO} does not say how much memory is available")


def _allowed_bytes() -> Iterator[int]:
    """What each group that this process is in, or below, still allows; at least one number, which may be no limit."""
    yield sys.maxsize
    for folder, files in _groups():
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            yield limit - max(0, used - (_number(folder / "memory.stat", files.reclaimable) or 0))


def _groups() -> Iterator[tuple[Path, _Files]]:
    """From this process's own groups, one in each hierarchy, up to the roots.

    A container may see its group at the root, and be told the name that it has outside: what is not there is no limit.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUP / "memory", VERSION_1) if controllers else (CGROUP, VERSION_2)
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and ".." not in folder.parts:
                yield folder, files


def _number(file: Path, name: str = "") -> int | None:
    """The number in a control file, behind `name` in one of many; None where there is none, or it says "max"."""
    lines = file.read_text().splitlines() if file.exists() else []
    value = {before: text for before, _, text in (line.rpartition(" ") for line in lines)}.get(name, "")
    return int(value) if value.isdigit() else None
