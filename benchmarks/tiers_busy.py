"""Part of tiers.py: what an engine that computes loses while a tier in its process reads at full rate.

vLLM on a CPU, one thread, decodes some requests; in its process the threads of a SlabCopier read and verify slots of
2 MiB without a pause (tiers_busy_engine.py). Windows of steps without and with reads take turns.

And whether xxhash lets Python's lock go while it hashes: with a switch interval of an hour nothing else hands it over,
so another thread runs in the middle of a digest only if xxhash does.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from cpu_prefix_cache.slab.records import checksum
from tiers_files import KIB, MIB, verdict

MOST = 1.10  # of a step without reads
HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
MARK = "busy: "
DIGESTS = 100


def busy(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bar: a step takes at most 10 % longer."""
    shares = {size: share_that_let_go(size) for size in (32 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)}
    for size, share in shares.items():
        print(f"xxh3-128 of {size // KIB:>4} KiB: another thread ran meanwhile in {share:.0%} of {DIGESTS} digests")
    if options.vllm_python is None:
        print("no environment with vLLM was given (--vllm-python)")
        return []
    result = engine(options, folder)
    without, with_reads = median(result["without_ms"]), median(result["with_ms"])
    print(
        f"step of vLLM {result['vllm']}, {result['requests']} requests: {without:.2f} ms without, {with_reads:.2f} ms "
        f"with reads at {result['gb_per_s']:.2f} GB/s ({len(result['with_ms'])} steps each); load {result['load']:.1f}"
    )
    pairs = [after / before for before, after in zip(result["windows_without"], result["windows_with"], strict=True)]
    print(f"by pairs of windows: median {median(pairs):.3f}, {min(pairs):.3f} to {max(pairs):.3f}")
    print(
        f"processor time of the engine's thread in a step: {median(result['cpu_without_ms']):.2f} and "
        f"{median(result['cpu_with_ms']):.2f} ms"
    )
    print(verdict("step with reads by step without", with_reads / without, MOST, at_most=True))
    return [{**result, "lock_let_go": {str(size): share for size, share in shares.items()}}]


def engine(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [str(options.vllm_python), str(HERE / "tiers_busy_engine.py"), str(folder), str(options.runs)]
    more = {
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    ran = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    for line in ran.stdout.splitlines():
        if line.startswith(MARK):
            return dict(json.loads(line.removeprefix(MARK)))
    raise SystemExit(f"the engine ended with status {ran.returncode}:\n{ran.stderr[-2000:]}")


def share_that_let_go(size: int) -> float:
    data = os.urandom(size)
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        return sum(ran_meanwhile(data) for _ in range(DIGESTS)) / DIGESTS
    finally:
        sys.setswitchinterval(before)


def ran_meanwhile(data: bytes) -> bool:
    """Whether this thread could run while another one had begun a digest and not ended it."""
    begun, ended = threading.Event(), threading.Event()

    def hash() -> None:
        begun.set()
        checksum(data)
        ended.set()

    thread = threading.Thread(target=hash)
    thread.start()
    begun.wait()
    ran = not ended.is_set()
    while not ended.is_set():
        time.sleep(0)
    thread.join()
    return ran
