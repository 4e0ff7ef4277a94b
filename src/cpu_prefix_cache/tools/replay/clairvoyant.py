"""References that no real cache can reach: one without a limit, and one that knows the future.

`replay_min` is Belady's MIN, block by block, with bypass: after each request it keeps, of all blocks that are cached or
were just computed, those that are used again soonest. As in all replays, a hit is contiguous from the beginning of a
prompt.

It is a ceiling on hit blocks: no cache of this capacity finds more of them. The time from one use of a block to the
next is an interval. A hit is an interval during which the block was kept, and at most `capacity` of these intervals
overlap. To keep as many intervals as possible is interval scheduling on `capacity` machines, and a greedy choice is
optimal (Faigle and Nawijn, Discrete Applied Mathematics 58, 1995): when there are too many intervals, drop the one that
ends last. This counts kept blocks at any depth of a prompt. Since the deepest blocks of a prompt are dropped first, the
kept ones form a prefix, so all of them are hits. It is no ceiling on hit tokens or on time saved: the last block of a
prompt may be shorter, and a deeper block takes longer to compute.

Blocks are kept in *buckets* by the request that uses them next, which is all that MIN needs to know. The deeper a block
in a prompt, the longer ago it was used last, because each prompt that has a block has all blocks above it. So a bucket
is filled from its deepest block upwards, and the deepest block is dropped first: when its request arrives, the bucket
holds the first blocks of the prompt. A bucket is therefore just a count, and that count is the hit.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

NEVER = -1


@dataclass(frozen=True, slots=True)
class Reuse:
    """Blocks [start, stop) of a prompt are used next by the request with this number."""

    request: int
    start: int
    stop: int


class Future:
    """The next use of each block. Computed once for a trace, for replays of any capacity."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reuses: list[list[Reuse]] = [[] for _ in trace.requests]
        next_use: dict[bytes, int] = {}
        for number in range(len(trace.requests) - 1, -1, -1):
            keys = trace.requests[number].keys
            self.reuses[number] = list(_grouped([next_use.get(key, NEVER) for key in keys]))
            next_use.update(dict.fromkeys(keys, number))


def replay_ideal(trace: Trace) -> Tally:
    """Replay with a cache without a limit: every block is computed once."""
    seen: set[bytes] = set()
    tally = Tally()
    for request in trace.requests:
        hit = 0
        for key in request.keys:
            if key not in seen:
                break
            hit += 1
        seen.update(request.keys[hit:])
        tally.count(request, hit, trace.block_tokens)
        tally.stored_blocks += len(request.keys) - hit
    return tally


def replay_min(future: Future, capacity: int, meter: Meter) -> Tally:
    """Replay MIN with bypass in a cache of `capacity` blocks."""
    tally = Tally()
    buckets = _Buckets(len(future.reuses), capacity)
    numbers = iter(range(len(future.reuses)))
    for requests in meter.slices(future.trace.requests):
        for request, number in zip(requests, numbers, strict=False):
            _serve(request, number, future, buckets, tally)
    tally.all_hits_were_loaded()
    tally.evictions = tally.stored_blocks - buckets.held
    return tally


class _Buckets:
    """How many blocks are kept for each later request: `held` in all, at most `capacity` between two requests."""

    def __init__(self, requests: int, capacity: int) -> None:
        self.sizes = [0] * requests
        self.held = 0
        self._capacity = capacity
        self._latest: list[int] = []  # a heap of the negated numbers of requests with a nonempty bucket

    def take(self, request: int) -> int:
        """Empty the bucket of a request that arrives. Returns how many blocks were kept for it."""
        size, self.sizes[request] = self.sizes[request], 0
        self.held -= size
        return size

    def put(self, request: int, count: int) -> None:
        if not self.sizes[request]:
            heapq.heappush(self._latest, -request)
        self.sizes[request] += count
        self.held += count

    def trim(self) -> None:
        """Drop the blocks that are used last until the rest fits. Buckets of earlier requests are empty."""
        while self.held > self._capacity:
            latest = -self._latest[0]
            dropped = min(self.sizes[latest], self.held - self._capacity)
            self.sizes[latest] -= dropped
            self.held -= dropped
            if not self.sizes[latest]:
                heapq.heappop(self._latest)


def _serve(request: TraceRequest, number: int, future: Future, buckets: _Buckets, tally: Tally) -> None:
    hit = buckets.take(number)
    tally.count(request, hit, future.trace.block_tokens)
    reuses = future.reuses[number]
    for reuse in reuses:
        buckets.put(reuse.request, reuse.stop - reuse.start)
    buckets.trim()
    for reuse in reuses:
        stop = min(reuse.stop, reuse.start + buckets.sizes[reuse.request])
        tally.stored_blocks += max(0, stop - max(reuse.start, hit))


def _grouped(next_uses: Sequence[int]) -> Iterator[Reuse]:
    """Runs of blocks with the same next use, without those that are never used again."""
    start = 0
    for at in range(1, len(next_uses) + 1):
        if at == len(next_uses) or next_uses[at] != next_uses[start]:
            if next_uses[start] != NEVER:
                yield Reuse(next_uses[start], start, at)
            start = at
