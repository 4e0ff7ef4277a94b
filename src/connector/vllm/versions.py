"""What differs between the releases of vLLM this connector runs with, decided once, when it is imported.

Known by what vLLM has, not by its number: a release in between behaves as what it has. The numbers say only where the
tests have been: 0.26.0 (on a GPU), 0.32.0 (its CPU build), and 0.33.0 (its base class alone).

    before 0.28   a failed load is told by block ids, which vLLM refuses in models with several groups
    later         by the names of requests
    before 0.28   blocks of windows and states are kept everywhere, windows in no other way than this
    before 0.28   a Mamba hybrid with any connector is given the longest hit of a group, not the joint one
"""

import logging
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)

TESTED = ((0, 26), (0, 33))  # the first and the last

# Whether vLLM takes the names of requests whose load has failed.
TAKES_FAILED_REQUESTS = any(field.name == "failed_recving" for field in fields(KVConnectorOutput))


def failed_requests(output: KVConnectorOutput) -> set[str]:
    """Those of `finished_recving` whose load has failed; before 0.28, if any has, all of them may have."""
    if TAKES_FAILED_REQUESTS:
        return set(output.failed_recving or ())
    return set(output.finished_recving or ()) if output.invalid_block_ids else set()


def warn_if_untested() -> None:
    """Outside of the range everything may work, and nobody has looked."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release is None or not TESTED[0] <= release <= TESTED[1]:
        (first, last) = (f"{major}.{minor}" for major, minor in TESTED)
        logger.warning(
            "CPUPrefixCacheConnector was tested with vLLM %s to %s; this is %s", first, last, vllm.__version__
        )


def layer_pages(kv_cache_config: Any) -> dict[str, int]:
    """How many bytes of each block every layer is given, padding included."""
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
    """Tokens between the boundaries at which vLLM keeps windows and states, 0 for the end of prompts alone; None:
    everywhere, as before 0.28."""
    interval: int | None = vars(kv_cache_config).get("prefix_cache_retention_interval")
    return interval


def extra_tokens(window: Any) -> int:
    """What a window keeps beyond what is seen, by its specification. Before 0.28 nothing."""
    extra: int = vars(window).get("extra_retained_tokens", 0)
    return extra


def is_computed_again(window: Any) -> bool:
    """Whether vLLM computes a window again after each hit, by its specification. Before 0.28 never."""
    return bool(vars(window).get("bounded_replay", False))


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` returns, where vLLM asks for it."""
    return base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)


def host_hit_source() -> Any:
    """How vLLM's statistics name hits on the host; None where they do not tell sources apart."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def needs_joint_hits(has_mamba: bool) -> bool:
    """Whether vLLM would ask about a prefix of which it has the attention and not the state."""
    return has_mamba and _per_group is not None and not _is_opt_in()


def give_joint_hits() -> None:
    """Let a hybrid with state groups resume only where all of its groups can.

    Before 0.28 the scheduler asks every group by itself as soon as a connector is configured, and takes the longest
    answer as computed: the state of a shorter one is then read from null block 0. Two connectors of one process share
    the patch, which says what the joint search says.
    """
    kv_cache_coordinator.HybridKVCacheCoordinator.find_longest_cache_hit_per_group = _joint_hit


def _joint_hit(self: Any, block_hashes: Any, max_cache_hit_length: int) -> tuple[Any, tuple[int, ...]]:
    blocks, length, _ = self.find_longest_cache_hit(block_hashes, max_cache_hit_length)
    return blocks, (length,) * len(blocks)


def _is_opt_in() -> bool:
    """Whether a connector must ask for hits that differ between groups, which ours does not."""
    return "supports_divergent_local_hybrid_hits" in vars(base.KVConnectorBase_V1)


_per_group: Callable[..., Any] | None = vars(kv_cache_coordinator.HybridKVCacheCoordinator).get(
    "find_longest_cache_hit_per_group"
)
