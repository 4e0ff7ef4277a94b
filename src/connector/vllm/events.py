"""Boundaries that can be hit on the host, as vLLM's KV events. Routers use them to send a prompt to its prefix.

    the library's log                      event, medium "CPU"
    stored b, c below a                    BlockStored [b, c], parent a
    removed b                              BlockRemoved [b]
    reset                                  BlockRemoved [all that were stored]

A boundary is published only if a request could resume there from the host, behind what the device has. Its hash is
that of the block that ends there, in the form of vLLM's own events. A reset is published block by block, because vLLM's
AllBlocksCleared names no medium: a router would forget the device's blocks too. `token_ids` is empty, since the tokens
are not known any more when a store has ended.
"""

from collections.abc import Iterable

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from cpu_prefix_cache.deciding import BoundariesStored, BoundaryEvent

LOCALITY = "LOCAL"  # on the engine's own host


def block_events(events: Iterable[BoundaryEvent], block_size: int) -> list[KVCacheEvent]:
    """The library's events as vLLM's. `block_size` is the number of tokens of a chunk."""
    return [
        _stored(event, block_size)
        if isinstance(event, BoundariesStored)
        else BlockRemoved(block_hashes=_hashes(event.keys), medium=MEDIUM_CPU, locality=LOCALITY)
        for event in events
    ]


def _stored(event: BoundariesStored, block_size: int) -> BlockStored:
    return BlockStored(
        block_hashes=_hashes(event.keys),
        parent_block_hash=None if event.parent_key is None else _hashes([event.parent_key])[0],
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name=None,
        locality=LOCALITY,
    )


def _hashes(keys: Iterable[bytes]) -> list[ExternalBlockHash]:
    return [maybe_convert_block_hash(BlockHash(key)) for key in keys]
