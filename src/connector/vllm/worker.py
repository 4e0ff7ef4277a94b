"""The worker half: copies between vLLM's tensors and the host region, and reports to vLLM.

    vLLM's call                  here
    register_kv_caches           binds the tensors and maps the host region; pins nothing yet
    bind_connector_metadata      starts the step's plan, after the GPU work that was launched before
    get_transfer_results         requests whose loads have ended on this rank, each once, however they ended
    build_connector_worker_meta  what this rank has to report to the scheduler half

A step's plan starts before its forward pass: its stores read what earlier steps computed. vLLM zeroes new blocks before
this call, except destinations of loads that requests wait for. Nothing in this step reads what these load; for other
loads its compute waits. What the step does with the tier below host memory follows (`rank_tier.py`).
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.common.deadlines import LOAD_SECONDS
from connector.vllm.ended_loads import EndedLoads
from connector.vllm.groups import planned_group_ids
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.metrics import CacheStats, TierMoves, TransferTimes
from connector.vllm.node_pool import EnginePool
from connector.vllm.rank_pool import PoolHere
from connector.vllm.rank_tier import TierHere, tier_of_rank
from connector.vllm.regions import RankShapes, agree, arena_of, shapes_of
from connector.vllm.settings import Settings
from connector.vllm.shares import Share
from connector.vllm.start_line import start_line
from connector.vllm.tensors import Registered, group_rows, order_of
from connector.vllm.tier_namespace import row_order
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import CopyWorker, EarlyEnds, HostArena, choose_copier
from cpu_prefix_cache.deciding import RankReport
from cpu_prefix_cache.tier import TierReport

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
NULL_BLOCK = 0  # vLLM's, in every group

# While loads are in flight, an engine without tokens to compute steps as fast as it can and keeps the GIL. So a worker
# sleeps up to this long in each such step. Otherwise copy threads would get the GIL only every few milliseconds, and a
# slice of a copy takes half of one (measured: 1 to 12 GB/s in place of 53).
IDLE_SECONDS = 0.002
NAP_SECONDS = 0.0002

# A load is announced this long before it ends. From the report to the step that computes it takes 9 to
# 14 ms (vLLM 0.32). With 18 ms the first token of 32,768 comes 1 to 3 ms sooner than with 12 (H100 and H200).
RESUME_SECONDS = 0.018


class WorkerHalf:
    """One rank's share of the cache.

    Raises ConfigurationError when the host region does not fit, or the tensors do not match the settings.
    """

    def __init__(self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank: int = vllm_config.parallel_config.rank
        self._worker: CopyWorker | None = None
        self._arena: HostArena | None = None
        self._share: Share | None = None
        self._tier: TierHere | None = None
        self._pool: PoolHere | None = None
        self._tier_moves = TierMoves()
        self._waiting: dict[int, str] = {}  # load in flight -> its request
        self._unplanned: set[int] = set()  # of these, the loads that are in no plan
        self._ended = EndedLoads()
        # Loads can be announced early only if compute first reads their blocks after `begin`. That is not so where vLLM
        # copies states, or blocks that were hit in part: it does that before `bind_connector_metadata`.
        self._announces = not settings.planner.has_checkpoints and settings.hashes_per_chunk == 1
        self._early: EarlyEnds | None = None
        self._announced: set[int] = set()  # loads reported to vLLM before their end
        self._computes = self._is_awaited = False
        self._timed: int | None = None  # the number of the present step, if its duration is measured
        self._times = TransferTimes()
        self._report = RankReport(self._rank)
        self._sent = RankReport(self._rank)
        self._tier_sent: TierReport | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, Registered]) -> None:
        self.close()
        all_tensors = [
            group_rows(
                kv_caches, self._kv_cache_config.kv_cache_groups[at].layer_names, self._kv_cache_config.num_blocks
            )
            for at in planned_group_ids(self._kv_cache_config)
        ]
        parallel = self._vllm_config.parallel_config
        in_pages = self._settings.tier is not None
        try:
            all_shapes = shapes_of(self._settings.planner, parallel, self._kv_cache_config, in_pages=in_pages)
        except ConfigurationError as error:  # of the layers of this stage
            agree(parallel, error)
            raise
        here = [at for at, rows in enumerate(all_tensors) if rows]  # pipeline stages may lack groups
        tensors = [all_tensors[at] for at in here]
        shapes = replace(all_shapes, pieces=tuple(all_shapes.pieces[at] for at in here))
        device = tensors[0][0].device
        if self._settings.pool is not None:
            shapes = self._join(self._settings.pool, shapes, self._order(kv_caches), device)
        arena = self._pool.arena if self._pool else arena_of(self._settings, self._vllm_config, shapes, device)
        self._arena = arena
        self._tier = self._open_tier(arena, all_shapes, kv_caches)
        by_lane = shapes.by_lane()
        lanes = arena.blocks.view(-1, by_lane.host_block_bytes)
        choose = partial(choose_copier, by_lane, tensors, lanes, pinned=arena, null_block=NULL_BLOCK, loads_first=True)
        choice = _in_a_thread(choose, device)
        if not self._rank:
            logger.info(start_line(self._settings, self._vllm_config.model_config.max_model_len, choice))
        ranks = self._settings.sharers
        self._share = Share(shapes.pieces, here, len(all_tensors), self._rank % ranks, ranks, shapes.lanes)
        self._worker = CopyWorker(
            self._rank,
            choice.copier,
            arena,
            threads=True,
            load_seconds=LOAD_SECONDS,
            on_done=self._times.observe,
        )
        self._early = EarlyEnds(self._worker, choice.copier)

    def _join(self, pool: EnginePool, shapes: RankShapes, order: str, device: torch.device) -> RankShapes:
        """Join the pool. The shapes of this rank in its slots, which are as large as the largest rank requires."""
        parallel = self._vllm_config.parallel_config
        self._pool = joined = PoolHere(pool, parallel, shapes.host_block_bytes, order, device)
        self._settings = replace(self._settings, host_bytes=joined.arena.blocks.numel())
        return replace(shapes, host_block_bytes=joined.arena.blocks.shape[1])

    def _order(self, kv_caches: Mapping[str, Registered]) -> str:
        """How rows lie in the host blocks of this rank."""
        config = self._kv_cache_config
        orders = {name: order_of(registered, config.num_blocks) for name, registered in kv_caches.items()}
        return row_order(config, orders, self._vllm_config.compilation_config.static_forward_context)

    def _open_tier(self, arena: HostArena, shapes: RankShapes, kv_caches: Mapping[str, Registered]) -> TierHere | None:
        if self._settings.tier is None:
            return None
        parallel = self._vllm_config.parallel_config
        try:
            return tier_of_rank(self._settings, parallel, shapes, arena.blocks, self._order(kv_caches))
        except BaseException:
            arena.close()
            raise

    def begin(self, metadata: StepMetadata) -> None:
        """Start this rank's share of a step's plan, after the GPU work that was launched before."""
        if self._worker is None or self._share is None or self._early is None or metadata.plan is None:
            return
        self._waiting |= metadata.requests
        if metadata.requests:
            self._unplanned = metadata.requests.keys() - {transfer.id for transfer in metadata.plan.transfers}
        self._computes, self._is_awaited = metadata.computes, metadata.is_awaited
        self._timed = metadata.timed
        if self._announced:
            if metadata.computes:
                self._early.hold_compute(self._announced)
                self._announced.clear()
            else:
                self._announced = self._early.still_open(self._announced)
        self._worker.run(self._share.of_plan(metadata.plan))
        if loads := metadata.computed_on:
            self._early.hold_compute(loads)
        if self._tier is not None and metadata.tier is not None:
            self._tier.run(metadata.tier)

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended on this rank, each once, and those of them that failed. A step that computes
        may leave some to a later one (`ended_loads.py`).
        """
        if self._worker is None or self._share is None:
            return set(), set()
        if not self._computes:
            self._nap(self._worker)
        self._report = report = self._share.of_report(self._worker.report())
        soon = set() if self._computes else self._ending_soon()
        self._announced |= soon
        ended = report.done | report.failed | self._unplanned
        over = [id for id in self._waiting if id in ended or id in report.late]
        over += [id for id in self._waiting if id in soon and id not in over]
        for id in over:
            request, has_failed = self._waiting.pop(id), id not in report.done and id not in soon
            if has_failed:
                logger.warning("load %d for request %s failed; its tokens are computed again", id, request)
            self._ended.add(request, failed=has_failed)
        return self._ended.take(more=self._computes and bool(self._waiting))

    def reports(self) -> WorkerReports | None:
        """Reports on what this rank has finished. None in a step that computes and is not timed, if nothing is new."""
        is_news = self._report != self._sent or self._report.done or self._report.failed or self._report.late
        below = None if self._tier is None else self._tier.report()
        if self._computes and self._timed is None and not is_news and not self._is_news(below):
            return None
        self._sent, self._tier_sent = self._report, below
        prepared = (self._rank,) if self._is_prepared() else ()
        return WorkerReports((self._report,), self._timed, () if below is None else (below,), prepared)

    def _is_prepared(self) -> bool:
        """Whether this rank's host region has as many ready blocks as it will ever have."""
        return self._arena is None or self._arena.wait_until_ready(0)

    def _is_news(self, below: TierReport | None) -> bool:
        """Whether there is a report of the tier, for the first time or until a plan has taken it in."""
        return below is not None and (below != self._tier_sent or below.is_repeated)

    def take_stats(self) -> CacheStats | None:
        """The durations of transfers that ended on this rank since the last call, and what its tier has moved."""
        times = self._times.take()
        statistics = None if self._tier is None else self._tier.statistics()
        moved = None if statistics is None else self._tier_moves.take(statistics)
        if times is None or moved is None:
            return moved if times is None else times
        return times.aggregate(moved)

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()  # first: it reads and writes the region, which the worker closes
            self._tier = None
        if self._worker is not None:
            self._worker.close()
            self._worker = self._arena = self._early = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _nap(self, worker: CopyWorker) -> None:
        """In a step that computes nothing, leave the GIL to the copy threads, until a load ends or for IDLE_SECONDS.

        Only for NAP_SECONDS if no request waits for a copy, because a new one may arrive.
        """
        end = time.monotonic() + (IDLE_SECONDS if self._waiting or self._is_awaited else NAP_SECONDS)
        tier = self._tier
        before = None if tier is None else tier.report()
        while self._is_busy(worker) and time.monotonic() < end:
            time.sleep(NAP_SECONDS)
            if tier is not None and tier.report() != before:
                return
            report = worker.report()
            if any(id in report.done or id in report.failed for id in self._waiting) or self._ending_soon():
                return

    def _is_busy(self, worker: CopyWorker) -> bool:
        return worker.is_busy or (self._tier is not None and self._tier.is_busy) or not self._is_prepared()

    def _ending_soon(self) -> set[int]:
        """The loads in flight that will have ended by the time vLLM computes, if they are announced now."""
        if self._early is None or not self._announces:
            return set()
        return self._early.ends_soon(RESUME_SECONDS) & self._waiting.keys()


def _in_a_thread(work: Callable[[], Result], device: torch.device) -> Result:
    """Run `work` in another thread, so that device memory it allocates survives vLLM's sleep mode.

    vLLM registers KV caches within a memory pool that sleep mode frees. That pool applies to the calling thread only.
    """
    with ThreadPoolExecutor(1) as executor:
        if device.type == "cuda":
            executor.submit(torch.cuda.set_device, device).result()
        return executor.submit(work).result()
