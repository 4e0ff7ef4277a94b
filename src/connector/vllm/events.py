"""Boundaries that can be hit on the host, or brought there from a tier, as vLLM's KV events. Routers use them to send a
prompt to its prefix.

    the library's log                      event, medium "CPU" or "STORAGE"
    stored b, c below a                    BlockStored [b], parent a; BlockStored [c], parent b
    removed b                              BlockRemoved [b]
    reset                                  BlockRemoved [all that were stored]

A boundary is published only if a request could resume there from the host, behind what the device has. Its hash is
that of the block that ends there, in the form of vLLM's own events, and so are its tokens and extra keys. A reset is
published block by block, because vLLM's AllBlocksCleared names no medium: a router would forget the device's blocks
too. One event stores one boundary, as with vLLM's own connectors: a router may take the hashes of one event for a whole
that leaves when its last does.
"""

from collections.abc import Iterable, Sequence

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from connector.vllm.contents import KnownContents
from cpu_prefix_cache.deciding import BoundariesStored, BoundaryEvent, CPUPrefixCache, TieredCache

LOCAL, REMOTE = "LOCAL", "REMOTE"  # on the engine's own host; on one that others write to as well


class KVEvents:
    """Events of a cache whose chunks have `chunk_tokens` tokens and `hashes_per_chunk` hashes."""

    def __init__(self, cache: CPUPrefixCache, chunk_tokens: int, hashes_per_chunk: int, tier_locality: str) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._tier_locality = tier_locality
        self._are_numbers = isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int)
        self.contents = KnownContents(chunk_tokens, hashes_per_chunk, cache.may_be_named)

    def note(self, request: Request) -> None:
        """The request is queued, or has more chunks."""
        self.contents.note(request)

    def ended(self, id: str) -> None:
        self.contents.ended(id)

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events = self._translated(self._cache.take_events(), MEDIUM_CPU, LOCAL)
        if isinstance(self._cache, TieredCache):
            events += self._translated(self._cache.below.pool.take_events(), MEDIUM_STORAGE, self._tier_locality)
        self.contents.forget()
        return events

    def _translated(self, log: Iterable[BoundaryEvent], medium: str, locality: str) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        for event in log:
            if isinstance(event, BoundariesStored):
                events += self._stored(event, medium, locality)
            else:
                events.append(BlockRemoved(block_hashes=self._hashes(event.keys), medium=medium, locality=locality))
        return events

    def _stored(self, event: BoundariesStored, medium: str, locality: str) -> list[BlockStored]:
        hashes, width = self._hashes(event.keys), self._chunk_tokens
        parents = [*self._hashes([event.parent_key]), *hashes] if event.parent_key is not None else [None, *hashes]
        return [
            BlockStored(
                block_hashes=[hash],
                parent_block_hash=parent,
                token_ids=portion.tokens[at * width : at * width + width],
                block_size=width,
                lora_id=portion.lora_id,
                medium=medium,
                lora_name=portion.lora_name,
                extra_keys=[portion.extra_keys[at] if portion.extra_keys else None],
                locality=locality,
            )
            for hash, parent, (portion, at) in zip(hashes, parents, self.contents.of(event.keys), strict=False)
        ]

    def _hashes(self, keys: Sequence[bytes]) -> list[ExternalBlockHash]:
        """As `maybe_convert_block_hash` gives them, which takes longer for one than all else does here."""
        if self._are_numbers:
            return [int.from_bytes(key[-8:], "big") for key in keys]
        return [BlockHash(key) for key in keys]
