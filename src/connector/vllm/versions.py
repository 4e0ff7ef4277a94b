"""Which releases of vLLM the connector runs with, and how they differ. Checked when this module is imported.

    0.26           failed loads are reported by block ids, which vLLM rejects in models with several groups
                   an environment variable says where windows and states are kept, and no window keeps extra tokens
                   with any connector, a Mamba hybrid gets the longest hit of one group instead of the joint hit
                   chains of block hashes begin at random unless PYTHONHASHSEED is set, also with sha256
    0.27 to 0.29   are refused: they differ from 0.26 and from 0.30, and are not tested
    0.30 to 0.33   failed loads are reported by request ids; some windows are replayed from 0.31 on
    later ones     run with a warning

ADDED lists what the later releases have. One that should have a name and has not is refused: otherwise a name that
vLLM has changed would count as a feature that it does not have.
"""

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput

from cpu_prefix_cache import ConfigurationError

logger = logging.getLogger(__name__)

Release = tuple[int, int]
TESTED: tuple[Release, ...] = ((0, 26), (0, 30), (0, 31), (0, 32), (0, 33))  # tests_vllm/contracts has a file of each
UNBROKEN: Release = (0, 30)  # from here on no release is left out


class Addition(NamedTuple):
    """A name of a class or a module: what the releases from `since` on have, and 0.26 has not."""

    since: Release
    owner: Any
    name: str

    def is_here(self) -> bool:
        return self.name in vars(self.owner) or self.name in vars(self.owner).get("__dataclass_fields__", ())


ADDED = (
    Addition(UNBROKEN, KVConnectorOutput, "failed_recving"),
    Addition(UNBROKEN, base, "KVConnectorTransferResults"),
    Addition(UNBROKEN, base.KVConnectorBase_V1, "get_transfer_results"),
    Addition(UNBROKEN, base.KVConnectorBase_V1, "requires_kv_delivery"),
    Addition(UNBROKEN, base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"),
    Addition(UNBROKEN, kv_cache_utils, "DEFAULT_NONE_HASH_SEED"),
    Addition(UNBROKEN, kv_cache_interface.KVCacheConfig, "prefix_cache_retention_interval"),
    Addition(UNBROKEN, kv_cache_interface.KVCacheTensor, "layers"),
    Addition(UNBROKEN, kv_cache_interface.SlidingWindowSpec, "extra_retained_tokens"),
    Addition((0, 31), kv_cache_interface.SlidingWindowMLASpec, "bounded_replay"),
    Addition((0, 32), base.KVConnectorBase_V1, "_cache_hit_source"),
)


def release_of(number: str) -> Release | None:
    """The first two numbers of a release. None for a build between releases, whose number says little."""
    numbers = re.match(r"(\d+)\.(\d+)", number)
    return (int(numbers[1]), int(numbers[2])) if numbers and "dev" not in number else None


def check_release(number: str) -> None:
    """Raises ConfigurationError for a release that is too old, or without a name that it should have."""
    release = release_of(number)
    if release is not None and release < UNBROKEN and release not in TESTED:
        raise ConfigurationError(
            f"CPUPrefixCacheConnector does not run with vLLM {number}: before 0.30 vLLM cannot be told which requests' "
            "loads have failed, and of these releases only 0.26 is tested; use 0.30 or later, or 0.26"
        )
    for added in ADDED:
        if (release is None or release >= added.since) and not added.is_here():
            raise ConfigurationError(
                f"CPUPrefixCacheConnector does not fit vLLM {number}: {added.owner.__name__} has no {added.name}; use "
                "a release that it is tested with, 0.30 to 0.33"
            )


check_release(vllm.__version__)

# Whether failed loads are reported by request ids.
TAKES_FAILED_REQUESTS = "failed_recving" in vars(KVConnectorOutput)["__dataclass_fields__"]

# Whether a prompt has other hashes in each process, if PYTHONHASHSEED is not set and hashes are cryptographic.
CHAINS_BEGIN_AT_RANDOM = "DEFAULT_NONE_HASH_SEED" not in vars(kv_cache_utils)


def failed_requests(output: KVConnectorOutput) -> set[str]:
    """The requests in `finished_recving` whose load failed. In 0.26, all of them if any load failed."""
    if TAKES_FAILED_REQUESTS:
        return set(output.failed_recving or ())
    return set(output.finished_recving or ()) if output.invalid_block_ids else set()


def warn_if_untested() -> None:
    """Warn if this release of vLLM is outside the tested range."""
    release = release_of(vllm.__version__)
    if release is None or not TESTED[0] <= release <= TESTED[-1]:
        (first, last) = (f"{major}.{minor}" for major, minor in (TESTED[0], TESTED[-1]))
        logger.warning(
            "CPUPrefixCacheConnector was tested with vLLM %s to %s; this is %s", first, last, vllm.__version__
        )


def layer_pages(kv_cache_config: Any) -> dict[str, int]:
    """The bytes of each layer's page in a block, padding included."""
    tensors = kv_cache_config.kv_cache_tensors
    if all("layers" in vars(tensor) for tensor in tensors):
        return {name: min(each.layer_stride, each.block_stride) for each in tensors for name in each.layers}
    pages = {}
    for each in tensors:  # in 0.26, packed or not
        after = [other.offset for other in tensors if other.offset > each.offset]
        packed = min([*after, each.block_stride]) - each.offset
        page = packed if each.block_stride else each.size // kv_cache_config.num_blocks
        pages.update(dict.fromkeys(each.shared_by, page))
    return pages


def retention_interval(kv_cache_config: Any) -> int | None:
    """Tokens between the boundaries at which vLLM keeps windows and states. 0: only at the end of prompts. None: at
    every boundary.
    """
    kept: dict[str, int | None] = vars(kv_cache_config)
    if "prefix_cache_retention_interval" in kept:
        return kept["prefix_cache_retention_interval"]
    interval: int | None = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL  # in 0.26
    return interval


def extra_tokens(window: Any) -> int:
    """Tokens that a window's spec keeps beyond the window. In 0.26 always 0."""
    extra: int = vars(window).get("extra_retained_tokens", 0)
    return extra


def is_replayed(window: Any) -> bool:
    """Whether vLLM computes a window again after each hit (`bounded_replay`). Before 0.31 never."""
    return bool(vars(window).get("bounded_replay", False))


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """The return value of `get_transfer_results`, in releases that have it."""
    return base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)


def host_hit_source() -> Any:
    """vLLM's name for hits on the host in its statistics; None before 0.32, which has no such names."""
    if "_cache_hit_source" not in vars(base.KVConnectorBase_V1):
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.HOST


def measures_scales(cache_config: Any) -> bool:
    """Whether each process measures the scales of a quantized KV cache itself. After 0.26 vLLM cannot."""
    return bool(vars(cache_config).get("calculate_kv_scales", False))


def configured_backend(vllm_config: Any) -> str:
    """The attention backend that the operator has chosen, or "None"."""
    return str(vllm_config.attention_config.backend)


def backend_of(layer: Any) -> str:
    """The name of the backend that reads and writes a layer's KV. Empty where vLLM has no such layer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # workers have it already

    return str(layer.get_attn_backend().__name__) if isinstance(layer, AttentionLayerBase) else ""


def needs_joint_hits(has_mamba: bool) -> bool:
    """Whether vLLM may offer a device prefix that has its attention blocks but not its state."""
    return has_mamba and _per_group is not None and not _is_opt_in()


def patch_joint_hits() -> None:
    """Patch vLLM so that a hybrid with state groups resumes only where all of its groups can.

    In 0.26, with any connector, the scheduler searches each group on its own and takes the longest hit as computed.
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
