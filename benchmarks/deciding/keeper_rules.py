"""Prefill that engines of one node save with one pool, for four orders in which its chunks leave.

    python -m benchmarks.deciding.keeper_rules TRACE [--capacity 8000] [--parts 8] [--routing random] [--seed 1]

    lru            the longest unused first: the keeper's order, but for its limit for an engine that floods the pool
    returned       the same, but a chunk that leaves a device becomes the youngest in the pool
    held           chunks that any device holds first: the rule between one device and its host (duplicates.py)
    held alone     first those that one device holds, and that no other engine has used since they came to the node

This is a model of its own, of sets of keys: in the keeper's forest nothing may leave above a chunk that stays, and a
keeper knows nothing of devices. A device is an LRU with the pool's size divided by one of `--parts`, and keeps the
beginning of a prompt that is longer. Requests come one after the other. A request finds, without a gap, the chunks that
its device or the pool has, and then all of its chunks are stored that the pool lacks. With all orders but the first a
chunk that leaves a device becomes the youngest in the pool, where it is stored if it would not leave first.

`keeper` is the share that the keeper itself saves without devices, for one engine, which has no limit, and `alone` that
of the model without devices: they are equal. With "random" routing a request goes to any engine, with "prefix" to one
whose device has most of the prompt. Gains are those of the last order, in points: beside `lru`, and beside `returned`.
"""

import argparse
import json
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain, islice
from typing import Any

from benchmarks.common import environment
from benchmarks.deciding.keeper_engines import new_keeper, parser_of_pools, saved
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.traces import Trace, read_traces

# Of the devices that hold a chunk and the engines that have used it: does it leave first?
Rule = Callable[[Set[int], Set[int]], bool]
ORDERS: dict[str, Rule] = {
    "lru": lambda holders, users: False,
    "returned": lambda holders, users: False,
    "held": lambda holders, users: bool(holders),
    "held alone": lambda holders, users: len(holders) == len(users) == 1 and holders == users,
}
BESIDE = ("lru", "returned")
Order = OrderedDict[bytes, None]  # the oldest first
Router = Callable[["Node", Sequence[bytes]], int]


class Node:
    """A pool of so many chunks for engines whose devices have so many each."""

    def __init__(self, capacity: int, engines: int, device: int, order: str) -> None:
        self._capacity, self._device_chunks, self._rule = capacity, device, ORDERS[order]
        self._returns = order != "lru"
        self.pool = Order()
        self._first = Order()  # of the pool, what leaves first
        self.devices = [Order() for _ in range(engines)]
        self._holders, self._users = defaultdict[bytes, set[int]](set), defaultdict[bytes, set[int]](set)

    def serve(self, engine: int, keys: Sequence[bytes]) -> int:
        """How many chunks of the prompt were found."""
        device = self.devices[engine]
        hit = next((at for at, key in enumerate(keys) if key not in device and key not in self.pool), len(keys))
        for key in keys:
            self._users[key].add(engine)
        gone = self._fill(engine, keys)
        if self._returns:
            self._use(gone)
            self._store([key for key in gone if not self._leaves_first(key)], set(keys))
        self._store(keys, set(keys))
        self._use(reversed(keys))
        self._forget(gone)
        return hit

    def _fill(self, engine: int, keys: Sequence[bytes]) -> list[bytes]:
        """Put a prompt on a device. What leaves it."""
        device = self.devices[engine]
        kept = keys[: self._device_chunks]
        use(reversed(kept), device)
        for key in kept:
            self._holders[key].add(engine)
        gone = [device.popitem(last=False)[0] for _ in range(len(device) - self._device_chunks)]
        for key in gone:
            self._holders[key].discard(engine)
        return gone

    def _store(self, keys: Sequence[bytes], kept: Set[bytes]) -> None:
        """Store what is missing of these, from the first on, as far as others than `kept` leave for it."""
        missing = [key for key in keys if key not in self.pool]
        short = max(0, len(missing) + len(self.pool) - self._capacity)
        for chunks in (self._first, self.pool):
            for key in list(islice((key for key in chunks if key not in kept), short)):
                del self.pool[key]
                self._first.pop(key, None)
                self._forget((key,))
                short -= 1
        room = self._capacity - len(self.pool)
        self.pool.update(dict.fromkeys(missing[:room]))

    def _use(self, keys: Iterable[bytes]) -> None:
        """Make those of these that it has the youngest of the pool, and of what leaves first those that do."""
        for key in filter(self.pool.__contains__, keys):
            self.pool.move_to_end(key)
            self._first.pop(key, None)
            if self._leaves_first(key):
                self._first[key] = None

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Forget who has used those of these that are nowhere."""
        for key in keys:
            if key not in self.pool and not self._holders[key]:
                del self._holders[key]
                self._users.pop(key, None)

    def _leaves_first(self, key: bytes) -> bool:
        return self._rule(self._holders[key], self._users[key])


def use(keys: Iterable[bytes], order: Order) -> None:
    """Make these the youngest, the last of them the youngest of all."""
    for key in keys:
        order[key] = None
        order.move_to_end(key)


def at_random(draw: random.Random) -> Router:
    return lambda node, _: draw.randrange(len(node.devices))


def by_prefix(draw: random.Random) -> Router:
    def route(node: Node, keys: Sequence[bytes]) -> int:
        found = [next((at for at, key in enumerate(keys) if key not in each), len(keys)) for each in node.devices]
        return draw.choice([engine for engine, each in enumerate(found) if each == max(found)])

    return route


ROUTERS = {"random": at_random, "prefix": by_prefix}


def replay(trace: Trace, node: Node, route: Router, even_depth: float) -> dict[str, float]:
    """Shares of the blocks that are found, and of the prefill time that is saved."""
    found, hits = Work(), 0
    for request in trace.requests:
        hit = node.serve(route(node, request.keys), request.keys)
        hits += hit
        found.add(0, min(hit * trace.block_tokens, request.tokens))
    return {"hits": hits / trace.blocks, "saved": found.share_of(trace.work, even_depth)}


def rows_of(trace: Trace, capacity: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    engines, depth = options.engines, options.even_depth

    def replayed(device: int, order: str, routing: str) -> dict[str, float]:
        route = ROUTERS[routing](random.Random(options.seed))
        return replay(trace, Node(capacity, engines, device, order), route, depth)

    keeper = saved(trace, [new_keeper(capacity)], 1, 0, random.Random(options.seed)).share_of(trace.work, depth)
    alone = replayed(0, "lru", "random")["saved"]
    return [
        {"capacity": capacity, "device": capacity // part, "routing": routing, "keeper": keeper, "alone": alone}
        | {order: replayed(capacity // part, order, routing) for order in ORDERS}
        for routing in options.routing
        for part in options.parts
    ]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "share of the prefill time that is saved (of the blocks that are found)",
        f"| blocks | each device | routing | keeper | alone | {' | '.join(ORDERS)} | gain | of the order |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in rows:
        shares = " | ".join(f"{each[order]['saved']:.4f} ({each[order]['hits']:.4f})" for order in ORDERS)
        gains = " | ".join(f"{100 * (each['held alone']['saved'] - each[order]['saved']):+.2f}" for order in BESIDE)
        sizes = f"{each['capacity']:,} | {each['device']:,} | {each['routing']}"
        lines.append(f"| {sizes} | {each['keeper']:.4f} | {each['alone']:.4f} | {shares} | {gains} |")
    return lines


def main() -> None:
    options = arguments()
    trace = read_traces([str(options.trace)])
    print("\n".join(environment(["cpu-prefix-cache"])))
    print(f"{options.trace.name}: {len(trace.requests):,} requests, {trace.blocks:,} blocks of {trace.block_tokens}")
    rows = list(chain.from_iterable(rows_of(trace, capacity, options) for capacity in options.capacity))
    print("\n".join(table(rows)))
    if options.json:
        options.json.write_text(json.dumps({"trace": options.trace.name, "rows": rows}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = parser_of_pools(__doc__, capacity=[2000, 4000, 8000, 16000])
    parser.add_argument("--parts", type=int, nargs="+", default=[32, 8, 4], help="the pool's size by that of a device")
    parser.add_argument("--routing", choices=list(ROUTERS), nargs="+", default=list(ROUTERS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
