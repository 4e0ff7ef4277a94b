"""References that no cache can serve by: one without a limit, and one that knows the future.

`replay_min` is Belady's MIN, block by block, with bypass: at any moment it keeps, of all blocks that are in the cache
or were computed just now, those that are used again soonest. Hits are counted as everywhere here, contiguous from the
beginning of a prompt.

It is a ceiling on hit blocks: no cache of so many blocks finds more of them. From one use of a block to the next is an
interval between two requests, and a hit is an interval through which the block was kept; of the intervals at most
`capacity` overlap. To take as many intervals as possible is scheduling on so many machines, which the greedy choice
solves (Faigle and Nawijn, Discrete Applied Mathematics 58, 1995): when there are too many, give up the one that ends
last. That holds for blocks that count wherever they are; and as of one prompt the deepest blocks are given up first,
what is kept is found from the beginning of the prompt on, so that no prefix is lost by it. It is no ceiling on tokens
or on time saved: a prompt's last block may be shorter than others, and to compute a deep one takes longer.

Blocks are kept in *buckets* by the request that uses them next, which is all that MIN looks at. Of a prompt, the later
a block comes the longer ago it was used last, because whoever used it used all before it. So a bucket fills from its
deepest block upwards, and where the deepest is the first to be given up, what is left of it is always the beginning of
that prompt's blocks, or what will be filled up to it. A bucket is then no more than a count, and the count it has when
its request comes is the hit.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.replay.meter import Meter
from cpu_prefix_cache.replay.outcome import Tally
from cpu_prefix_cache.replay.traces import Trace, TraceRequest

NEVER = -1


@dataclass(frozen=True, slots=True)
class Reuse:
    """Blocks [start, stop) of a prompt are used next by the request with this number."""

    request: int
    start: int
    stop: int


class Future:
    """Who uses each block next. Made once for a trace; serves replays of any capacity."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reuses: list[list[Reuse]] = [[] for _ in trace.requests]
        next_use: dict[bytes, int] = {}
        for number in range(len(trace.requests) - 1, -1, -1):
            keys = trace.requests[number].keys
            self.reuses[number] = list(_grouped([next_use.get(key, NEVER) for key in keys]))
            next_use.update(dict.fromkeys(keys, number))


def replay_ideal(trace: Trace) -> Tally:
    """A cache without a limit: every block is computed once."""
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
    """MIN with bypass in a cache of `capacity` blocks."""
    tally = Tally()
    buckets = _Buckets(len(future.reuses), capacity)
    numbers = iter(range(len(future.reuses)))
    for requests in meter.slices(future.trace.requests):
        for request, number in zip(requests, numbers, strict=False):
            _serve(request, number, future, buckets, tally)
    tally.loaded_blocks = tally.hit_blocks
    tally.evictions = tally.stored_blocks - buckets.held
    return tally


class _Buckets:
    """How many blocks are kept for each request to come: `held` together, at most `capacity` between two requests."""

    def __init__(self, requests: int, capacity: int) -> None:
        self.sizes = [0] * requests
        self.held = 0
        self._capacity = capacity
        self._latest: list[int] = []  # a heap of negative numbers of requests with something in their bucket

    def take(self, request: int) -> int:
        """What was kept for a request that comes now."""
        size, self.sizes[request] = self.sizes[request], 0
        self.held -= size
        return size

    def put(self, request: int, count: int) -> None:
        if not self.sizes[request]:
            heapq.heappush(self._latest, -request)
        self.sizes[request] += count
        self.held += count

    def trim(self) -> None:
        """Give up what is used last until the rest fits. Buckets of requests that are over are empty."""
        while self.held > self._capacity:
            latest = -self._latest[0]
            given_up = min(self.sizes[latest], self.held - self._capacity)
            self.sizes[latest] -= given_up
            self.held -= given_up
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
    """Neighbours that are used next by the same request, without those that are never used again."""
    start = 0
    for at in range(1, len(next_uses) + 1):
        if at == len(next_uses) or next_uses[at] != next_uses[start]:
            if next_uses[start] != NEVER:
                yield Reuse(next_uses[start], start, at)
            start = at
