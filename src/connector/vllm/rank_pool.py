"""The part of a rank in the pool of a node: the first rank joins for the engine, and all map the region.

Each of them has the engine's lock, so the engine is there for the keeper until the last of its ranks has ended: till
then a device may write to slots.
"""

from contextlib import ExitStack

import torch
from vllm.config import ParallelConfig

from connector.vllm import ranks
from connector.vllm.node_pool import EnginePool
from connector.vllm.rank_tier import ORDER
from connector.vllm.regions import together
from cpu_prefix_cache.copying import HostArena, JoinedPool
from cpu_prefix_cache.tier import Namespace


class PoolHere:
    """Joined, with rows in this `order`, for which this rank takes blocks of `block_bytes` bytes. Each rank makes one,
    and if one of them raises ConfigurationError, all do.

    The blocks of `arena` are as large as the largest rank requires.
    """

    def __init__(
        self, pool: EnginePool, parallel: ParallelConfig, block_bytes: int, order: str, device: torch.device
    ) -> None:
        of_all = ranks.of_all((block_bytes, order)) if parallel.world_size > 1 else [(block_bytes, order)]
        largest = max(each for each, _ in of_all)
        namespace = Namespace((*pool.namespace.fields, (ORDER, " | ".join(each for _, each in of_all))))
        with ExitStack() as undo:
            with together(parallel):
                if not parallel.rank:
                    joined = JoinedPool.join(pool.pool, largest, namespace, pool.planner)
                    undo.callback(joined.close)
                    joined.give(pool.meeting, parallel.world_size)  # the other ranks, and the scheduler
            with together(parallel):
                if parallel.rank:
                    joined = JoinedPool.taken(pool.meeting, pool.pool, decides=False)
                    undo.callback(joined.close)
                self.arena = HostArena(
                    joined.num_slots,
                    largest,
                    pinned_for=device,
                    region=joined.region(),
                )
                undo.callback(self.arena.close)
            undo.pop_all()
        self._joined = joined

    def close(self) -> None:
        """No copy is under way any more."""
        self._joined.close()
