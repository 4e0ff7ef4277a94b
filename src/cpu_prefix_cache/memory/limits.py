"""Memory that a host region may take, by the limits of the system and the control groups.

A control group limits all that is below it, so every group from this process's own up to the root counts, of both
versions of cgroup. Files that were read and not used lately do not count as used: the kernel takes their pages back
before it refuses any (Kubernetes calls the rest the working set). Otherwise a process that has just read 140 GB of
weights could have no region. Nothing of a tmpfs, such as /dev/shm, is among them. What other regions have claimed and
not taken yet counts as used (`claims.py`).
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.memory.claims import Claim, most, not_taken, promises
from cpu_prefix_cache.messages.errors import ConfigurationError

# Left to others on the machine: where memory runs out the kernel kills processes.
RESERVED_BYTES = 256 * 1024 * 1024
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")

_Given = tuple[int, tuple[str, ...]]  # bytes that a process has been promised, and the control groups that limit it


class _Files(NamedTuple):
    """The files of a group's limit and use, and the line of `memory.stat` for reclaimable files, by version."""

    limit: str
    used: str
    reclaimable: str


VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def check_fits(num_bytes: int, *, taken_here: bool = True) -> None:
    """Raise ConfigurationError, with a size that fits, when `num_bytes` bytes are more than this process may use, or
    others of this machine that take the pages.
    """
    given = promises()
    if num_bytes <= _usable(given, most, taken_here):
        return  # whatever of it has been taken
    usable = _usable(given, not_taken, taken_here)
    if num_bytes > usable:
        raise ConfigurationError(
            f"{num_bytes / 1e9:.2f} GB of host memory were asked for, but this process may use {usable / 1e9:.2f} GB; "
            f"ask for at most {usable} bytes"
        )


def usable_bytes() -> int:
    """The bytes that the system has available and every control group still allows, less a reserve and what others have
    been promised.
    """
    return _usable(promises(), not_taken)


def groups() -> list[str]:
    """The control groups of this process, by their numbers in the kernel, which containers see, too."""
    return [number for folder, _ in _groups() if (number := _number_of(folder)) is not None]


def _usable(promised: Sequence[list[Claim]], size: Callable[[list[Claim]], int], taken_here: bool = True) -> int:
    """Pages count for the control groups of the process that takes them."""
    given = [(size(each), each[0].groups) for each in promised]
    left = [_available_bytes() - sum(num_bytes for num_bytes, _ in given)]
    if taken_here:
        left += _allowed_bytes(given)
    return max(0, min(left) - RESERVED_BYTES)


def _available_bytes() -> int:
    if sys.platform != "linux":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError(f"{MEMINFO} does not say how much memory is available")


def _allowed_bytes(given: Sequence[_Given]) -> Iterator[int]:
    """Bytes that each control group of this process still allows."""
    for folder, files in _groups():
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            own = _number_of(folder)
            others = sum(num_bytes for num_bytes, groups in given if own in groups)
            yield limit - others - max(0, used - (_number(folder / "memory.stat", files.reclaimable) or 0))


def _groups() -> Iterator[tuple[Path, _Files]]:
    """The groups of this process, one in each hierarchy, and those above. Some may not exist: a container may see its
    own group at the root, under the name that it has outside."""
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUP / "memory", VERSION_1) if controllers else (CGROUP, VERSION_2)
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and ".." not in folder.parts:
                yield folder, files


def _number_of(group: Path) -> str | None:
    try:
        status = group.stat()
    except OSError:
        return None
    return f"{status.st_dev}:{status.st_ino}"


def _number(file: Path, name: str = "") -> int | None:
    """The number in a control file, or in its line `name`; None if there is none, or it is "max"."""
    lines = file.read_text().splitlines() if file.exists() else []
    value = {before: text for before, _, text in (line.rpartition(" ") for line in lines)}.get(name, "")
    return int(value) if value.isdigit() else None
