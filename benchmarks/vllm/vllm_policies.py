"""Hits of policies in vLLM's own CPU offloading manager, vLLM's and ours, beside `replay`. Needs no GPU.

    python -m benchmarks.vllm.vllm_policies TRACE --capacity 1000,5859,14000

Requests of the trace (in the formats of `replay`) come one after the other, and the manager gets the calls that vLLM's
scheduler makes for each: look up its blocks, load the hit, store the rest in steps of 8,192 tokens. Copies end at once,
and nothing is copied. A column is the percentage of all blocks that were found; `loose` are the most blocks that our
`adaptive` kept although it wants others in their place.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from connector.vllm_offloading.policy import PrefixPolicy
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.one_tier import replay_one_tier
from cpu_prefix_cache.tools.replay.tiers import HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, read_traces

OURS = {"lru": "LruPolicy", "arc": "ArcPolicy", "adaptive": "AdaptivePolicy"}
THEIRS = ("lru", "arc")
MODULE = "cpu_prefix_cache_vllm"
STEP_TOKENS = 8_192


def hit_blocks(trace: Trace, manager: CPUOffloadingManager, step_blocks: int) -> tuple[int, int]:
    """Blocks of the trace that the manager finds, and the most that a policy of ours kept loose."""
    now = [0.0]
    policy = manager._policy if isinstance(manager._policy, PrefixPolicy) else None
    if policy is not None:
        policy.clock = lambda: now[0]
    found = loose = 0
    for number, request in enumerate(trace.requests):
        now[0] = request.now
        keys = [make_offload_key(each, 0) for each in request.keys]
        context = ReqContext(str(number))
        for at, each in enumerate(keys, 1):
            context.set_offload_key_position(each, at * trace.block_tokens)
        manager.on_new_request(context)
        found += serve(manager, context, keys, step_blocks)
        manager.on_request_finished(context)
        loose = max(loose, 0 if policy is None else policy.num_loose)
    return found, loose


def serve(manager: CPUOffloadingManager, context: ReqContext, keys: Sequence[OffloadKey], step_blocks: int) -> int:
    """One request. How many of its blocks were found."""
    hit = 0
    while hit < len(keys) and manager.lookup(keys[hit], context) is LookupResult.HIT:
        hit += 1
    if hit:
        manager.prepare_load(keys[:hit], context)
        manager.complete_load(keys[:hit], context)
    for start in range(hit, len(keys), step_blocks):
        stored = manager.prepare_store(keys[start : start + step_blocks], context)
        if stored is not None:
            manager.complete_store(stored.keys_to_store, context)
    return hit


def row(trace: Trace, capacity: int) -> str:
    step_blocks = max(1, STEP_TOKENS // trace.block_tokens)
    cells = [f"{capacity:>8}"]
    loose = 0
    for name in THEIRS:
        found, _ = hit_blocks(trace, CPUOffloadingManager(capacity, name), step_blocks)
        cells.append(f"{100 * found / trace.blocks:>11.2f}")
    for name, ours in OURS.items():
        replayed = replay_one_tier(trace, HostTier(capacity, name), Meter(name, trace.blocks)).hit_blocks
        found, loose = hit_blocks(trace, CPUOffloadingManager(capacity, ours, MODULE), step_blocks)
        cells.append(f"{100 * replayed / trace.blocks:>17.2f} {100 * found / trace.blocks:>6.2f}")
    return " ".join([*cells, f"{loose:>6}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", default="1000,5859,14000", help="blocks of the trace, with commas between")
    args = parser.parse_args()
    trace = read_traces([str(args.trace)])
    theirs = [f"{f'vLLM {name}':>11}" for name in THEIRS]
    ours = [f"{f'replay {name}':>17} {'ours':>6}" for name in OURS]
    print(" ".join([f"{'blocks':>8}", *theirs, *ours, f"{'loose':>6}"]))
    for capacity in args.capacity.split(","):
        print(row(trace, int(capacity)), flush=True)


if __name__ == "__main__":
    main()
