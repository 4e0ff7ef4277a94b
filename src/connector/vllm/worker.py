"""The copying half in one of vLLM's workers: vLLM's tensors, our host region, and what vLLM wants to hear.

    in a worker                  becomes
    register_kv_caches           the tensors are bound, the host region is mapped; nothing is pinned yet
    bind_connector_metadata      the step's plan begins, behind what compute has been given so far
    get_transfer_results         the requests whose loads are over on this rank, each once, however they ended
    build_connector_worker_meta  what else this rank has to report

A step's plan begins before its forward pass: what it stores was computed by the steps before, and what it loads nobody
reads in this one. vLLM zeroes new blocks before it binds, except those that are loaded.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.vllm import versions
from connector.vllm.groups import planned_group_ids
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.metrics import CacheStats, TransferTimes
from connector.vllm.regions import arena_of, shapes_of
from connector.vllm.retry import RetryingCopier
from connector.vllm.settings import LOAD_DEADLINE_SECONDS, STUCK_SECONDS, Settings
from connector.vllm.shares import Share
from connector.vllm.tensors import Registered, group_rows
from cpu_prefix_cache import RankReport
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.worker import CopyWorker

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
NULL_BLOCK = 0  # vLLM's, in every group

# An engine that has nothing to compute steps as fast as it can, to hear of loads. The threads that copy would then get
# their turn at Python every few milliseconds, and a slice of a copy takes half of one (measured: 1 to 12 GB/s, not 53).
IDLE_SECONDS = 0.002
NAP_SECONDS = 0.0002

# From when such an engine hears of a load until it computes: 6.5 ms for 8,192 tokens, 10 for 32,768 (vLLM 0.26, one
# H200: two turns of its loop with a pause of 1 ms in each, and the block tables). So much sooner it is told.
TURNS_SECONDS = 0.012


class WorkerHalf:
    """One rank's share of the cache. `can_fail_loads`: whether vLLM can be told that the load of a request failed.

    Raises ConfigurationError when the host region does not fit, or the tensors are not what the settings say.
    """

    def __init__(self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank: int = vllm_config.parallel_config.rank
        self._takes_blocks = not versions.TAKES_FAILED_REQUESTS and len(kv_cache_config.kv_cache_groups) == 1
        self.can_fail_loads = versions.TAKES_FAILED_REQUESTS or self._takes_blocks
        self._worker: CopyWorker | None = None
        self._share: Share | None = None
        self._waiting: dict[int, str] = {}  # load -> the request that vLLM wants to hear of
        self._destinations: dict[int, Sequence[int]] = {}
        self._bad_blocks: set[int] = set()
        # vLLM copies states, and blocks that were hit in part, before it says that a step begins.
        self._announces = not settings.planner.has_checkpoints and settings.hashes_per_chunk == 1
        self._announced: set[int] = set()  # loads that vLLM takes to be over
        self._computes = self._is_awaited = False
        self._timed: int | None = None  # the number of the step under way, if its output is to be known by it
        self._times = TransferTimes()
        self._report = RankReport(self._rank)
        self._sent = RankReport(self._rank)

    def register_kv_caches(self, kv_caches: Mapping[str, Registered]) -> None:
        self.close()
        all_tensors = [
            group_rows(
                kv_caches, self._kv_cache_config.kv_cache_groups[at].layer_names, self._kv_cache_config.num_blocks
            )
            for at in planned_group_ids(self._kv_cache_config)
        ]
        parallel = self._vllm_config.parallel_config
        all_shapes = shapes_of(self._settings.planner, parallel, self._kv_cache_config)
        here = [at for at, rows in enumerate(all_tensors) if rows]  # other stages of a pipeline have the other groups
        tensors = [all_tensors[at] for at in here]
        shapes = replace(all_shapes, pieces=tuple(all_shapes.pieces[at] for at in here))
        device = tensors[0][0].device
        arena = arena_of(self._settings, self._vllm_config, shapes, device)
        choose = partial(
            choose_copier, shapes, tensors, arena.blocks, pinned=arena, null_block=NULL_BLOCK, loads_first=True
        )
        choice = _in_a_thread(choose, device)
        logger.info("rank %d copies with %s: %s", self._rank, choice.name, choice.reason)
        copier = choice.copier
        if not self.can_fail_loads:
            copier = RetryingCopier(copier, ReferenceCopier(shapes, tensors, arena.blocks, null_block=NULL_BLOCK))
        ranks = parallel.tensor_parallel_size if self._settings.is_shared else 1
        self._share = Share(shapes.pieces, here, len(all_tensors), self._rank % ranks, ranks)
        self._worker = CopyWorker(
            self._rank,
            copier,
            arena,
            threads=True,
            load_seconds=LOAD_DEADLINE_SECONDS if self.can_fail_loads else STUCK_SECONDS,
            on_done=self._times.observe,
        )

    def begin(self, metadata: StepMetadata) -> None:
        """Carry out this rank's share of a step's plan, behind what compute has been given."""
        if self._worker is None or self._share is None or metadata.plan is None:
            return
        self._waiting |= metadata.requests
        self._computes, self._is_awaited = metadata.computes, metadata.is_awaited
        self._timed = metadata.timed
        plan = self._share.of_plan(metadata.plan)
        if self._takes_blocks:
            for transfer in plan.transfers:
                if transfer.id in metadata.requests:
                    self._destinations[transfer.id] = metadata.destinations[transfer.id]
        if self._announced and metadata.computes:
            self._worker.hold_compute(self._announced)
            self._announced.clear()
        elif self._announced:
            self._announced = self._worker.still_open(self._announced)
        # Where a load cannot be failed it is finished, with bytes from before the reset: as old as what runs already.
        self._worker.run(plan if self.can_fail_loads else replace(plan, cancelled=()))

    def results(self) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended here since this was asked last, and those of them that failed."""
        if self._worker is None:
            return set(), set()
        if not self._computes:
            self._nap(self._worker)
        self._report = report = self._worker.report()
        soon = set() if self._computes else self._ending()
        self._announced |= soon
        over = [id for id in self._waiting if id in report.done or id in report.failed or self._is_given_up(id)]
        over += [id for id in self._waiting if id in soon and id not in over]
        received: set[str] = set()
        failed: set[str] = set()
        for id in over:
            request = self._waiting.pop(id)
            received.add(request)
            blocks = self._destinations.pop(id, ())
            if id not in report.done and id not in soon:
                self._fail(id, request)
                failed.add(request)
                self._bad_blocks.update(blocks)
        return received, failed

    def take_bad_blocks(self) -> set[int]:
        """Device blocks of failed loads, for a vLLM that wants to know those."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def reports(self) -> WorkerReports | None:
        """What this rank has finished; None when it was said already and has been heard, in a step that computes and is
        not timed.
        """
        is_news = self._report != self._sent or self._report.done or self._report.failed or self._report.late
        if self._computes and self._timed is None and not is_news:
            return None
        self._sent = self._report
        return WorkerReports((self._report,), self._timed)

    def take_stats(self) -> CacheStats | None:
        """How long what has ended here took, since this was asked last."""
        return self._times.take()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _nap(self, worker: CopyWorker) -> None:
        """In a step that computes nothing, leave Python to the copy threads for a while, or until a load is over. Not
        for long if nobody waits for a copy: a request may come."""
        end = time.monotonic() + (IDLE_SECONDS if self._waiting or self._is_awaited else NAP_SECONDS)
        while worker.is_busy and time.monotonic() < end:
            time.sleep(NAP_SECONDS)
            report = worker.report()
            if any(id in report.done or id in report.failed for id in self._waiting) or self._ending():
                return

    def _ending(self) -> set[int]:
        """The loads that will have ended when vLLM, told now, computes; of those that it waits for."""
        if not self._announces or self._worker is None:
            return set()
        return self._worker.ends_soon(TURNS_SECONDS) & self._waiting.keys()

    def _is_given_up(self, id: int) -> bool:
        """A late load, unless vLLM, told so, would use its blocks at once; we hold them until the copy has ended."""
        return not self._takes_blocks and id in self._report.late

    def _fail(self, id: int, request: str) -> None:
        if not self.can_fail_loads:
            raise RuntimeError(
                f"load {id} for request {request} failed twice, or has not ended in {STUCK_SECONDS:.0f} s, and this "
                "vLLM cannot be told so for a model with several KV cache groups: stopping before wrong bytes are used"
            )
        logger.warning("load %d for request %s failed; its tokens are computed again", id, request)


def _in_a_thread(work: Callable[[], Result], device: torch.device) -> Result:
    """vLLM registers within the memory pool that its sleep mode empties, 0.26 for good. The pool is that of the calling
    thread: what is taken in another lasts."""
    with ThreadPoolExecutor(1) as executor:
        if device.type == "cuda":
            executor.submit(torch.cuda.set_device, device).result()
        return executor.submit(work).result()
