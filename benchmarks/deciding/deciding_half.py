"""The time of single calls of the deciding half, in a pool of a million chunks.

    lookup     8,192 chunk keys in new objects: all present, none present, or a random part of the prefix
    load       plan the load of those chunks
    allocate   512 blocks, evicting as many
    commit     512 blocks
    reset      all of the pool, and the same calls after it

Blocks are stored from two loads: new chunks only, and a mix in which every second prompt is used again and every fifth
was evicted before, so that ARC has as many ghosts as blocks.

For comparison, a loop over the same keys is measured beside lookup. The table ends with the longest single call of 512
blocks, since a dictionary that grows, or a garbage collection, stops the caller.

    python -m benchmarks.deciding.deciding_half [--blocks 1000000] [--chains 100] [--policy lru]
    python -m benchmarks.deciding.deciding_half --memory

Hybrid lookups, in a pool of their own: full attention, a window of 1,024 tokens and a state, with one checkpoint in
each chain, at its last boundary, 4,000 chunks before it, or none at all.

The second form prints the memory of a block under each policy: how much the resident size of a new process grows until
the pool has evicted twice as many blocks as it has, in the mix, with keys of 16 bytes.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.common import percentile, print_environment
from cpu_prefix_cache import POLICIES, Device
from cpu_prefix_cache.deciding import (
    BlockPool,
    CPUPrefixCache,
    HybridChunkPlanner,
    PrefixGroup,
    RankReport,
    Request,
    StateGroup,
    WindowGroup,
)
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing.engine import cache_options

CHAIN = 8_192
RUN = 512


class CountingDevice(Device):
    """A device without contents: destinations can be held and released, and no key is found."""

    num_blocks = num_waiting = 1 << 20

    def find(self, key):
        return None

    def find_all(self, keys):
        return [None for _ in keys]

    def find_checkpoint(self, checkpoint):
        return None

    def soonest_evicted(self):
        return iter(())

    def is_waiting(self, block, key):
        return False

    def hold(self, blocks, parent=()):
        return blocks

    def release(self, hold):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--chains", type=int, default=100, help="distinct chains to look up and load")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    parser.add_argument("--memory", action="store_true", help="measure memory instead, in a process for each policy")
    parser.add_argument("--memory-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_here:
        measure_memory(options.blocks, options.policy)
        return
    print_environment(["sortedcontainers"])
    if options.memory:
        for policy in sorted(POLICIES):
            here = [sys.executable, __file__, "--memory-here", "--policy", policy, "--blocks", str(options.blocks)]
            subprocess.run(here, check=True)
        return
    rng = random.Random(0)
    cache = build(options.blocks, options.policy)
    chains = fill(cache.pool, rng, options.chains)
    print(f"\npool of {options.blocks:,} chunks under {options.policy}, {cache.pool.statistics().cached:,} cached\n")
    measure_lookups(cache, rng, chains)
    measure_hybrid_lookups(rng, options.chains, options.policy)
    measure_loads(cache, chains)
    del chains  # so that garbage collections, which are measured, do not visit the keys of this benchmark
    while cache.pool.statistics().free >= RUN:
        insert(cache.pool, rng, RUN)
    new = (rng.randbytes(16 * RUN) for _ in range(2 * options.blocks // RUN))
    measure_churn("evicting as many: never seen", cache.pool, map(split, new))
    measure_churn("evicting as many: mix", cache.pool, mix(options.blocks))
    measure_reset(cache, rng)


def build(blocks: int, policy: str) -> CPUPrefixCache:
    group = PrefixGroup(name="attention", block_tokens=16, block_bytes=2**21)
    planner = HybridChunkPlanner([group], max_model_len=1 << 20)
    return CPUPrefixCache(
        planner, CountingDevice(), host_blocks=blocks, **cache_options(policy=policy, offload="eager")
    )


def fill(pool: BlockPool, rng: random.Random, chains: int) -> list[list[bytes]]:
    """Fill the pool with `chains` long chains, whose keys are returned, and short ones around them."""
    kept = []
    for _ in range(chains):
        kept.append(insert(pool, rng, CHAIN))
        for _ in range((pool.capacity // chains - CHAIN) // RUN):
            insert(pool, rng, RUN)
    return kept


def insert(pool: BlockPool, rng: random.Random, length: int) -> list[bytes]:
    keys = [rng.randbytes(16) for _ in range(length)]
    pool.commit(pool.allocate(length, keys), keys, pool.root, pool.touch(None))
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


def measure_hybrid_lookups(rng: random.Random, chains: int, policy: str) -> None:
    full = PrefixGroup(name="full", block_tokens=16, block_bytes=2**20)
    window = WindowGroup(name="window", window_tokens=1024, block_tokens=16, block_bytes=2**20)
    state = StateGroup(name="state", block_tokens=16, block_bytes=2**25)
    planner = HybridChunkPlanner([full, window, state], max_model_len=1 << 20)
    cache = CPUPrefixCache(
        planner, CountingDevice(), host_blocks=chains * (CHAIN + 200), **cache_options(policy=policy, offload="eager")
    )
    print(f"\nhybrid lookup of {CHAIN:,} keys, cold")
    for name, depth in (("checkpoint at the end", CHAIN), ("4,000 chunks before", CHAIN - 4_000), ("none", 0)):
        cache.reset()
        requests = []
        for at in range(chains):
            keys = insert(cache.pool, rng, CHAIN)
            if depth:
                add_checkpoint(cache, keys, depth)
            requests.append(Request(str(at), fresh(keys), CHAIN * 16 + 1))
        row(f"  {name}", [timed(lambda request=request: cache.lookup(request, 0, 0.0)) for request in requests])


def add_checkpoint(cache: CPUPrefixCache, keys: list[bytes], depth: int) -> None:
    needs = cache.coordinator.needs(cache.coordinator.checkpoint_at(keys, depth))
    nodes, key = cache.pool.allocate(0, needs=needs), checkpoint_key(keys[depth - 1])
    cache.pool.commit(nodes, [key], cache.pool.find(keys[depth - 1]), cache.pool.touch(None))


def linear(pool: BlockPool, keys: list[bytes]) -> int:
    return next((at for at, key in enumerate(keys) if pool.find(key) is None), len(keys))


def measure_loads(cache: CPUPrefixCache, chains: list[list[bytes]]) -> None:
    seconds = []
    destinations = [list(range(CHAIN))]
    for at, keys in enumerate(chains):
        request = Request(f"load-{at}", keys, CHAIN * 16 + 1)
        cache.admit(request, 0, CHAIN * 16, time.monotonic())
        seconds.append(timed(lambda request=request: cache.load(request.id, CHAIN * 16, destinations, 0.0)))
    print(f"\nload, per chunk                   {1e6 * median(seconds) / CHAIN:7.3f} us")
    plan = cache.step()
    cache.report(RankReport(0, frozenset(transfer.id for transfer in plan.transfers)))


def mix(blocks: int) -> Iterator[list[bytes]]:
    """Prompts with more than 3 times as many chunks as there are blocks."""
    rng, prompts = random.Random(1), blocks // RUN
    for number in range(3 * prompts):
        yield prompt(number)
        if number % 2:
            yield prompt(max(0, number - prompts // 4))
        if number % 5 == 0:
            yield prompt(max(0, number - int(prompts * rng.choice([0.9, 1.3, 1.6]))))


def prompt(number: int) -> list[bytes]:
    return split(random.Random(number).randbytes(16 * RUN))


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


def measure_churn(name: str, pool: BlockPool, prompts: Iterator[list[bytes]]) -> None:
    blocks = 0
    touches = []
    allocations = []
    commits = []
    for keys in prompts:
        have = pool.resident_run(keys, 0, RUN)
        deepest = pool.find(keys[have - 1]) if have else pool.root
        begin = time.monotonic()
        touch = pool.touch(deepest if have else None, keys, begin)
        touches.append(time.monotonic() - begin)
        if have == RUN:
            continue
        pin = pool.pin(deepest) if have else pool.pin()
        missing = keys[have:]
        begin = time.perf_counter()
        chunks = pool.allocate(len(missing), missing)
        middle = time.perf_counter()
        pool.commit(chunks, missing, deepest, touch)
        end = time.perf_counter()
        pool.unpin(pin)
        blocks += len(missing)
        allocations.append(middle - begin)
        commits.append(end - middle)
    print(f"\n{RUN} blocks, {name:<30} per block  longest call")
    for what, seconds in (("touch", touches), ("allocate", allocations), ("commit", commits)):
        print(f"  {what:<38}{1e6 * sum(seconds) / blocks:10.3f} us {1e3 * max(seconds):8.1f} ms")


def measure_reset(cache: CPUPrefixCache, rng: random.Random) -> None:
    cached = cache.pool.statistics().cached
    print(f"\nreset of {cached:,} chunks {1e3 * timed(cache.reset):26.1f} ms")
    new = (rng.randbytes(16 * RUN) for _ in range(cached // RUN))
    measure_churn("after the reset", cache.pool, map(split, new))


def measure_memory(blocks: int, policy: str) -> None:
    before = resident_bytes()
    pool = BlockPool(blocks, policy)
    for now, keys in enumerate(mix(blocks)):
        have = pool.resident_run(keys, 0, RUN)
        deepest = pool.find(keys[have - 1]) if have else pool.root
        touch = pool.touch(deepest if have else None, keys, float(now))
        pin = pool.pin(deepest) if have else pool.pin()
        pool.commit(pool.allocate(RUN - have, keys[have:]), keys[have:], deepest, touch)
        pool.unpin(pin)
        if pool.statistics().evictions >= 2 * blocks:
            break
    grown, now = resident_bytes() - before, pool.statistics()
    print(f"{policy}: {grown / now.cached:.0f} bytes a block, {now.cached:,} cached after {now.evictions:,} evictions")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fresh(keys: list[bytes]) -> list[bytes]:
    """The same keys in new objects, whose hashes Python has not computed yet."""
    return [bytes(bytearray(key)) for key in keys]


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def row(name: str, seconds: list[float]) -> None:
    print(f"{name:<30}{1e6 * median(seconds):9.1f} us{1e6 * percentile(seconds, 0.99):9.1f}{1e6 * max(seconds):10.1f}")


if __name__ == "__main__":
    main()
