"""Shared by all benchmarks: percentiles, a header with the machine and the versions, and a keeper."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path


def environment(packages: Sequence[str]) -> list[str]:
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return [
        f"machine: {_processor()}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}",
        f"versions: Python {platform.python_version()}, {versions}; commit {_commit()}",
    ]


def print_environment(packages: Sequence[str]) -> None:
    print("\n".join(environment(packages)))
    if os.getloadavg()[0] > 0.5:
        print("note: the machine is not idle; compare ratios, not times", file=sys.stderr)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def keeper(path: str, host_bytes: int, stderr: int | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of a keeper that listens at `path`. It is killed at the end."""
    command = ["cpu_prefix_cache.tools.cli", "keep", f"--socket={path}", f"--host-bytes={host_bytes}"]
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=stderr)
    try:
        if not process.stdout or not process.stdout.readline():
            raise SystemExit(f"the keeper has ended with status {process.wait()}")
        yield process
    finally:
        process.kill()
        process.wait()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    if shutil.which("git") is None:
        return "unknown"
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
