"""What one call of the deciding half costs, in a pool of a million chunks.

    lookup     8,192 chunk keys, never asked before, all present, none present, or present up to somewhere
    load       plan the load of those chunks
    allocate   512 blocks, evicting as many
    commit     512 blocks

Beside lookup stands the obvious way, a loop over the keys, on the same keys and the same index. The table ends with
the longest single call of 512 blocks: a dictionary that grows, or a garbage collection, stops the caller.

    python benchmarks/deciding_half.py [--blocks 1000000] [--chains 100]
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

from common import percentile, print_environment
from cpu_prefix_cache import BlockPool, CPUPrefixCache, Group, GroupKind, HybridChunkPlanner, RankReport, Request

CHAIN = 8_192
RUN = 512


class CountingDevice:
    """A device whose blocks are only counted: destinations are held and released, nothing else is asked."""

    num_chunks = 1 << 20
    null_block = None

    def find(self, key):
        return None

    def soonest_evicted(self, after):
        return iter(())

    def is_waiting(self, block, key):
        return False

    def hold(self, blocks):
        return blocks

    def release(self, hold):
        pass

    def release_in_place(self, hold, behind):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--chains", type=int, default=100, help="distinct chains to look up and load")
    options = parser.parse_args()
    print_environment(["sortedcontainers"])
    rng = random.Random(0)
    cache = build(options.blocks)
    chains = fill(cache.pool, rng, options.chains)
    print(f"\npool of {options.blocks:,} chunks, {cache.pool.statistics().cached:,} cached\n")
    measure_lookups(cache, rng, chains)
    measure_loads(cache, chains)
    del chains  # a garbage collection during the churn is part of it; going through our own keys is not
    measure_churn(cache.pool, rng, blocks=2 * options.blocks)


def build(blocks: int) -> CPUPrefixCache:
    group = Group(name="attention", kind=GroupKind.PREFIX, block_tokens=16, block_bytes=2**21)
    planner = HybridChunkPlanner([group], max_model_len=1 << 20)
    return CPUPrefixCache(planner, CountingDevice(), host_blocks=blocks, offload="eager")


def fill(pool: BlockPool, rng: random.Random, chains: int) -> list[list[bytes]]:
    """Fill the pool: `chains` long chains, kept, and short ones around them."""
    kept = []
    for _ in range(chains):
        kept.append(insert(pool, rng, CHAIN))
        for _ in range((pool.capacity // chains - CHAIN) // RUN):
            insert(pool, rng, RUN)
    return kept


def insert(pool: BlockPool, rng: random.Random, length: int) -> list[bytes]:
    keys = [rng.randbytes(16) for _ in range(length)]
    pool.commit(pool.allocate(length), keys, pool.root, pool.touch(None))
    return keys


def measure_lookups(cache: CPUPrefixCache, rng: random.Random, chains: list[list[bytes]]) -> None:
    absent = [[rng.randbytes(16) for _ in range(CHAIN)] for _ in chains]
    part = []
    for keys, other in zip(chains, absent, strict=True):
        cut = rng.randrange(1, CHAIN)
        part.append(fresh(keys[:cut]) + other[cut:])
    print(f"lookup of {CHAIN:,} keys, cold        median      p99      worst")
    for name, case in (
        ("all present", [fresh(keys) for keys in chains]),
        ("part present", part),
        ("none present", [fresh(keys) for keys in absent]),
    ):
        requests = [Request(str(at), keys, CHAIN * 16 + 1) for at, keys in enumerate(case)]
        row(f"  {name}", [timed(lambda request=request: cache.lookup(request, 0, 0.0)) for request in requests])
    copies = [fresh(keys) for keys in chains]
    row("  all present, key by key", [timed(lambda keys=keys: linear(cache.pool, keys)) for keys in copies])


def linear(pool: BlockPool, keys: list[bytes]) -> int:
    return next((at for at, key in enumerate(keys) if pool.find(key) is None), len(keys))


def measure_loads(cache: CPUPrefixCache, chains: list[list[bytes]]) -> None:
    seconds = []
    destinations = [list(range(CHAIN))]
    for at, keys in enumerate(chains):
        request = Request(f"load-{at}", keys, CHAIN * 16 + 1)
        cache.admit(request, 0, CHAIN * 16)
        seconds.append(timed(lambda request=request: cache.load(request.id, CHAIN * 16, destinations, 0.0)))
    print(f"\nload, per chunk                   {1e6 * median(seconds) / CHAIN:7.3f} us")
    plan = cache.step()
    cache.report(RankReport(0, frozenset(transfer.id for transfer in plan.transfers)))


def measure_churn(pool: BlockPool, rng: random.Random, blocks: int) -> None:
    allocations, commits = [], []
    while pool.statistics().free >= RUN:
        insert(pool, rng, RUN)
    for _ in range(blocks // RUN):
        keys = [rng.randbytes(16) for _ in range(RUN)]
        begin = time.perf_counter()
        chunks = pool.allocate(RUN)
        middle = time.perf_counter()
        pool.commit(chunks, keys, pool.root, pool.touch(None))
        allocations.append(middle - begin)
        commits.append(time.perf_counter() - middle)
    print(f"\n{RUN} blocks, evicting {RUN}          per block  longest call")
    for name, seconds in (("allocate", allocations), ("commit", commits)):
        print(f"  {name:<28}{1e6 * sum(seconds) / len(seconds) / RUN:10.3f} us {1e3 * max(seconds):8.1f} ms")


def fresh(keys: list[bytes]) -> list[bytes]:
    """Equal keys in new objects, whose hash Python has not computed yet."""
    return [bytes(bytearray(key)) for key in keys]


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def row(name: str, seconds: list[float]) -> None:
    print(f"{name:<30}{1e6 * median(seconds):9.1f} us{1e6 * percentile(seconds, 0.99):9.1f}{1e6 * max(seconds):10.1f}")


if __name__ == "__main__":
    main()
