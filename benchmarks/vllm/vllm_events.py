"""Time that KV events take in vLLM's scheduler, in microseconds a block. Needs no GPU; runs in seconds.

    python -m benchmarks.vllm.vllm_events [--blocks 512] [--times 200]

A prompt of so many blocks is noted, its stores end in one step, it ends, and others have taken its place on device and
host, again and again. Beside it, what vLLM's own pool takes for events of its blocks, and for their entries in its
index. Each line has the least and the median: others that use the processor make times longer.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from statistics import median

from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from connector.vllm.events import LOCAL, KVEvents
from cpu_prefix_cache.deciding import BoundariesStored, BoundaryEvent

BLOCK_TOKENS = 16


class Log:
    """A cache that has nothing but a log."""

    def __init__(self) -> None:
        self.events: list[BoundaryEvent] = []

    def take_events(self) -> list[BoundaryEvent]:
        events, self.events = self.events, []
        return events

    def may_be_named(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)


def timed(work: Callable[[], object], blocks: int) -> float:
    began = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - began) / blocks


def one(ours: KVEvents, log: Log, request: Request, blocks: int) -> dict[str, float]:
    log.events = [BoundariesStored(list(request.block_hashes), None)]
    pool = BlockPool(blocks + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS, enable_kv_cache_events=True)
    new = pool.get_new_blocks(blocks)
    took = {
        "noted": timed(lambda: ours.note(request), blocks),
        "taken": timed(ours.take, blocks),
        "ended": timed(lambda: ours.ended(request.request_id), blocks),
    }
    theirs = timed(lambda: pool.cache_full_blocks(request, new, 0, blocks, BLOCK_TOKENS, 0), blocks)
    return took | {"all of it": sum(took.values()), "vLLM's own": theirs}


def measured(blocks: int, times: int) -> dict[str, list[float]]:
    log = Log()
    ours = KVEvents(log, BLOCK_TOKENS, 1, LOCAL)  # type: ignore[arg-type]  # what it calls is there
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    found: dict[str, list[float]] = {}
    for at in range(times):
        tokens = [(at * blocks * BLOCK_TOKENS + each) % 120_000 for each in range(blocks * BLOCK_TOKENS)]
        request = Request(f"r{at}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for name, value in one(ours, log, request, blocks).items():
            found.setdefault(name, []).append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--times", type=int, default=200)
    args = parser.parse_args()
    init_none_hash(sha256)
    envs.enable_envs_cache()  # as in an engine
    gc.freeze()  # as in an engine
    for name, values in measured(args.blocks, args.times).items():
        print(f"{name:12} {min(values):.2f} {median(values):.2f}")


if __name__ == "__main__":
    main()
