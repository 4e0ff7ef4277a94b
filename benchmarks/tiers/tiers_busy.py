"""Part of tiers.py: the time that a computing engine loses while a tier in its process reads at full rate.

vLLM on a CPU, one thread of two cores, decodes some requests; in its process the threads of a TierCopier read and
verify slots of 2 MiB without a pause (tiers_busy_engine.py). Windows of steps take turns: without reads, with them, and
with the same reads in another process, which shows the part of the machine's memory and processors, as against
Python's lock. Where others use the machine too much, there is no bar, and all rounds are shown.

It checks also whether xxhash lets Python's lock go while it hashes: with a switch interval of an hour nothing else
hands it over, so another thread runs in the middle of a digest only if xxhash does.
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

from benchmarks.tiers.tiers_files import KIB, MIB, verdict
from cpu_prefix_cache.slab.records import checksum

MOST = 1.10  # of a step without reads
HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
MARK = "busy: "
DIGESTS = 100


def busy(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bar: a step takes at most 10 % longer."""
    shares = {size: share_that_let_go(size) for size in (32 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)}
    for size, share in shares.items():
        print(f"xxh3-128 of {size // KIB:>4} KiB: another thread ran meanwhile in {share:.0%} of {DIGESTS} digests")
    result = engine(options, folder)
    is_calm = bool(result["calm"])
    rounds = result["calm"] or result["all"]
    print(
        f"{result['engine']} decodes {result['requests']} requests; in {len(result['calm'])} of {len(result['all'])} "
        f"rounds others used at most a fifth of a core; load {result['load']:.1f}"
    )
    print(f"{'reads':12} {'step ms':>8} {'thread CPU ms':>14} {'GB/s':>6} {'of a step without':>18}")
    for name in rounds[0]:
        of = {field: median(each[name][field] for each in rounds) for field in ("step_ms", "cpu_ms", "gb_per_s")}
        print(f"{name:12} {of['step_ms']:8.2f} {of['cpu_ms']:14.2f} {of['gb_per_s']:6.2f} {ratio(rounds, name):18.3f}")
    if is_calm:
        print(verdict("step with reads by step without", ratio(rounds, "with"), MOST, at_most=True))
    else:
        print("others used this machine all the time: a step waits for them, too, so there is no bar")
    return [{**result, "ratio": ratio(rounds, "with"), "lock_let_go": {str(size): shares[size] for size in shares}}]


def ratio(rounds: list[dict[str, dict[str, float]]], name: str) -> float:
    """Ratio of a step in these windows to one in the window without reads of the same round."""
    return median(each[name]["step_ms"] / each["without"]["step_ms"] for each in rounds)


def engine(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    python, name = (options.vllm_python, "vllm") if options.vllm_python else (sys.executable, "torch")
    if name == "torch":
        print("no environment with vLLM was given (--vllm-python): the same layers, by torch")
    command = [str(python), str(HERE / "tiers_busy_engine.py"), str(folder), name, str(options.runs)]
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
