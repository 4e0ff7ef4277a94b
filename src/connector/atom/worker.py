"""The worker half, on each rank: a host region, a copier and a CopyWorker behind ATOM's calls.

    register_kv_caches    the tensors are bound, and host memory is taken; what does not fit is refused here
    start_load_kv         the plan of a step begins, before its forward pass is launched: its stores read what passes
                          launched before have written, and they and its loads are ordered after these
    get_finished          reports of this rank, after the pass was launched (messages.py)

A load is reported as failed only when nothing writes its blocks any more, because ATOM then computes into them.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from atom.kv_transfer.disaggregation.base import KVConnectorBase
from atom.kv_transfer.disaggregation.types import ConnectorCompletion, KVConnectorOutput

from connector.atom import geometry
from connector.atom.messages import StepMetadata, Unfit, Unpinned, ready_operations
from connector.atom.rank_tier import RepeatingTier, rank_here
from connector.atom.settings import Settings
from connector.atom.tensors import BoundTensors, bind
from connector.atom.tier_settings import tier_settings
from connector.common.deadlines import LOAD_SECONDS
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import CopyWorker, HostArena, choose_copier
from cpu_prefix_cache.deciding import HybridChunkPlanner

logger = logging.getLogger(__name__)

RANK = 0  # of reports that stay in this process: ATOM joins those of all ranks


class CPUPrefixCacheWorker(KVConnectorBase):
    """One rank's share of the cache.

    Raises ConfigurationError if ATOM's config does not fit.
    """

    is_producer = False

    def __init__(self, config: Any) -> None:
        self._settings = Settings.of(config)
        self._config = config
        self._bound: BoundTensors | None = None
        self._arena: HostArena | None = None
        self._worker: CopyWorker | None = None
        self._tier: RepeatingTier | None = None
        self._told: int | None = None  # how many ready host blocks the scheduler side knows of; None: nothing yet

    def register_kv_caches(
        self, kv_caches: Mapping[str, Any], transfer_tensors: Any = None, num_blocks: int | None = None
    ) -> None:
        """Raises ConfigurationError for KV that is not in blocks, and if host memory is too small, or too large."""
        if num_blocks is None:
            raise ConfigurationError("the host cache must know how many blocks ATOM's scheduler has: pass num_blocks")
        if self._worker is not None:
            raise ConfigurationError(
                "ATOM has registered its KV a second time, and what the host keeps is of the first: start it again"
            )
        bound = bind(kv_caches, transfer_tensors, num_blocks, self._settings.codec)
        planner = self._settings.planner(bound.block_bytes)
        host_blocks = self._settings.host_blocks(planner)
        arena = HostArena(host_blocks, planner.host_block_bytes, pinned_for=bound.device)
        self._tier = self._open_tier(planner, bound, arena)
        tensors = (bound.tensors[geometry.PAGES],) * len(planner.groups)
        choice = choose_copier(planner, tensors, arena.blocks, pinned=arena, loads_first=True)
        logger.info("the host cache copies with %s: %s", choice.name, choice.reason)
        self._bound, self._arena = bound, arena
        threads = bound.device.type == "cuda"
        self._worker = CopyWorker(RANK, choice.copier, arena, threads=threads, load_seconds=LOAD_SECONDS)

    def start_load_kv(self, metadata: Any) -> None:
        """Metadata of another connector is not ours."""
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._told = metadata.ready_blocks
            self._worker.run(geometry.for_ranks(metadata.plan))
            if self._tier is not None and metadata.tier is not None:
                self._tier.run(metadata.tier)

    def get_finished(self) -> KVConnectorOutput:
        completions = {ConnectorCompletion(geometry.CHANNEL, *each) for each in self._unanswered()}
        return KVConnectorOutput(connector_completions=completions)

    def close(self) -> None:
        """Wait for copies, and give the host memory back."""
        if self._tier is not None:
            self._tier.close()  # first: it reads and writes the region, which the worker closes
            self._tier = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _open_tier(self, planner: HybridChunkPlanner, bound: BoundTensors, arena: HostArena) -> RepeatingTier | None:
        if self._settings.tier is None:
            return None
        try:
            settings = tier_settings(self._settings.tier, self._config, planner)
            return RepeatingTier(settings, planner, bound, arena.blocks, rank_here(self._config))
        except BaseException:
            arena.close()
            raise

    def _unanswered(self) -> Iterator[tuple[Hashable, bool]]:
        """Reports of this rank that are not answered yet: operations, and whether they have succeeded."""
        if self._worker is None or self._bound is None or self._arena is None:
            return
        report = self._worker.report()
        unfit = dict(report.unfit)  # none of such a store is kept, as ATOM may pass on its end and drop its Unfit
        yield from ((Unfit(rank_here(self._config), *each), True) for each in report.unfit)
        yield from ((id, id not in unfit) for id in report.done)
        yield from ((id, False) for id in report.failed)
        if self._told is None:
            yield geometry.as_operation(self._bound.block_bytes), True
        yield from ((operation, True) for operation in self._news_of_memory(self._arena, report.ready_blocks or 0))
        below = None if self._tier is None or self._told is None else self._tier.news()
        if below is not None:
            yield below, True

    def _news_of_memory(self, arena: HostArena, ready: int) -> Iterator[Hashable]:
        """How many host blocks are ready. With the last of them, how much of them is not pinned."""
        told, blocks = self._told or 0, arena.blocks.shape[0]
        is_whole = ready == blocks and arena.wait_until_ready(0)
        yield from ready_operations(told, ready if is_whole else min(ready, blocks - 1), blocks)
        unpinned = 0 if arena.registration is None else arena.blocks.nbytes - arena.pinned_bytes
        if is_whole and told < blocks and unpinned:
            yield Unpinned(rank_here(self._config), unpinned)
