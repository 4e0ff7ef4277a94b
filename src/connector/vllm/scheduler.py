"""The scheduler's calls, one method each. They translate, and decide nothing.

    in the scheduler                    becomes
    get_num_new_matched_tokens          cache.lookup
    update_state_after_alloc            cache.admit, cache.load; cache.preempted if it was admitted before
    build_connector_meta                cache.preempted, cache.computed, then cache.step
    update_connector_output             cache.invalidated, cache.report, cache.goes_on, cache.catch_up
    request_finished                    cache.finished
    reset_cache                         cache.reset

A load is asynchronous: vLLM allocates its destinations, sets the request aside, and takes it up again when every rank
has named it in `finished_recving`. A step, as the cache must see it:

    schedule N      lookup, admit, load ...       blocks are allocated, and hashed before they hold anything
      its end       preempted, computed, step     what steps up to N-1 computed may be stored with step N
    step N          the ranks copy and compute
    its output      report, finished
"""

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from connector.vllm import versions
from connector.vllm.device import VllmDevice
from connector.vllm.events import block_events
from connector.vllm.keys import ChunkKeys
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.metrics import CacheCounts, CacheStats
from connector.vllm.settings import Settings
from cpu_prefix_cache import Hit, Pending, Request, StepPlan
from cpu_prefix_cache.offload import break_even

logger = logging.getLogger(__name__)

# What a request may say in `kv_transfer_params`: false keeps the cache from loading for it, or from storing what it
# computes.
LOAD, STORE = "cpu_prefix_cache_load", "cpu_prefix_cache_store"


class SchedulerHalf:
    """A CPUPrefixCache beside vLLM's scheduler and over its block pool.

    What it remembers is what vLLM says once: the requests it admitted, how much of each was on the device when the
    cache was asked, and, until the step's plan has gone out, which load is for whom and who was admitted again.
    """

    def __init__(self, settings: Settings, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.device = VllmDevice(
            pool, settings.planner, settings.group_ids, self._hashes_to_come, settings.hashes_per_chunk
        )
        self.cache = settings.build(self.device)
        self._counts = CacheCounts(self.cache)
        self.clock = clock
        self._planner = settings.planner
        self._group_ids = settings.group_ids
        self._grid = settings.planner.grid_tokens
        self._hashes_per_chunk = settings.hashes_per_chunk
        self._hash_tokens = self._grid // settings.hashes_per_chunk
        self._on_device: dict[str, int] = {}
        self._admitted: dict[str, EngineRequest] = {}
        self._seen: dict[str, int] = {}  # how many chunks of it the device was told of
        self._loads: dict[int, str] = {}
        self._destinations: dict[int, Sequence[int]] = {}
        self._readmitted: set[str] = set()
        self._has_failed: set[str] = set()  # whose load has: a second would be for blocks that vLLM may never find
        self._deciding: SchedulerOutput | None = None  # the step, while its plan is made
        self._to_come: Container[bytes] | None = ()
        self._steps = 0
        self._begun: dict[int, tuple[int, float]] = {}  # timed steps under way: their tokens, and when they began

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._on_device[request.request_id] = num_computed_tokens
        if request.skip_reading_prefix_cache or not _wants(request, LOAD) or request.request_id in self._has_failed:
            return 0, False
        answer = self.cache.lookup(self._request(request), num_computed_tokens, self.clock())
        if isinstance(answer, Pending):
            return None, False
        if isinstance(answer, Hit):
            return answer.boundary - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        id = request.request_id
        if request.num_computed_tokens:
            return  # its load is over, and it was admitted before that
        n0 = self._on_device.pop(id)
        boundary = n0 + num_external_tokens
        ours = self._request(request)
        # What was found must not be evicted by what the request itself leaves behind.
        lease = self.cache.reserve(ours, boundary) if num_external_tokens else None
        if id in self._admitted:
            self._lost_its_blocks(id)
        self._admitted[id] = request
        self._see(request, n0)
        tables = blocks.get_block_ids()
        with self.device.given(self._new_blocks(tables, n0)):
            self.cache.admit(ours, n0, boundary, self.clock())
        if num_external_tokens:
            positions = self._planner.positions(n0 // self._grid, boundary // self._grid)
            destinations = [
                [tables[group][at] for at in found] for group, found in zip(self._group_ids, positions, strict=True)
            ]
            load = self.cache.load(id, boundary, destinations, self.clock())
            self._loads[load] = id
            if not versions.TAKES_FAILED_REQUESTS:
                self._destinations[load] = [block for found in destinations for block in found]
        if lease is not None:
            self.cache.release(lease)

    def _new_blocks(self, tables: Sequence[Sequence[int]], n0: int) -> frozenset[int]:
        """What a request was given behind token `n0`, hashed already; only models with checkpoints ask."""
        if not self._planner.has_checkpoints:
            return frozenset()
        groups = zip(self._group_ids, self._planner.groups, strict=True)
        return frozenset(block for at, group in groups for block in tables[at][n0 // group.block_tokens :])

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        self._deciding, self._to_come = output, None
        try:
            plan = self._plan(output)
        finally:
            self._deciding, self._to_come = None, ()
        requests, self._loads = self._loads, {}
        destinations, self._destinations = self._destinations, {}
        # Who was asked for and not admitted waits for another's load, or for room.
        is_awaited = bool(self._on_device)
        tokens = output.total_num_scheduled_tokens
        return StepMetadata(plan, requests, tokens > 0, destinations, is_awaited, self._begin_timing(tokens))

    def _begin_timing(self, tokens: int) -> int | None:
        """The number of a step that begins now, if its time is to be taken."""
        if tokens < break_even.MIN_TIMED_TOKENS:
            return None
        self._steps += 1
        self._begun[self._steps] = tokens, self.clock()
        return self._steps

    def _end_timing(self, step: int) -> None:
        """This step has ended, and those before it, whatever became of their outputs."""
        while self._begun and (first := next(iter(self._begun))) <= step:
            tokens, began = self._begun.pop(first)
            if first == step:
                self.cache.prefilled(tokens, self.clock() - began)

    def _plan(self, output: SchedulerOutput) -> StepPlan:
        for id in output.preempted_req_ids or ():
            if id not in self._readmitted:
                self._preempted(id)
        self._readmitted.clear()
        for id in self.cache.due():
            request = self._admitted[id]
            # Until vLLM has looked after a request whose load is over, its blocks are counted and not hashed.
            waits = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            tokens = 0 if waits else _computed_tokens(request)
            self._see(request, tokens)
            self.cache.computed(id, tokens)
        return self.cache.step()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.invalid_block_ids:
            self.cache.invalidated(output.invalid_block_ids)
        reports: WorkerReports | None = output.kv_connector_worker_meta
        for report in reports.reports if reports is not None else ():
            for each in self.cache.report(report):
                if each.request_id in self._admitted and not each.ok:
                    self._has_failed.add(each.request_id)
        for id in (output.finished_recving or set()) - versions.failed_requests(output):
            self.cache.goes_on(id)
        self.cache.catch_up()
        if reports is not None and reports.timed is not None:
            self._end_timing(reports.timed)

    def request_finished(self, request: EngineRequest) -> None:
        self._on_device.pop(request.request_id, None)
        self._has_failed.discard(request.request_id)
        if self._admitted.pop(request.request_id, None) is not None:
            tokens = _computed_tokens(request)
            self._see(request, tokens)
            self._seen.pop(request.request_id, None)
            self.cache.finished(request.request_id, tokens)

    def reset_cache(self) -> None:
        self.cache.reset()

    def has_transfers(self) -> bool:
        return self.cache.has_transfers

    def take_stats(self) -> CacheStats | None:
        return self._counts.take()

    def take_events(self) -> list[KVCacheEvent]:
        return block_events(self.cache.take_events(), self._grid)

    def _request(self, request: EngineRequest) -> Request:
        keys = ChunkKeys.of(request.block_hashes, self._hashes_per_chunk)
        return Request(request.request_id, keys, request.num_tokens, stores=_wants(request, STORE))

    def _see(self, request: EngineRequest, num_tokens: int) -> None:
        """The device has the chunks of so many tokens of an admitted request."""
        start = self._seen.get(request.request_id, 0)
        stop = min(num_tokens // self._grid, len(request.block_hashes) // self._hashes_per_chunk)
        if start < stop:
            self.device.saw(request.block_hashes, start, stop)
            self._seen[request.request_id] = stop

    def _preempted(self, id: str) -> None:
        request = self._admitted.pop(id, None)
        computed = 0
        if request is not None and request.num_output_tokens:
            # The last one was sampled when all before it had been computed; vLLM has set that count to 0 by now.
            computed = request.num_tokens - 1
            if not self._planner.has_checkpoints:
                self._see(request, computed)
        self._seen.pop(id, None)
        self.cache.preempted(id, computed)

    def _lost_its_blocks(self, id: str) -> None:
        """The request was admitted before: its load failed, or a reset preempted it and this very step resumes it."""
        self._readmitted.add(id)
        self._to_come = _EVERYTHING  # other requests of this step, unknown before its end, may have hashed such blocks
        self._preempted(id)
        self._to_come = ()

    def _hashes_to_come(self) -> Container[bytes]:
        """Under which blocks in use hold nothing yet. Seldom asked for, and then often in a step."""
        if self._to_come is None:
            self._to_come = frozenset() if self._deciding is None else frozenset(self._filled_by(self._deciding))
        return self._to_come

    def _filled_by(self, output: SchedulerOutput) -> Iterator[bytes]:
        """The hashes of the blocks that this step computes."""
        for id, num_tokens in output.num_scheduled_tokens.items():
            request = self._admitted[id]
            before = request.num_computed_tokens
            yield from request.block_hashes[before // self._hash_tokens : (before + num_tokens) // self._hash_tokens]


class _Everything(Container[bytes]):
    def __contains__(self, key: object) -> bool:
        return True


_EVERYTHING = _Everything()


def _wants(request: EngineRequest, what: str) -> bool:
    params: dict[str, Any] | None = request.kv_transfer_params
    said = True if params is None else params.get(what, True)
    if type(said) is not bool:
        _warn_of(what, repr(said))
    return said is not False


@lru_cache(16)
def _warn_of(what: str, said: str) -> None:
    """A request cannot be refused from here: it is served as if it had said nothing. Once for each value."""
    logger.warning("%s in kv_transfer_params is true or false, got %s: taken for true", what, said)


def _computed_tokens(request: EngineRequest) -> int:
    """Tokens whose KV the steps so far compute, less those that only stand for a token not sampled yet."""
    return max(0, int(request.num_computed_tokens - request.num_output_placeholders))
