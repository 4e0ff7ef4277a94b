"""How long a copy thread waits for the GIL beside a thread that computes, for several switch intervals.

    python -m benchmarks.copies.switch_interval

Needs no GPU: the link is simulated by a clock. Each of 140 slices takes 0.57 ms on it and 0.05 ms of Python, and two
are in flight at a time. The other thread counts in a loop; its speed is given as a share of its speed alone.
"""

import sys
import threading
import time

from benchmarks.common import print_environment

SLICES = 140
ON_LINK = 570e-6
IN_PYTHON = 50e-6
NAP = 80e-6


def copy() -> float:
    """Seconds until the last slice has crossed the link."""
    began = time.perf_counter()
    ends: list[float] = [began, began]
    for _ in range(SLICES):
        while time.perf_counter() < ends[-2]:
            time.sleep(NAP)
        busy_until = time.perf_counter() + IN_PYTHON
        while time.perf_counter() < busy_until:
            pass
        ends.append(max(ends[-1], time.perf_counter()) + ON_LINK)
    while time.perf_counter() < ends[-1]:
        time.sleep(NAP)
    return time.perf_counter() - began


def count(stop: threading.Event) -> int:
    rounds, numbers = 0, dict.fromkeys(range(50), 0)
    while not stop.is_set():
        for at in numbers:
            numbers[at] = rounds
        rounds += 1
    return rounds


def beside(seconds: list[float]) -> float:
    """How often the other thread went round in a second, while a copy ran that took `seconds`."""
    stop = threading.Event()

    def run() -> None:
        seconds.append(copy())
        stop.set()

    thread = threading.Thread(target=run)
    thread.start()
    rounds = count(stop)
    thread.join()
    return rounds / seconds[-1]


def alone(seconds: float) -> float:
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    return count(stop) / seconds


def main() -> None:
    print_environment(["torch"])
    print(f"on the link {SLICES * ON_LINK * 1e3:.0f} ms")
    for interval in (5e-3, 1e-3, 5e-4, 2e-4, 1e-4):
        sys.setswitchinterval(interval)
        seconds: list[float] = []
        share = beside(seconds) / alone(seconds[-1])
        copied = f"copied in {seconds[-1] * 1e3:.0f} ms, the other thread at {share:.2f}"
        print(f"interval of {interval * 1e3:.1f} ms: {copied}")


if __name__ == "__main__":
    main()
