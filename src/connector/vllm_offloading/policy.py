"""Policies of this library as `CachePolicy` of vLLM's OffloadingConnector: `kv_connector_extra_config` has

    "eviction_policy": "AdaptivePolicy", "cache_policy_module_path": "cpu_prefix_cache_vllm"

vLLM's manager calls, for each request:

    on_request_access    since 0.33, first of all: it is about to load, or to store, these
    on_store_miss        it is about to store these, a step's worth, and then, in this order,
    evict                  makes room, if there is too little
    insert                 stores each of them, before 0.33 without naming the request
    mark_evictable       a store has ended, or the last load of a chunk; `remove` where the store failed
    on_request_finished  with all that it loaded and stored; before 0.33 the only call for one that stores nothing

The first of them that comes is the request's admission. It is one use of the cache, whatever it goes on to load and to
store, and its end changes no order.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from connector.vllm_offloading.kept import KeptChunks, PromptUse


class RequestUse:
    """A request's use of the cache of one policy, since its last reset. vLLM keeps it with the request."""

    def __init__(self, kept: object, resets: int) -> None:
        self.kept = kept
        self.resets = resets
        self.use = PromptUse()
        self.has_begun = False


class PrefixPolicy(CachePolicy):
    """vLLM's calls, passed on to the chunks that are kept. Each subclass names a policy of ours."""

    name: ClassVar[str]
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._kept = KeptChunks(cache_capacity, self.name)
        self._coming: dict[bytes, PromptUse] = {}  # by key, the request that is about to store it
        self._resets = 0

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._kept.chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        self._kept.insert(key, chunk, self._coming.pop(key, None))

    def remove(self, key: OffloadKey) -> None:
        self._kept.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._use(req_context)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._use(req_context)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        use = self._use(req_context)
        self._kept.offer(use, keys)
        self._coming.update(dict.fromkeys(keys, use))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        use = self._use(req_context)
        for key in [key for keys in key_groups for key in keys if self._coming.get(key) is use]:
            del self._coming[key]  # they found no room

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        return self._kept.evict(n, protected)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._kept.used(key, -1)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._kept.used(key, +1)

    def clear(self) -> None:
        self._kept.clear()
        self._coming.clear()
        self._resets += 1

    @property
    def num_loose(self) -> int:
        """How many chunks are here although they stand nowhere."""
        return self._kept.num_loose

    def check_valid(self) -> None:
        """Assert every rule that is kept here. For tests."""
        self._kept.check_valid()

    def _use(self, req_context: ReqContext) -> PromptUse:
        """The request's use of the cache, which begins with the first call."""
        mine = req_context.get_state(RequestUse)
        if mine is None or mine.kept is not self._kept or mine.resets != self._resets:
            mine = RequestUse(self._kept, self._resets)
            req_context.set_state(mine)
        mine.use.chain.extend(req_context._offload_key_positions)  # in vLLM 0.31 to 0.33 there is no other way to them
        if mine.use.chain.hashes and not mine.has_begun:
            mine.has_begun = True
            self._kept.begin(mine.use, self.clock())
        return mine.use


class AdaptivePolicy(PrefixPolicy):
    """Evicts what is least likely to be used again for the room it takes."""

    name = "adaptive"


class ArcPolicy(PrefixPolicy):
    """ARC, with whole prompts as uses."""

    name = "arc"


class LruPolicy(PrefixPolicy):
    """Evicts what the longest-gone request used, its tail first."""

    name = "lru"
