"""Parts of tiers.py: how fast slots are read and written, beside fio on the same file, and the processor's time."""

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from cpu_prefix_cache.tools.bench.file_rates import FileUnderTest
from cpu_prefix_cache.tools.bench.slot_rates import TimedRun

KIB, MIB = 1 << 10, 1 << 20
SLOT_BYTES = (2 * MIB, 256 * KIB)
JOBS = 8
SHARE_OF_FIO, CPU_MS_PER_GB = 0.9, 150.0

READ, WRITE = "read", "write"
Way = tuple[str, str]  # who, and which of them
T = TypeVar("T")


class Measured(NamedTuple):
    """Measurements of one way: the runs, each in GB/s and in processor ms per GB; of fio the latter is not known."""

    gb_per_s: list[float]
    cpu_ms_per_gb: list[float]


def rates(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bar: of slots of 2 MiB, at least 90 % of fio."""
    if shutil.which("fio") is None:
        print("fio is not installed (apt-get install fio): ours has nothing to be compared with")
    print(f"{'slots':>8} {'':6} {'who':9} {'GB/s':>6} {'slowest':>8} {'fastest':>8} {'of fio':>7}  load")
    rows = []
    for slot_bytes in SLOT_BYTES:
        ways = turns(options, folder, slot_bytes)
        for way, measured in ways.items():
            fio = ways.get(("fio", way[1]))
            rows.append(row(slot_bytes, way, measured, fio))
            print_rate(rows[-1])
    for each in rows:
        if each["who"] == "verified" and each["slot_bytes"] == SLOT_BYTES[0] and each["of_fio"] is not None:
            print(verdict(f"{each['direction']} of 2 MiB, share of fio", each["of_fio"], SHARE_OF_FIO))
    return rows


def cpu(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bar: at most 150 ms of the processor for a verified GB of 2 MiB slots."""
    print(f"{'slots':>8} {'':6} {'who':9} {'ms/GB':>6} {'least':>8} {'most':>8}")
    rows = []
    for slot_bytes in SLOT_BYTES:
        for way, measured in turns(options, folder, slot_bytes, with_fio=False).items():
            rows.append(row(slot_bytes, way, measured, None))
            times = measured.cpu_ms_per_gb
            print(
                f"{slot_bytes // KIB:>4} KiB {way[1]:6} {way[0]:9} {median(times):6.0f} {min(times):8.0f} "
                f"{max(times):8.0f}"
            )
    for each in rows:
        if each["who"] == "verified" and each["slot_bytes"] == SLOT_BYTES[0]:
            print(verdict(f"{each['direction']} of 2 MiB, ms/GB", each["cpu_ms_per_gb"], CPU_MS_PER_GB, at_most=True))
    return rows


def turns(options: argparse.Namespace, folder: Path, slot_bytes: int, *, with_fio: bool = True) -> dict[Way, Measured]:
    """All ways in turn, first the reads and then the writes, and each time another one first: a disk that still
    flushes what was written reads more slowly, which the one before bears, too.
    """
    file = FileUnderTest(str(folder), options.mib * MIB, slot_bytes)
    reads: dict[Way, Callable[[], TimedRun | float]] = {("verified", READ): file.read, ("plain", READ): file.plain_read}
    writes: dict[Way, Callable[[], TimedRun | float]] = {
        ("verified", WRITE): file.write,
        ("plain", WRITE): file.plain_write,
    }
    if with_fio and shutil.which("fio") is not None:
        reads["fio", READ] = lambda: fio(file, READ)
        writes["fio", WRITE] = lambda: fio(file, WRITE)
    found = {way: Measured([], []) for way in (*reads, *writes)}
    try:
        for number in range(options.runs):
            file.write()  # the first one is slow; and fio has left slots without records
            file.plain_read()
            for ways in (reads, writes):
                for way, run in rotated(list(ways.items()), number):
                    note(found[way], run(), file.moved_bytes / 1e9)
    finally:
        file.close()
        file.remove()
    return found


def rotated(items: list[T], by: int) -> list[T]:
    at = by % len(items)
    return items[at:] + items[:at]


def note(measured: Measured, result: TimedRun | float, gb: float) -> None:
    if isinstance(result, float):
        measured.gb_per_s.append(result)
        return
    measured.gb_per_s.append(gb / result.seconds)
    measured.cpu_ms_per_gb.append(1e3 * result.cpu_seconds / gb)


def fio(file: FileUnderTest, direction: str) -> float:
    """GB/s of fio with so many jobs, each of which moves its share of the file, at random places."""
    moved = file.moved_bytes // JOBS // file.slot_bytes * file.slot_bytes
    command = [
        "fio",
        "--name=tiers",
        f"--filename={file.blocks_file}",
        f"--rw=rand{direction}",
        f"--bs={file.slot_bytes}",
        "--ioengine=psync",
        f"--direct={int(file.is_direct)}",
        f"--numjobs={JOBS}",
        f"--size={file.moved_bytes}",
        f"--io_size={moved}",
        "--group_reporting",
        "--randrepeat=0",
        "--output-format=json",
        "--thread",
        "--allow_file_create=0",
        *([] if file.is_direct else ["--invalidate=1", "--end_fsync=1"]),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [job] = json.loads(output[output.index("{") :])["jobs"]
    return float(job[direction]["io_bytes"]) / job[direction]["runtime"] / 1e6


def row(slot_bytes: int, way: Way, measured: Measured, fio: Measured | None) -> dict[str, Any]:
    who, direction = way
    rate = median(measured.gb_per_s)
    return {
        "slot_bytes": slot_bytes,
        "direction": direction,
        "who": who,
        "gb_per_s": rate,
        "all_gb_per_s": measured.gb_per_s,
        "cpu_ms_per_gb": median(measured.cpu_ms_per_gb) if measured.cpu_ms_per_gb else None,
        "of_fio": None if fio is None else rate / median(fio.gb_per_s),
        "load": os.getloadavg()[0],
    }


def print_rate(row: dict[str, Any]) -> None:
    runs: Sequence[float] = row["all_gb_per_s"]
    share = "" if row["of_fio"] is None else f"{row['of_fio']:.0%}"
    print(
        f"{row['slot_bytes'] // KIB:>4} KiB {row['direction']:6} {row['who']:9} {row['gb_per_s']:6.2f} "
        f"{min(runs):8.2f} {max(runs):8.2f} {share:>7}  {row['load']:.1f}"
    )


def verdict(what: str, number: float, bar: float, *, at_most: bool = False) -> str:
    """One line: a number, and whether it meets its bar."""
    met = number <= bar if at_most else number >= bar
    return f"{what}: {number:.4g}, bar {'at most' if at_most else 'at least'} {bar:.4g}: {'met' if met else 'NOT MET'}"
