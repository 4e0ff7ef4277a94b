"""Many engines on one store: the hits of each by place, the time that they save, and the load on the store.

    python -m benchmarks.tiers.tiers_fleet TRACE [--engines 1,8,64,512] [--requests 32] [--store spread,one]

The engines decide by the library's own code; bytes, links and clocks are simulated (tiers_fleet_parts.py). Each engine
brings users of its own (tiers_fleet_users.py), whose requests come so fast that one engine would be busy for `--load`
of the time if nothing were ever found. So all fleets have the same load for each engine.

    balancing  random     each request goes to any engine
               prefix     those that begin with the same chunk go to one engine, or to the next if many wait there
    store      one        one server with a link of `--link` GB/s in each direction, whatever the fleet
               spread     each engine's machine lends its memory and its own link of `--nic` GB/s
               none       nothing below host memory
    hot        a prefix of `--hot-blocks` blocks stands in front of the share `--hot` of all conversations. The store
               has it at the start; one that is spread has it on one machine, whose link, `--hot-link`, all reads pass

An engine computes as an H200 does Llama 3.1 8B, unless `--prefill-rate` and `--bytes-per-token` are given. `saved`
is prefill that did not come from the device, less loads and waits, by `tools/replay/seconds_saved.py`.
"""

import argparse
import contextlib
import gc
import heapq
import io
import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import print_environment
from benchmarks.tiers.tiers_fleet_parts import NAME_TOKENS, FleetEngine, SharedStore, Sizes
from benchmarks.tiers.tiers_fleet_users import (
    BALANCING,
    Balancer,
    arrivals_of,
    fronted,
    hot_keys,
    ideal_share,
    servable,
)
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest, read_traces

EVEN_DEPTH = 26_624  # of Llama 3.1 8B (tools/replay/flops.py)
HOST_BYTES = 54e9  # a second, measured: PCIe 5.0
STORES = ("spread", "one", "none")
COLUMNS = (
    "engines",
    "balancing",
    "store",
    "ideal",
    "device",
    "host",
    "from store",
    "saved",
    "busiest",
    "asked/s",
    "calls/s",
    "names/s",
    "read GB/s",
    "written GB/s",
    "late",
    "names used",
    "reads used",
    "writes used",
)


def main() -> None:
    options = arguments()
    note = environment()
    print(note)
    trace = servable(read_traces([str(options.trace)]))
    print(f"{options.trace.name}: " + ", ".join(f"{name} {value}" for name, value in settings(options).items()))
    rows = []
    print(" | ".join(COLUMNS))
    for number in options.engines:
        for kind in options.store:
            for balancing in options.balancing:
                row = fleet(trace, options, number, balancing, kind)
                rows.append(row)
                print(" | ".join(shown(row[name]) for name in COLUMNS), f"({row['wall seconds']:.0f} s)", flush=True)
                if options.json is not None:
                    result = {"note": note, "settings": settings(options), "rows": rows}
                    options.json.write_text(json.dumps(result, indent=1) + "\n")


def fleet(trace: Trace, options: argparse.Namespace, number: int, balancing: str, kind: str) -> dict[str, Any]:
    """One simulation, as a row of the table."""
    began, trace = time.perf_counter(), fronted(trace, options.hot, options.hot_blocks)
    rates = rates_of(trace, options)
    store = store_of(trace, options, number, kind)
    sizes = Sizes(options.device, options.host, options.nic * 1e9, options.offload)
    engines = [FleetEngine(trace, sizes, rates, store) for _ in range(number)]
    arrivals = arrivals_of(trace, rates, engines=number, requests=options.requests, load=options.load)
    gc.collect()
    gc.freeze()
    seconds = run(engines, arrivals, Balancer(engines, balancing))
    gc.unfreeze()
    return row_of(engines, store, seconds, rates) | {
        "engines": number,
        "balancing": balancing,
        "store": kind,
        "ideal": ideal_share(arrivals),
        "requests": len(arrivals),
        "simulated seconds": seconds,
        "wall seconds": time.perf_counter() - began,
    }


def run(engines: Sequence[FleetEngine], arrivals: Sequence[TraceRequest], balancer: Balancer) -> float:
    """Let time pass until nothing is to be done. When that was."""
    events: list[tuple[float, int]] = []  # when which engine goes on
    due = [math.inf] * len(engines)
    number = {engine: at for at, engine in enumerate(engines)}
    coming, now = deque(arrivals), 0.0
    while coming or events:
        if coming and (not events or coming[0].now <= events[0][0]):
            now, at = coming[0].now, number[engine := balancer.choose(coming[0])]
            engine.queue.append(coming.popleft())
        else:
            now, at = heapq.heappop(events)
            if now != due[at]:
                continue  # it was called earlier
        due[at] = engines[at].wake(now)
        if due[at] < math.inf:
            heapq.heappush(events, (due[at], at))
    return now


def store_of(trace: Trace, options: argparse.Namespace, number: int, kind: str) -> SharedStore:
    """`none` is a store without room that nobody waits for."""
    sizes = {"block_bytes": rates_of(trace, options).block_bytes, "block_names": trace.block_tokens // NAME_TOKENS}
    if kind == "none":
        return SharedStore(0, link=math.inf, names=math.inf, round_trip=0.0, **sizes)
    return SharedStore(
        math.inf if options.capacity is None else options.capacity * number,
        link=(options.nic * number if kind == "spread" else options.link) * 1e9,
        names=options.names,
        round_trip=options.round_trip / 1e3,
        hot=hot_keys(options.hot_blocks) if options.hot else (),
        hot_link=(options.hot_link or options.nic) * 1e9 if kind == "spread" else math.inf,
        **sizes,
    )


def rates_of(trace: Trace, options: argparse.Namespace) -> Rates:
    return Rates(
        options.prefill_rate,
        EVEN_DEPTH,
        HOST_BYTES,
        block_bytes=options.bytes_per_token * trace.block_tokens,
        block_tokens=trace.block_tokens,
    )


def row_of(engines: Sequence[FleetEngine], store: SharedStore, seconds: float, rates: Rates) -> dict[str, Any]:
    seen = [engine.seen for engine in engines]
    tiers = [engine.tiered.tier_statistics() for engine in engines]
    blocks = sum(each.blocks for each in seen)
    found = {
        "device": sum(each.on_device for each in seen),
        "host": sum(each.on_host for each in seen),
        "from store": sum(each.in_store for each in seen),
    }
    loaded = found["host"] + found["from store"]
    saved = sum(rates.saved(engine.loaded, 0) for engine in engines) - loaded * rates.block_bytes / rates.host_bytes
    saved -= sum(each.waited for each in seen)
    asked = sum(tier.questions for tier in tiers)
    lines = {"names": store.server, "reads": store.reads, "writes": store.writes}
    return {
        **{name: count / blocks for name, count in found.items()},
        "saved": saved / sum(rates.seconds(engine.work) for engine in engines),
        "waited seconds": sum(each.waited for each in seen),
        "busiest": max(each.busy for each in seen) / (sum(each.busy for each in seen) / len(seen)),
        "busy": sum(each.busy for each in seen) / len(seen) / seconds,
        "asked/s": asked / seconds,
        "calls/s": store.calls / seconds,
        "names/s": store.server.passed / seconds,
        "read GB/s": store.reads.passed / seconds / 1e9,
        "written GB/s": store.writes.passed / seconds / 1e9,
        "hot GB": store.hot_reads.passed / 1e9,
        "written again": store.again,
        "late": sum(tier.unanswered + tier.late for tier in tiers) / max(1, asked),
        "unanswered": sum(tier.unanswered for tier in tiers),
        "late reads": sum(tier.late for tier in tiers),
        "declined": sum(tier.declined for tier in tiers),
        "refused": sum(tier.refused for tier in tiers),
        "unsaved": sum(tier.unsaved for tier in tiers),
        "paused": sum(tier.state == "paused" for tier in tiers),
        **{f"{name} used": line.passed / line.rate / seconds for name, line in lines.items()},
    }


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def environment() -> str:
    """Machine and versions."""
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        print_environment(["cpu-prefix-cache", "xxhash"])
    return lines.getvalue().strip()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("trace", "json")}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="in Mooncake's format")
    parser.add_argument("--engines", type=numbers, default=[1, 8, 64], help="in a fleet (default 1,8,64)")
    parser.add_argument("--balancing", type=list_of(BALANCING), default=list(BALANCING))
    parser.add_argument("--store", type=list_of(STORES), default=["spread", "one"])
    parser.add_argument(
        "--requests", type=int, default=32, help="requests of average length, for each engine (default 32)"
    )
    parser.add_argument("--load", type=float, default=0.8, help="load of an engine that finds nothing (default 0.8)")
    parser.add_argument("--device", type=int, default=150, help="blocks of the trace (default 150)")
    parser.add_argument("--host", type=int, default=300, help="blocks of the trace (default 300)")
    parser.add_argument("--capacity", type=int, help="size of the store, in blocks for each engine (default: all)")
    parser.add_argument("--hot", type=float, default=0.0, help="share of the conversations with the hot prefix")
    parser.add_argument("--hot-blocks", type=int, default=16, help="blocks of that prefix (default 16: 8,192 tokens)")
    parser.add_argument("--hot-link", type=float, help="GB/s at which it is read, by all together (default: --nic)")
    parser.add_argument("--offload", choices=("eager", "lazy"), default="eager", help="to the store")
    parser.add_argument("--nic", type=float, default=25.0, help="GB/s of a machine, each way (default 25: 200 Gbit/s)")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s of one server, each way (default 50)")
    parser.add_argument("--names", type=float, default=1.6e6, help="names a second that the store can look up")
    parser.add_argument("--round-trip", type=float, default=0.2, help="ms of a question (default 0.2)")
    parser.add_argument("--prefill-rate", type=float, default=44_000, help="tokens a second, short prompts")
    parser.add_argument("--bytes-per-token", type=int, default=131_072)
    parser.add_argument("--json", type=Path, help="write all numbers to this file, too")
    return parser.parse_args(given)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"is some of {','.join(known)}")
        return chosen

    return parse


if __name__ == "__main__":
    main()
