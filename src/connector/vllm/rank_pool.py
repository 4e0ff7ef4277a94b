"""The worker's part in the pool of a node: it joins for the engine, maps the region, and gives its seat on."""

import torch

from connector.vllm.node_pool import EnginePool
from connector.vllm.rank_tier import ORDER
from cpu_prefix_cache.copying import HostArena, JoinedPool
from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.tier import Namespace


class PoolHere:
    """Joined, with rows in this `order`. Raises ConfigurationError where that cannot be."""

    def __init__(self, pool: EnginePool, planner: HybridChunkPlanner, order: str, device: torch.device) -> None:
        namespace = Namespace((*pool.namespace.fields, (ORDER, order)))
        self._joined = joined = JoinedPool.join(pool.pool, planner, namespace)
        self.num_bytes = joined.num_bytes
        try:
            self.arena = HostArena(
                joined.num_slots,
                planner.host_block_bytes,
                pinned_for=device,
                region=joined.region(),
            )
            joined.give(pool.meeting)
        except BaseException:
            joined.close()
            raise

    def close(self) -> None:
        """No copy is under way any more."""
        self._joined.close()
