"""What requests left behind while the host was being prepared, and there was no room for it yet.

A host region takes seconds to prepare, and an idle engine hears of it a step late. So it is tried again:

    add          what was refused waits, if the host is still growing
    that_fit     has grown: those whose missing chunks fit the blocks free by now, oldest first; and all of them once
                 it has grown to its end

Nothing is evicted for them before that: it would be what was stored a moment ago, with more room to come. A host may
also never grow to its end, where a rank is short of memory. So no more is kept than the device has chunks: what is
older has left it.
"""

from collections.abc import Callable

from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.pool.block_pool import BlockPool


class Retries:
    """Requests that ended or were preempted, for a pool that grows: of `most_chunks` chunks together at most. `missing`
    counts the chunks of one that the pool lacks.
    """

    def __init__(self, pool: BlockPool, most_chunks: int, missing: Callable[[Running], int]) -> None:
        self._pool = pool
        self._most_chunks = most_chunks
        self._missing = missing
        self._waiting: dict[str, Running] = {}
        self._chunks = 0
        self._tried_at = 0  # blocks that were ready then

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
        """Those to be tried now, which wait no more."""
        if not self._waiting or self._pool.ready == self._tried_at:
            return []
        self._tried_at = self._pool.ready
        room = len(self._pool.free)
        fit = []
        for request in list(self._waiting.values()):
            room -= self._missing(request) * self._pool.blocks_per_chunk
            if room < 0 and self._pool.ready < self._pool.capacity:
                break
            self._remove(request.id)
            fit.append(request)
        return fit

    def clear(self) -> None:
        self._waiting.clear()
        self._chunks = 0

    def _remove(self, id: str) -> None:
        request = self._waiting.pop(id, None)
        if request is not None:
            self._chunks -= request.confirmed
