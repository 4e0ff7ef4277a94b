"""Differences between the supported releases of vLLM, detected by their features when this module is imported.

The release number is used for a warning only: tested are 0.26.0 (on a GPU), 0.32.0 (its CPU build), and 0.33.0 (its
base class only).

    before 0.28   failed loads are reported by block ids, which vLLM rejects in models with several groups
    since 0.28    failed loads are reported by request ids
    before 0.28   blocks of windows and states are kept at every boundary; no window keeps extra tokens or is replayed
    before 0.28   with any connector, a Mamba hybrid gets the longest hit of one group instead of the joint hit
    older ones    chains of block hashes begin at random unless PYTHONHASHSEED is set, also with sha256
"""

import logging
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)

TESTED = ((0, 26), (0, 33))  # the first and the last

# Whether failed loads are reported by request ids.
TAKES_FAILED_REQUESTS = any(field.name == "failed_recving" for field in fields(KVConnectorOutput))

# Whether a prompt has other hashes in each process, if PYTHONHASHSEED is not set and hashes are cryptographic.
CHAINS_BEGIN_AT_RANDOM = "DEFAULT_NONE_HASH_SEED" not in vars(kv_cache_utils)


def failed_requests(output: KVConnectorOutput) -> set[str]:
    """The requests in `finished_recving` whose load failed. Before 0.28, all of them if any load failed."""
    if TAKES_FAILED_REQUESTS:
        return set(output.failed_recving or ())
    return set(output.finished_recving or ()) if output.invalid_block_ids else set()


def warn_if_untested() -> None:
    """Warn if this release of vLLM is outside the tested range."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release is None or not TESTED[0] <= release <= TESTED[1]:
        (first, last) = (f"{major}.{minor}" for major, minor in TESTED)
        logger.warning(
            "CPUPrefixCacheConnector was tested with vLLM %s to %s; this is %s", first, last, vllm.__version__
        )


def layer_pages(kv_cache_config: Any) -> dict[str, int]:
    """The bytes of each layer's page in a block, padding included."""
    tensors = kv_cache_config.kv_cache_tensors
    if all("layers" in vars(tensor) for tensor in tensors):
        return {name: min(each.layer_stride, each.block_stride) for each in tensors for name in each.layers}
    pages = {}
    for each in tensors:  # older releases, packed or not
        after = [other.offset for other in tensors if other.offset > each.offset]
        packed = min([*after, each.block_stride]) - each.offset
        page = packed if each.block_stride else each.size // kv_cache_config.num_blocks
        pages.update(dict.fromkeys(each.shared_by, page))
    return pages


def retention_interval(kv_cache_config: Any) -> int | None:
    """Tokens between the boundaries at which vLLM keeps windows and states. 0: only at the end of prompts. None: at
    every boundary, as before 0.28.
    """
    interval: int | None = vars(kv_cache_config).get("prefix_cache_retention_interval")
    return interval


def extra_tokens(window: Any) -> int:
    """Tokens that a window's spec keeps beyond the window. Before 0.28 always 0."""
    extra: int = vars(window).get("extra_retained_tokens", 0)
    return extra


def is_replayed(window: Any) -> bool:
    """Whether vLLM computes a window again after each hit (`bounded_replay`). Before 0.28 never."""
    return bool(vars(window).get("bounded_replay", False))


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """The return value of `get_transfer_results`, in releases that have it."""
    return base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)


def host_hit_source() -> Any:
    """vLLM's name for hits on the host in its statistics; None in releases that have no such names."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def measures_scales(cache_config: Any) -> bool:
    """Whether each process measures the scales of a quantized KV cache itself. Later releases cannot."""
    return bool(vars(cache_config).get("calculate_kv_scales", False))


def configured_backend(vllm_config: Any) -> str:
    """The attention backend that the operator has chosen, if any."""
    attention = vars(vllm_config).get("attention_config")
    return "" if attention is None else str(vars(attention).get("backend"))


def backend_of(layer: Any) -> str:
    """The name of the backend that reads and writes a layer's KV. Empty where vLLM has no such layer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # workers have it already

    return str(layer.get_attn_backend().__name__) if isinstance(layer, AttentionLayerBase) else ""


def needs_joint_hits(has_mamba: bool) -> bool:
    """Whether vLLM may offer a device prefix that has its attention blocks but not its state."""
    return has_mamba and _per_group is not None and not _is_opt_in()


def patch_joint_hits() -> None:
    """Patch vLLM so that a hybrid with state groups resumes only where all of its groups can.

    Before 0.28, with any connector, the scheduler searches each group on its own and takes the longest hit as computed.
    The state of a group with a shorter hit is then read from null block 0. The patch returns the joint hit; several
    connectors in one process may apply it.
    """
    kv_cache_coordinator.HybridKVCacheCoordinator.find_longest_cache_hit_per_group = _joint_hit


def _joint_hit(self: Any, block_hashes: Any, max_cache_hit_length: int) -> tuple[Any, tuple[int, ...]]:
    blocks, length, _ = self.find_longest_cache_hit(block_hashes, max_cache_hit_length)
    return blocks, (length,) * len(blocks)


def _is_opt_in() -> bool:
    """Whether vLLM returns hits that differ between groups only to connectors that ask for them. This one does not."""
    return "supports_divergent_local_hybrid_hits" in vars(base.KVConnectorBase_V1)


_per_group: Callable[..., Any] | None = vars(kv_cache_coordinator.HybridKVCacheCoordinator).get(
    "find_longest_cache_hit_per_group"
)
