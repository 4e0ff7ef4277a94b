"""Prefill that one pool for the engines of a node saves, beside a pool for each, and one engine with all of it.

    python -m benchmarks.deciding.keeper_engines TRACE [--capacity 8000] [--engines 8] [--in-flight 8] [--seed 1]

Requests go to engines at random. All three are keepers with the policy that they have in service:

    one pool      `--capacity` blocks for all engines
    own pools     an equal part of them for each engine
    one engine    all of them, and all requests

`--in-flight` requests run at a time: of each, the slots of what it lacks are taken when it begins and committed when it
ends, so one may find that another is writing what it needs. The devices keep nothing (keeper_rules.py has some).
Work is counted as `replay` does: tokens, and pairs of a token with one before it, of which `--even-depth` cost as much
as a token.

Bars: one pool saves 1.6 times what own pools save, and what one engine saves, within a point.
"""

import argparse
import json
import random
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import environment
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.keeper.keeper import Keeper
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.keeper.records import Records, records_bytes
from cpu_prefix_cache.messages.tier import KEY_BYTES
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest, read_traces

MODEL = HybridChunkPlanner([PrefixGroup(name="full", block_tokens=16, block_bytes=4096)], max_model_len=16)
NAMESPACE = bytes(NAMESPACE_BYTES)
EVEN_DEPTH = 26_624  # Llama 3.1 8B
LEAST_RATIO, MOST_POINTS = 1.6, 0.01


class Running(NamedTuple):
    """A request of an engine of a keeper, with the slots that it writes."""

    keeper: Keeper
    engine: int
    lease: int
    take: int
    granted: int


def saved(trace: Trace, keepers: Sequence[Keeper], engines: int, in_flight: int, draw: random.Random) -> Work:
    """Replay the trace on as many keepers as there are engines, or on one for all of them."""
    found, running, ids = Work(), deque[Running](), count()
    for at, keeper in enumerate(keepers):
        own = range(1, engines + 1) if len(keepers) == 1 else (at + 1,)
        for engine in own:
            keeper.join(engine, NAMESPACE)
    for request in trace.requests:
        engine = draw.randint(1, engines)
        keeper = keepers[0] if len(keepers) == 1 else keepers[engine - 1]
        begun, hit = begin(keeper, engine, request, ids)
        found.add(0, min(hit * trace.block_tokens, request.tokens))
        running.append(begun)
        if len(running) > in_flight:
            end(running.popleft())
    return found


def begin(keeper: Keeper, engine: int, request: TraceRequest, ids: "count[int]") -> tuple[Running, int]:
    keys, lease, take = [key.ljust(KEY_BYTES, b"\0") for key in request.keys], next(ids), next(ids)
    hit = keeper.run(engine, lease, keys).depth
    granted = keeper.take(engine, take, keys)
    return Running(keeper, engine, lease, take, len(granted.slots)), hit


def end(each: Running) -> None:
    each.keeper.commit(each.engine, each.take, each.granted, False)
    each.keeper.release(each.engine, each.lease)


def new_keeper(capacity: int) -> Keeper:
    return Keeper(capacity, Records(memoryview(bytearray(records_bytes(capacity)))), MODEL)


def main() -> None:
    options = arguments()
    trace = read_traces([str(options.trace)])
    print("\n".join(environment(["cpu-prefix-cache"])))
    print(f"{options.trace.name}: {len(trace.requests):,} requests, {trace.blocks:,} blocks of {trace.block_tokens}")
    rows = [row(trace, capacity, options) for capacity in options.capacity]
    print("\n".join(table(rows)))
    if options.json:
        options.json.write_text(json.dumps({"trace": options.trace.name, "rows": rows}, indent=1) + "\n")


def row(trace: Trace, capacity: int, options: argparse.Namespace) -> dict[str, Any]:
    engines = options.engines
    kinds = {
        "one pool": (engines, [new_keeper(capacity)]),
        "own pools": (engines, [new_keeper(capacity // engines) for _ in range(engines)]),
        "one engine": (1, [new_keeper(capacity)]),
    }
    shares = {
        name: saved(trace, keepers, count, options.in_flight, random.Random(options.seed)).share_of(
            trace.work, options.even_depth
        )
        for name, (count, keepers) in kinds.items()
    }
    ratio, points = shares["one pool"] / shares["own pools"], shares["one pool"] - shares["one engine"]
    return {"capacity": capacity, **shares, "ratio": ratio, "points": points}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "share of the prefill time that is saved",
        "| blocks | one pool | own pools | one engine | one pool / own pools | one pool - one engine | |",
        "|--:|--:|--:|--:|--:|--:|---|",
    ]
    for each in rows:
        is_met = each["ratio"] >= LEAST_RATIO and abs(each["points"]) <= MOST_POINTS
        shares = " | ".join(f"{each[name]:.4f}" for name in ("one pool", "own pools", "one engine"))
        met = "met" if is_met else "missed"
        lines.append(f"| {each['capacity']:,} | {shares} | {each['ratio']:.2f} | {each['points']:+.4f} | {met} |")
    return lines


def arguments() -> argparse.Namespace:
    parser = parser_of_pools(__doc__, capacity=[4000, 8000, 16000])
    parser.add_argument("--in-flight", type=int, default=8, help="requests at a time, of all engines")
    return parser.parse_args()


def parser_of_pools(description: str | None, capacity: Sequence[int]) -> argparse.ArgumentParser:
    """Options of a program that replays a trace with engines on one pool."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace in Mooncake's format, plain or .gz")
    parser.add_argument("--capacity", type=int, nargs="+", default=capacity, help="blocks of the whole pool")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--even-depth", type=float, default=EVEN_DEPTH)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser


if __name__ == "__main__":
    main()
