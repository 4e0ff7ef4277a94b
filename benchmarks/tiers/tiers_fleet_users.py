"""Parts of tiers_fleet.py: users, the times of their requests, and the engine that serves each.

Each engine brings users of its own: some conversations of a trace, drawn at random, each to at most TURNS requests,
under keys of their own. They come in the trace's order, each when those before it could be computed. A hot prefix may
stand in front of some conversations, with the same keys for the users of all engines (`fronted`).

    random     any engine serves a request
    prefix     the engine that its first chunk leads to, behind a hot prefix; if too many wait there, the next one,
               which knows it less
"""

import random
from collections.abc import Iterator, Sequence

import xxhash

from benchmarks.tiers.tiers_fleet_parts import FleetEngine
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

LONGEST = 131_072  # tokens of a prompt, as of Llama 3.1
TURNS = 16  # long conversations would be longer than the simulation
MOST_WAITING = 4  # requests
SEED = 3
BALANCING = ("random", "prefix")
HOT = b"hot"  # begins the keys of a hot prefix


class Balancer:
    """Sends requests to `engines`; `kind` is one of BALANCING."""

    def __init__(self, engines: Sequence[FleetEngine], kind: str) -> None:
        self._engines = engines
        self._kind = kind
        self._chance = random.Random(SEED)

    def choose(self, request: TraceRequest) -> FleetEngine:
        if self._kind == "random":
            return self._chance.choice(self._engines)
        first = xxhash.xxh3_64_intdigest(own_key(request)) % len(self._engines)
        in_turn = [*self._engines[first:], *self._engines[:first]]
        return next((engine for engine in in_turn if len(engine.queue) < MOST_WAITING), in_turn[0])


def servable(trace: Trace) -> Trace:
    """Without prompts that are too long, or shorter than a chunk."""
    most = LONGEST // trace.block_tokens
    return Trace(trace.paths, trace.block_tokens, [each for each in trace.requests if 0 < len(each.keys) <= most])


def hot_keys(blocks: int) -> list[bytes]:
    return [HOT + at.to_bytes(4, "big") for at in range(blocks)]


def own_key(request: TraceRequest) -> bytes:
    """The first one behind a hot prefix: it names the conversation."""
    return next(key for key in request.keys if not key.startswith(HOT))


def fronted(trace: Trace, share: float, blocks: int) -> Trace:
    """With a prefix of so many blocks in front of that share of the conversations."""
    if not share or not blocks:
        return trace
    hot, tokens = hot_keys(blocks), blocks * trace.block_tokens
    requests = [
        TraceRequest(each.now, hot + each.keys, each.tokens + tokens)
        if random.Random(f"{SEED} {each.keys[0].hex()}").random() < share
        else each
        for each in trace.requests
    ]
    return Trace(trace.paths, trace.block_tokens, requests)


def arrivals_of(trace: Trace, rates: Rates, *, engines: int, requests: int, load: float) -> list[TraceRequest]:
    """The requests of all users, in the order of time. Those of an engine's take as long to compute as `requests` of
    average length, and that is the share `load` of the time in which they come.
    """
    conversations: dict[bytes, list[TraceRequest]] = {}
    for request in trace.requests:
        conversations.setdefault(own_key(request), []).append(request)
    seconds = rates.seconds(trace.work) / len(trace.requests) * requests
    arrivals: list[TraceRequest] = []
    for engine in range(engines):
        some = _drawn(list(conversations.values()), seconds, rates, random.Random(f"{SEED} {engine}"))
        new = {key: _key_of(key, engine) for request in some for key in request.keys}
        for began, request in _in_turn(some, seconds, rates):
            arrivals.append(TraceRequest(began / load, [new[key] for key in request.keys], request.tokens))
    return sorted(arrivals, key=lambda request: request.now)


def _key_of(key: bytes, engine: int) -> bytes:
    """Key of this engine's users, but for a hot prefix."""
    return key if key.startswith(HOT) else xxhash.xxh3_128_digest(key, seed=engine)


def ideal_share(arrivals: Sequence[TraceRequest]) -> float:
    """Share of the blocks that an earlier prompt had."""
    known: set[bytes] = set()
    hits = 0
    for request in arrivals:
        hits += next((at for at, key in enumerate(request.keys) if key not in known), len(request.keys))
        known.update(request.keys)
    return hits / sum(len(request.keys) for request in arrivals)


def _drawn(
    conversations: list[list[TraceRequest]], seconds: float, rates: Rates, chance: random.Random
) -> list[TraceRequest]:
    """Requests that take so long to compute, or longer, in the order of the trace."""
    chance.shuffle(conversations)
    some: list[TraceRequest] = []
    for turns in conversations:
        if seconds <= 0:
            break
        some += turns[:TURNS]
        seconds -= sum(_seconds_of(request, rates) for request in turns[:TURNS])
    return sorted(some, key=lambda request: request.now)


def _in_turn(some: Sequence[TraceRequest], seconds: float, rates: Rates) -> Iterator[tuple[float, TraceRequest]]:
    """Requests that begin within so many seconds, if they are computed one after the other, and when they begin."""
    now = 0.0
    for request in some:
        if now >= seconds:
            return
        yield now, request
        now += _seconds_of(request, rates)


def _seconds_of(request: TraceRequest, rates: Rates) -> float:
    """To compute it."""
    work = Work()
    work.add(0, request.tokens)
    return rates.seconds(work)
