"""Hit ratios of a generated load of exact repeats: every prompt comes repeatedly, some much more often than others.

    python -m benchmarks.deciding.repeats [--prompts 2000] [--requests 20000] [--exponent 1.0] [--a-second 1.0]
    python -m benchmarks.deciding.repeats --write trace.jsonl     and then: cpu-prefix-cache replay trace.jsonl

Prompts of 1 to `longest` blocks without common prefixes are drawn by Zipf's law: the n-th with a weight of
1 / n^exponent. Requests come at random times. Printed are the hit ratios of each policy, and of `adaptive` without its
kinds for repeated prompts (REPEATED_OF in eviction/kinds.py), with the difference to the better of LRU and ARC in
points.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from cpu_prefix_cache import POLICIES
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.eviction import kinds
from cpu_prefix_cache.tools.replay.one_tier import serve
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.trace_guesses import MOONCAKE_BLOCK_TOKENS
from cpu_prefix_cache.tools.replay.traces import TraceRequest

PARTS = (32, 16, 8, 4, 2)  # capacities: the number of different blocks, divided by each of these


def main() -> None:
    options = arguments()
    load = drawn(options.prompts, options.requests, options.exponent, options.a_second, options.longest, options.seed)
    if options.write is not None:
        options.write.write_text("".join(json.dumps(line) + "\n" for line in mooncake_lines(load)))
        return
    different = len({key for request in load for key in request.keys})
    capacities = [different // part for part in PARTS]
    print(f"{len(load):,} requests for {different:,} different blocks, Zipf with exponent {options.exponent}")
    print_row("blocks", [f"{capacity:,}" for capacity in capacities])
    ratios = {policy: [hit_ratio(load, capacity, policy) for capacity in capacities] for policy in POLICIES}
    with mock.patch.object(kinds, "REPEATED_OF", (0,) * len(kinds.REPEATED_OF)):
        ratios["without"] = [hit_ratio(load, capacity, "adaptive") for capacity in capacities]
    for name, row in ratios.items():
        print_row(name, [f"{ratio:.4f}" for ratio in row])
    for name in ("adaptive", "without"):
        better = map(max, ratios["lru"], ratios["arc"])
        print_row(f"{name} +-", [f"{100 * (own - best):+.2f}" for own, best in zip(ratios[name], better, strict=True)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2_000, help="different ones (default 2000)")
    parser.add_argument("--requests", type=int, default=20_000, help="(default 20000)")
    parser.add_argument("--exponent", type=float, default=1.0, help="exponent of Zipf's law (default 1.0)")
    parser.add_argument("--a-second", type=float, default=1.0, help="requests a second, in the mean (default 1.0)")
    parser.add_argument("--longest", type=int, default=40, help="prompt, in blocks (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="write the load as a trace in Mooncake's format, and replay nothing")
    return parser.parse_args()


def drawn(prompts: int, requests: int, exponent: float, a_second: float, longest: int, seed: int) -> list[TraceRequest]:
    chance = random.Random(seed)
    weights = [1 / place**exponent for place in range(1, prompts + 1)]
    lengths = [chance.randint(1, longest) for _ in range(prompts)]
    keys = [[chance.randbytes(16) for _ in range(length)] for length in lengths]
    now, load = 0.0, []
    for which in chance.choices(range(prompts), weights, k=requests):
        now += chance.expovariate(a_second)
        load.append(TraceRequest(now, keys[which], lengths[which] * MOONCAKE_BLOCK_TOKENS))
    return load


def mooncake_lines(load: Sequence[TraceRequest]) -> list[dict[str, object]]:
    ids: dict[bytes, int] = {}
    return [
        {
            "timestamp": request.now * 1_000,
            "input_length": request.tokens,
            "output_length": 1,
            "hash_ids": [ids.setdefault(key, len(ids)) for key in request.keys],
        }
        for request in load
    ]


def hit_ratio(load: Sequence[TraceRequest], capacity: int, policy: str) -> float:
    pool, tally = BlockPool(capacity, policy), Tally()
    return sum(serve(pool, request, tally) for request in load) / sum(len(request.keys) for request in load)


def print_row(name: str, cells: Sequence[str]) -> None:
    print(f"{name:12}" + "".join(f"{cell:>9}" for cell in cells))


if __name__ == "__main__":
    main()
