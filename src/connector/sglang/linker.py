"""HostLinker: the host cache behind SGLang's UnifiedRadixCache, which calls it in the thread of its scheduler.

    lookup      which prefixes of these pages can be restored: the longest that all ranks have, or none, 0
    load        a request is promised such a prefix: it is leased, and queued        --cancelled-->  given up
    start       what is queued is loaded into pages that the request owns
    finish      behind the forward: whether the loads of a batch have ended well; if not, SGLang aborts its requests
    offload     pages of a node of the tree are copied to the host, from the first turn on in which their indices have
                come from the device; SGLang locks the node until that has ended

Offloads are reported in their order, as SGLang takes them. One for which the host had no room is reported as one that
failed: SGLang offers no node again that it takes to be stored.

SGLang does not say which page comes before the first of a node: what a node has is evicted from its end, and
independently of other nodes. Copies run behind what the stream of the forward has been given so far: that may still
write, or read, these pages.
"""

import logging
from binascii import unhexlify  # in half the time of bytes.fromhex
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from connector.common.options import check_known
from connector.sglang.layers import LayerWaits
from connector.sglang.pools import groups_of
from connector.sglang.ranks import Ranks
from cpu_prefix_cache import ConfigurationError, HostOptions, MisuseError
from cpu_prefix_cache.by_keys import FoundKeys, KeyedHostCache, PutHandle
from cpu_prefix_cache.deciding import Group, num_bytes

logger = logging.getLogger(__name__)

BYTES, POLICY = OPTIONS = ("host_bytes", "policy")  # in `linker_extra_config`

Pages = tuple[list[bytes], list[list[int]]]  # keys, and the blocks of each group


class HostLinker(UnifiedCacheLinker):
    """Raises ConfigurationError for an option that is none, and for KV of a shape that it does not keep."""

    def __init__(self, _: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any) -> None:
        check_known(extra_config, OPTIONS)
        if BYTES not in extra_config:
            raise ConfigurationError(f'linker_extra_config needs {BYTES}, the host memory of a rank, such as "64GiB"')
        size = num_bytes(BYTES, extra_config[BYTES])
        self.pools, self.forward_stream = groups_of(params), forward_stream
        options = HostOptions(**{name: value for name, value in extra_config.items() if name != BYTES})
        self.host = KeyedHostCache([*self.pools.values()], host_bytes=size, null_block=0, options=options)
        self.layer_done_counter = LayerWaits(1 + max(layer for pool in self.pools.values() for layer in pool.layers))
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._ranks = Ranks(params)
        self._queued: dict[str, tuple[Pages, FoundKeys]] = {}  # by request
        self._offered = deque[Offer]()
        self._offloads = deque[PutHandle]()
        self.host.poll()  # which begins to pin the region: the first requests are to find room
        logger.info("HostLinker keeps %s in %d bytes of each rank", ", ".join(self.pools), size)

    # Lookups and loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys = keys_of(transfers)
        found = self.host.lookup(keys)
        self.host.release(found)
        return [self._ranks.longest(found.lengths, len(keys))]

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        keys, _ = pages = self._pages(transfers)
        lease = self.host.lookup(keys)
        if self._ranks.longest(lease.lengths, len(keys)) < len(keys):
            self.host.release(lease)
            return False  # a rank has evicted some of it: SGLang computes the request
        self._queued[rid] = pages, lease
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self.host.release(queued[1])
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        with torch.cuda.stream(self.forward_stream):
            self.layer_done_counter.loads = self.host.load_together([pages for pages, _ in self._queued.values()])
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        return 0

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish()

    # Offloads

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        self._offered.append(Offer(transfers))
        return True

    def num_completed_offloads(self) -> int:
        while self._offered and self._offered[0].has_arrived:
            pages = self._pages(self._offered.popleft().transfers)
            with torch.cuda.stream(self.forward_stream):
                self._offloads.append(self.host.put(*pages))
        return next((at for at, each in enumerate(self._offloads) if not each.is_done), len(self._offloads))

    def pop_completed_offload(self) -> bool:
        return self._offloads.popleft().is_kept or self.host.is_off  # then nothing is to be offered again

    # The end

    def reset(self) -> None:
        self.host.drain()
        self.host.reset()  # leases end
        self._queued.clear()
        self._offered.clear()
        self._offloads.clear()

    def close(self) -> None:
        self._offered.clear()
        self.host.close()

    def _pages(self, transfers: Iterable[PoolTransfer]) -> Pages:
        given, pools = {each.name: each.device_indices for each in transfers}, self.pools.items()
        return keys_of(transfers), [blocks_of(given[name], pool.group) if name in given else [] for name, pool in pools]


class Offer:
    """Pages to copy to the host. Their indices come from the device behind its work, for which no step waits."""

    def __init__(self, transfers: list[PoolTransfer]) -> None:
        is_late = any(each.device_indices.is_cuda for each in transfers)
        self.transfers = [
            replace(each, device_indices=each.device_indices.to("cpu", non_blocking=True)) for each in transfers
        ]
        self._event = torch.cuda.current_stream().record_event() if is_late else None

    @property
    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()


def keys_of(transfers: Iterable[PoolTransfer]) -> list[bytes]:
    """The keys of SGLang's pages, which are digests in hex."""
    return [*map(unhexlify, next(each.keys for each in transfers if each.name == PoolName.KV))]


def blocks_of(indices: torch.Tensor, group: Group) -> list[int]:
    """The pages, or slots of states, of these indices, one a token. Raises MisuseError where one is not whole."""
    tokens = 1 if group.is_state else group.block_tokens
    rows = indices.to("cpu", torch.int64).reshape(-1, tokens)
    blocks = rows[:, 0] // tokens
    if not torch.equal(rows, blocks[:, None] * tokens + torch.arange(tokens, device="cpu")):
        raise MisuseError(f"indices of whole pages of {tokens} tokens are copied, got {rows.tolist()}")
    return blocks.tolist()
