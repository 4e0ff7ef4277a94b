"""Fields that are equal where one vLLM process may serve rows of another: what vLLM's offloading knows of the engine.

It does not know the attention backend, and of the layout of the workers' KV only its name.
"""

import sys
from collections.abc import Iterator

import vllm
from vllm import platforms
from vllm.v1.kv_offload.config import OffloadingConfig

from connector.tier.namespace import digest
from cpu_prefix_cache.tier import Namespace, Tier, Value

FORMAT = "rows of vllm 1"  # of this namespace: another one finds nothing of this


def row_namespace(tier: Tier, config: OffloadingConfig, row_bytes: int) -> Namespace:
    """Namespace of rows of so many bytes. Raises ConfigurationError."""
    return Namespace(tuple(_fields(tier, config, row_bytes)))


def _fields(tier: Tier, config: OffloadingConfig, row_bytes: int) -> Iterator[tuple[str, Value]]:
    model, revision = tier.identity
    yield from (("format", FORMAT), ("model", model), ("revision", revision), ("dtype", config.model.dtype))
    yield from (("hash", tier.hash), ("byte order", sys.byteorder), ("row bytes", row_bytes))
    yield from (("engine", f"vllm {vllm.__version__}"), ("platform", str(platforms.current_platform.device_type)))
    yield from (
        ("worker bytes", config.worker_kv_bytes_per_block),
        ("hash tokens", config.cache.tokens_per_hash),
        ("blocks in a chunk", config.cache.blocks_per_chunk),
        ("layout", str(config.kv_cache_layout)),
        ("canonical layout", int(config.canonical_layout)),
        ("replicated layout", int(config.replicated_layout)),
    )
    parallel = config.parallel
    yield from (
        ("ranks", parallel.world_size),
        ("tensor parallel ranks", parallel.tp_size),
        ("pipeline parallel ranks", parallel.pp_size),
        ("prefill context parallel ranks", parallel.pcp_size),
        ("decode context parallel ranks", parallel.dcp_size),
    )
    for group in config.groups:
        yield f"group {group.group_id} tokens", group.tokens_per_block
        yield f"group {group.group_id} layers", digest(group.layer_names)
