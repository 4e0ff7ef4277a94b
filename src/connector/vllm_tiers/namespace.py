"""Fields that are equal where one vLLM process may serve rows of another: those of every engine of vLLM's, and what its
offloading knows of the rows. Of the layout of the workers' KV that is the name, which vLLM means to be the same for all
attention backends.
"""

import sys
from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from connector.tier.namespace import digest
from connector.vllm.tier_namespace import engine_fields, forms
from cpu_prefix_cache.tier import Namespace, Tier, Value

FORMAT = "rows of vllm 2"  # of this namespace: another one finds nothing of this


def row_namespace(tier: Tier, engine: VllmConfig, config: OffloadingConfig, row_bytes: int) -> Namespace:
    """Namespace of rows of so many bytes. Raises ConfigurationError."""
    of_engine = engine_fields(engine, config.cache.tokens_per_hash)
    return Namespace((*_of_rows(tier, config, row_bytes), *sorted(of_engine.items())))


def _of_rows(tier: Tier, config: OffloadingConfig, row_bytes: int) -> Iterator[tuple[str, Value]]:
    model, revision = tier.identity
    yield from (("format", FORMAT), ("model", model), ("revision", revision), ("dtype", config.model.dtype))
    yield from (("hash", tier.hash), ("byte order", sys.byteorder), ("row bytes", row_bytes))
    yield from (
        ("worker bytes", config.worker_kv_bytes_per_block),
        ("blocks in a chunk", config.cache.blocks_per_chunk),
        ("layout", "; ".join((str(config.kv_cache_layout), *forms()))),
        ("canonical layout", int(config.canonical_layout)),
        ("replicated layout", int(config.replicated_layout)),
        ("ranks", config.parallel.world_size),
    )
    for group in config.groups:
        yield f"group {group.group_id} tokens", group.tokens_per_block
        yield f"group {group.group_id} layers", digest(group.layer_names)
