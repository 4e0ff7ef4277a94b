"""Requests that ended while the host was being prepared and had no room for their chunks yet.

A host region takes seconds to prepare. So their stores are tried again:

    add          a request waits, if the host is still growing
    that_fit     after the host has grown: the requests whose missing chunks fit the free blocks, oldest first; all of
                 them once it has grown to its end

Before that nothing is evicted for them. A host may never grow to its end, where a rank is short of memory; so no more
chunks are kept than the device has: older ones have left it.
"""

from collections.abc import Callable, Hashable

from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.pool.block_pool import BlockPool


class Retries:
    """Requests that ended or were preempted, with at most `most_chunks` chunks together. `missing` counts the chunks of
    one that the pool lacks.
    """

    def __init__(self, pool: BlockPool, most_chunks: int, missing: Callable[[Running], int]) -> None:
        self._pool = pool
        self._most_chunks = most_chunks
        self._missing = missing
        self._waiting: dict[Hashable, Running] = {}
        self._chunks = 0
        self._tried_at = 0  # blocks that were ready at the last try

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Running) -> None:
        if self._pool.ready == self._pool.capacity:
            return
        self._remove(request.id)
        self._waiting[request.id] = request
        self._chunks += request.confirmed
        while self._chunks > self._most_chunks:
            self._remove(next(iter(self._waiting)))

    def that_fit(self) -> list[Running]:
        """The requests to be tried now. They wait no longer."""
        if not self._waiting or self._pool.ready == self._tried_at:
            return []
        self._tried_at = self._pool.ready
        room = len(self._pool.free)
        fit = []
        for request in list(self._waiting.values()):
            room -= self._missing(request) * self._pool.shape.blocks_per_chunk
            if room < 0 and self._pool.ready < self._pool.capacity:
                break
            self._remove(request.id)
            fit.append(request)
        return fit

    def clear(self) -> None:
        self._waiting.clear()
        self._chunks = 0

    def _remove(self, id: Hashable) -> None:
        request = self._waiting.pop(id, None)
        if request is not None:
            self._chunks -= request.confirmed
