"""HostLinker: the host cache behind SGLang's UnifiedRadixCache, which calls it in the thread of its scheduler.

    lookup      which prefixes of these pages can be restored: the longest that all ranks have
    load        a request is promised such a prefix: it is leased, and queued        --cancelled-->  given up
    start       what is queued is loaded into pages that the request owns
    finish      behind the forward: whether the loads of a batch have ended well; if not, SGLang aborts its requests
    offload     pages of a node of the tree are copied to the host; SGLang locks the node until that has ended

Offloads are reported in their order, as SGLang takes them. SGLang does not say which page comes before the first of a
node: what a node has is evicted from its end, and independently of other nodes.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from connector.common.options import check_known
from connector.sglang.layers import LayerWaits
from connector.sglang.pools import groups_of
from connector.sglang.ranks import Ranks
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.by_keys import CopyHandle, FoundKeys, KeyedHostCache
from cpu_prefix_cache.deciding import num_bytes

logger = logging.getLogger(__name__)

BYTES, POLICY = OPTIONS = ("host_bytes", "policy")  # in `linker_extra_config`


class Queued(NamedTuple):
    keys: list[bytes]
    blocks: list[list[int]]  # of each group
    lease: FoundKeys


class HostLinker(UnifiedCacheLinker):
    """Raises ConfigurationError for an option that is none, and for KV of a shape that it does not keep."""

    def __init__(self, _: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any) -> None:
        check_known(extra_config, OPTIONS)
        if BYTES not in extra_config:
            raise ConfigurationError(f'linker_extra_config needs {BYTES}, the host memory of a rank, such as "64GiB"')
        size = num_bytes(BYTES, extra_config[BYTES])
        self.pools, self.forward_stream = groups_of(params), forward_stream
        self._page_tokens = {name: 1 if name == PoolName.MAMBA else params.page_size for name in self.pools}
        self.host = KeyedHostCache([*self.pools.values()], null_block=0, **{**extra_config, BYTES: size})
        self.layer_done_counter = LayerWaits()
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._ranks = Ranks(params)
        self._queued: dict[str, Queued] = {}  # by request
        self._offloads = deque[CopyHandle]()
        logger.info("HostLinker keeps %s in %d bytes of each rank", ", ".join(self.pools), size)

    # Lookups and loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys = self._keys(transfers)
        found = self.host.lookup(keys)
        self.host.release(found)
        longest = self._ranks.longest(found.lengths, len(keys))
        return [longest] if longest else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        keys = self._keys(transfers)
        lease = self.host.lookup(keys)
        if not self._ranks.longest([int(lease.longest == len(keys))], most=1):
            self.host.release(lease)
            return False  # a rank has evicted some of it: SGLang computes the request
        self._queued[rid] = Queued(keys, self._blocks(transfers), lease)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self.host.release(queued.lease)
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        with self._behind_compute():
            loads = self.host.load_together([(each.keys, each.blocks) for each in self._queued.values()])
        self.layer_done_counter.loads = loads
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        return 0

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish()

    # Offloads

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        blocks = self._blocks(transfers)
        with self._behind_compute():
            self._offloads.append(self.host.put(self._keys(transfers), blocks))
        return True

    def num_completed_offloads(self) -> int:
        return next((at for at, each in enumerate(self._offloads) if not each.is_done), len(self._offloads))

    def pop_completed_offload(self) -> bool:
        return bool(self._offloads.popleft().ok)

    # The end

    def reset(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self.host.drain()
        self.host.reset()
        self._offloads.clear()

    def close(self) -> None:
        self.host.close()

    # Words of SGLang

    def _behind_compute(self) -> AbstractContextManager[Any]:
        """Copies run after what the forward has been given so far: it may still write, or read, these pages."""
        return nullcontext() if self.forward_stream is None else torch.cuda.stream(self.forward_stream)

    def _keys(self, transfers: Sequence[PoolTransfer]) -> list[bytes]:
        return [*map(bytes.fromhex, next(each.keys for each in transfers if each.name == PoolName.KV))]

    def _blocks(self, transfers: Sequence[PoolTransfer]) -> list[list[int]]:
        indices = {each.name: each.device_indices for each in transfers}
        return [pages(indices[name], tokens) if name in indices else [] for name, tokens in self._page_tokens.items()]


def pages(indices: torch.Tensor, tokens: int) -> list[int]:
    """The pages of SGLang's indices, which are those of their tokens. Raises MisuseError where one is not whole."""
    rows = indices.to("cpu", torch.int64).reshape(-1, tokens)
    firsts = rows[:, 0]
    if not torch.equal(rows, firsts[:, None] + torch.arange(tokens)) or bool((firsts % tokens).any()):
        raise MisuseError(f"indices of whole pages of {tokens} tokens are copied, got {indices.tolist()}")
    return (firsts // tokens).tolist()
