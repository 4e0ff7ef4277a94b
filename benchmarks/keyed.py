"""Processor time of blocks by keys beside that of requests: lookups with their leases, and puts. No bytes are moved.

    python benchmarks/keyed.py [--keys 8192] [--times 50]

Both caches have the same keys in the same pool. By requests a lookup is `lookup`, `reserve` and `release`, and a chunk
comes to the host as one of a chain that `Eager` stores; by keys they are `lookup` and `release`, and a `put`.
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence

from cpu_prefix_cache.deciding import (
    BlockPool,
    CacheOptions,
    CPUPrefixCache,
    HybridChunkPlanner,
    PooledDevice,
    PrefixGroup,
    RankReport,
    Request,
    StateGroup,
    WindowGroup,
)
from cpu_prefix_cache.keyed.given import given
from cpu_prefix_cache.keyed.key_planner import KeyPlanner
from cpu_prefix_cache.keyed.keyed_cache import KeyedCache

ATTENTION = PrefixGroup(name="attention", block_tokens=16, block_bytes=65536)
WINDOW = WindowGroup(name="window", block_tokens=16, block_bytes=65536, window_tokens=1024)
STATE = StateGroup(name="state", block_tokens=16, block_bytes=65536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--times", type=int, default=50)
    arguments = parser.parse_args()
    count, times = arguments.keys, arguments.times
    by_keys, by_request = keyed([ATTENTION], count, times), requests(count, times)
    hybrid = keyed([ATTENTION, WINDOW, STATE], count, times)
    print(f"| {count} keys | by requests | by keys | by keys, with a window and a state |\n|---|--:|--:|--:|")
    print(f"| lookup, us | {by_request[0]:.0f} | {by_keys[0]:.0f} | {hybrid[0]:.0f} |")
    print(f"| to the host, us a key | {by_request[1]:.2f} | {by_keys[1]:.2f} | {hybrid[1]:.2f} |")


def keyed(groups: Sequence[PrefixGroup | WindowGroup | StateGroup], count: int, times: int) -> tuple[float, float]:
    """Microseconds of a lookup, and of each key of a put with its commit."""
    cache = KeyedCache(KeyPlanner(groups, chunk_tokens=None, in_pages=False), host_blocks=4 * count)
    sides = [list(range(min(count, 64))), [0]][: len(groups) - 1]
    blocks = given(cache.planner, count, [list(range(count)), *sides])

    def put(number: int) -> None:
        cache.put(keys_of(number, count), blocks, float(number))
        done = frozenset(plan.id for plan in cache.step().transfers)
        cache.report(RankReport(0, done=done))

    names = [keys_of(number, count) for number in range(3)]
    spent = microseconds(lambda: [put(number) for number in range(3)])
    return microseconds(lambda: cache.release(cache.lookup(names[0])), times), spent / (3 * count)


def requests(count: int, times: int) -> tuple[float, float]:
    """The same of a CPUPrefixCache."""
    planner = HybridChunkPlanner([ATTENTION], max_model_len=1 << 30)
    device = BlockPool(count)
    cache = CPUPrefixCache(planner, PooledDevice(device), host_blocks=4 * count, options=CacheOptions(offload="eager"))

    def serve(number: int) -> None:
        request = Request(number, keys_of(number, count), 16 * count + 1)
        cache.admit(request, 0, now=float(number))
        device.commit(device.allocate(count), request.keys, device.root, device.touch(None))
        cache.finished(number, request.num_tokens)
        done = frozenset(plan.id for plan in cache.step().transfers)
        cache.report(RankReport(0, done=done))

    spent = microseconds(lambda: [serve(number) for number in range(3)])
    request = Request("again", keys_of(0, count), 16 * count + 1)

    def look_up() -> None:
        cache.lookup(request, 0, 10.0)
        lease = cache.reserve(request, 16 * count)
        if lease is None:
            raise SystemExit("the prompt is not here: this measures nothing")
        cache.release(lease)

    return microseconds(look_up, times), spent / (3 * count)


def keys_of(prompt: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(count)]


def microseconds(call: Callable[[], object], times: int = 1) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times * 1e6


if __name__ == "__main__":
    main()
