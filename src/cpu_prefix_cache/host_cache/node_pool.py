"""The part of a HostCache in the pool of a node, in which it is found by how its blocks lie."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpu_prefix_cache.host_cache.host_tier import layouts_of
from cpu_prefix_cache.keeper.kept_cache import check_takes
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node.settings import NodePool

if TYPE_CHECKING:
    from cpu_prefix_cache.kv_layout import KVGroup
    from cpu_prefix_cache.node.joined_pool import JoinedPool


def joined(pool: NodePool, planner: HybridChunkPlanner, groups: "Sequence[KVGroup]") -> "JoinedPool":
    """Raises ConfigurationError where it cannot be joined, and for a model that a keeper does not take."""
    from cpu_prefix_cache.node.joined_pool import JoinedPool

    if not isinstance(pool, NodePool):
        raise ConfigurationError(
            'pool must be NodePool("unix:/PATH", model=..., revision=...), since a keeper does not tell whose '
            f"KV it holds; got {pool!r}"
        )
    check_takes(planner)
    namespace = pool.namespace(planner, dtype="in each group's layout", ranks=1, extra=layouts_of(groups))
    return JoinedPool.join(pool, planner.host_block_bytes, namespace, planner)
