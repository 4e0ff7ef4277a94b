"""The scheduler half: translates vLLM's calls into calls of CPUPrefixCache. It decides nothing.

    vLLM's call                         becomes
    on_new_request                      cache.queued, if it is tiered; cache.expected for prompts that it hints
    get_num_new_matched_tokens          cache.lookup
    update_state_after_alloc            cache.admit, cache.load; cache.preempted if it was admitted before
    build_connector_meta                cache.preempted, cache.computed, then cache.step, and plan_below if it is tiered
    update_connector_output             cache.invalidated, cache.report, cache.goes_on, cache.catch_up; report_below
    request_finished                    cache.finished; cache.abandoned if it is tiered and the request was not admitted
    reset_cache, and any call           cache.reset, if vLLM has reset its connectors or the device (`resets.py`)

A load is asynchronous: vLLM allocates its destinations and *parks* the request, until every rank has named it in
`finished_recving`. For a short one it schedules the request at once, and the ranks have compute wait. One engine step:

    schedule N      lookup, admit, load ...       blocks are allocated, and get their hashes before they hold KV
      its end       preempted, computed, step     tokens that steps up to N-1 computed may be stored with step N
    step N          the ranks copy and compute
    its output      report, finished
"""

import logging
import time
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from connector.common.next_use import next_use_of
from connector.common.request_flags import LOAD, STORE, allows
from connector.tier.revision import reset
from connector.vllm import versions
from connector.vllm.adapters import Adapters
from connector.vllm.device import VllmDevice
from connector.vllm.events import LOCAL, REMOTE, KVEvents
from connector.vllm.keys import ChunkKeys
from connector.vllm.kv_hints import next_use_of_actions, sessions_to_come
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.metrics import CacheCounts, CacheStats
from connector.vllm.pool_view import PoolView
from connector.vllm.requests import Known, KnownRequests
from connector.vllm.resets import UNTIL, Resets
from connector.vllm.sessions import Sessions
from connector.vllm.settings import Settings
from connector.vllm.step_ends import StepEnds
from cpu_prefix_cache import Hit, Pending
from cpu_prefix_cache.deciding import (
    MIN_TIMED_TOKENS,
    CPUPrefixCache,
    KeptCache,
    Request,
    StepPlan,
    TierCache,
    TieredCache,
)
from cpu_prefix_cache.tier import TierPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """News since the last plan was sent."""

    loads: dict[int, str] = field(default_factory=dict)  # each with the request that waits for it
    awaited_tokens: int = 0  # of loads that its compute waits for
    readmitted: set[Hashable] = field(default_factory=set)


class SchedulerHalf:
    """A CPUPrefixCache over vLLM's block pool, or a KeptCache, called by vLLM's scheduler."""

    def __init__(
        self,
        settings: Settings,
        pool: PoolView,
        clock: Callable[[], float] = time.monotonic,
        is_alone: bool = False,
    ) -> None:
        self.device = VllmDevice(
            pool,
            settings.planner,
            settings.group_ids,
            self._unwritten_hashes,
            settings.hashes_per_chunk,
            is_alone=is_alone,
            # Blocks that a window has passed are free while a step under way still has them in its table.
            overlaps=settings.overlaps and versions.defers_frees() and not settings.replayed_tokens,
        )
        self.cache = settings.build(self.device)
        self.tier = self.cache if isinstance(self.cache, TieredCache) else None
        self._sessions = Sessions(settings.hashes_per_chunk)
        self._counts = CacheCounts(self.cache, self._sessions.counts)
        self._events: KVEvents | None = None
        if settings.publishes_events and isinstance(self.cache, CPUPrefixCache):  # a pool has none
            sizes = settings.planner.grid_tokens, settings.hashes_per_chunk
            self._events = KVEvents(self.cache, *sizes, tier_locality=REMOTE if settings.shares_tier else LOCAL)
        self._revision_file = settings.revision_file
        self._adapters = Adapters(UNTIL[settings.reset], settings.revision)
        self._resets = Resets(settings.reset, pool, self._empty)
        self.clock = clock
        self._planner = settings.planner
        self._group_ids = settings.group_ids
        self._grid = settings.planner.grid_tokens
        self._hashes_per_chunk = settings.hashes_per_chunk
        self._replayed_tokens = settings.replayed_tokens
        self._hash_tokens = self._grid // settings.hashes_per_chunk
        self._requests = KnownRequests()
        interval = settings.options.get("checkpoint_interval")
        self._ends = StepEnds(settings.planner, settings.hashes_per_chunk, interval)
        self._step = _Step()
        self._unprepared = set(range(settings.ranks))  # ranks whose host regions may get more blocks
        self._scheduled: SchedulerOutput | None = None  # the step that is being planned
        self._unwritten: Container[bytes] | None = ()
        self._most_awaited = _most_awaited(settings, self.device)  # tokens a step
        self._parked: dict[int, int] = {}  # loads in flight for which requests wait, each with its tokens
        self._steps = 0
        self._begun: dict[int, tuple[int, float]] = {}  # timed steps in flight: tokens, time of the start

    def on_new_request(self, request: EngineRequest) -> None:
        self._resets.follow()
        if self._events is not None:
            self._events.note(request)
        if self.tier is not None and _may_be_loaded(request):
            keys = ChunkKeys.of(request.block_hashes, self._hashes_per_chunk)
            queued = Request(request.request_id, keys, request.num_tokens, next_use=_next_use(request))
            self.tier.queued(queued, self.clock())
        if self.tier is not None:
            for session in sessions_to_come(request.kv_transfer_params, versions.hint_actions(request)):
                expected = self._sessions.keys(session, by=request)
                if expected is not None:
                    self.tier.expected(expected, self.clock())

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._resets.follow()
        known = self._requests.looked_up(request, num_computed_tokens)
        self._adapters.look(request.request_id, request.lora_request)
        ours = self._request(request)
        boundary = self._boundary(known, ours)
        if boundary is None:
            return None, False
        self._ends.looked_up(known, self.cache, ours, boundary)
        if boundary <= self._replayed_tokens:  # vLLM computes all of it
            known.on_device = 0
            return 0, False
        tokens = boundary - num_computed_tokens
        known.is_parked = tokens > 0 and not self._may_be_awaited(tokens)
        return tokens, known.is_parked

    def _may_be_awaited(self, tokens: int) -> bool:
        """Whether compute of this step may wait for a load of so many tokens: it waits for all before it, too."""
        return sum(self._parked.values()) + self._step.awaited_tokens + tokens <= self._most_awaited

    def _boundary(self, known: Known, ours: Request) -> int | None:
        """The token up to which a request has KV on the device, or can load it. None: ask again later."""
        request, n0 = known.request, known.on_device
        if known.load_failed or not self._may_load(request):
            return n0
        answer = self.cache.lookup(ours, n0, self.clock())
        if isinstance(answer, Pending):
            return None
        if isinstance(answer, Hit) and answer.start == n0:  # others may read the blocks before it
            return answer.boundary
        return n0

    def _may_load(self, request: EngineRequest) -> bool:
        return _may_be_loaded(request) and self._adapters.are_same(request.request_id, request.lora_request)

    def update_state_after_alloc(self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        id = request.request_id
        if request.num_computed_tokens:
            return  # the second call for a request, after its load
        known = self._requests.of(id)
        n0 = known.on_device
        boundary = n0 + num_external_tokens
        tables = blocks.get_block_ids()
        if num_external_tokens and boundary % self._grid:
            self._fail_unplanned(known, num_external_tokens)
            num_external_tokens, boundary = 0, n0
        if boundary <= self._replayed_tokens:  # another connector may have loaded less than this one offered
            n0 = boundary = known.on_device = num_external_tokens = 0
        ours = self._request(request)
        self._adapters.passed(id)
        # If the request was admitted before, it is preempted first, which may store and evict. The lease protects what
        # it will load until then.
        lease = self.cache.reserve(ours, boundary, n0) if num_external_tokens else None
        if known.is_admitted:
            self._admitted_again(id)
        self._requests.admitted(id, boundary)
        self._ends.admitted(known)
        self._remember(known, n0)
        new = self._blocks_behind(tables, n0) if self._planner.has_checkpoints else ()
        with self.device.hiding(frozenset(new)):
            self.cache.admit(ours, n0, boundary, self.clock())
        if lease is not None:
            self.cache.release(lease)
        if num_external_tokens:
            positions = self._planner.positions(n0 // self._grid, boundary // self._grid)
            destinations = [
                [tables[group][at] for at in found] for group, found in zip(self._group_ids, positions, strict=True)
            ]
            load = self.cache.load(id, boundary, destinations, self.clock())
            if known.is_parked:
                self._step.loads[load] = id
                self._parked[load] = num_external_tokens
            else:
                self._step.awaited_tokens += num_external_tokens
                self.cache.goes_on(id)

    def _fail_unplanned(self, known: Known, tokens: int) -> None:
        """Have a request compute of whose hit vLLM has taken a part that ends within a chunk: it cannot resume there.

        What ends before, neither: vLLM counts all these tokens as computed when a load ends well. Raises RuntimeError
        where it counts them now.
        """
        id, loads = known.request.request_id, self._step.loads
        if not known.is_parked:
            raise RuntimeError(
                f"vLLM has taken {tokens} tokens for request {id}, no whole chunks, and would compute behind them: "
                "start it with sync_load_bytes 0"
            )
        logger.warning("vLLM has taken %d tokens for request %s, no whole chunks: they are computed", tokens, id)
        known.load_failed = True
        loads[-1 - len(loads)] = id

    def _blocks_behind(self, tables: Sequence[Sequence[int]], n0: int) -> list[int]:
        """The blocks allocated to a request from token `n0` on."""
        groups = zip(self._group_ids, self._planner.groups, strict=True)
        return [block for at, group in groups for block in tables[at][n0 // group.block_tokens :]]

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        self._resets.follow()
        self._scheduled, self._unwritten = output, None
        try:
            plan = self._plan(output)
        finally:
            self._scheduled, self._unwritten = None, ()
        self._ends.scheduled(output.num_scheduled_tokens)
        step, self._step = self._step, _Step()
        # Requests that were looked up and not admitted wait for the load of another one, or for device blocks.
        is_awaited = self._requests.any_awaited
        tokens = output.total_num_scheduled_tokens
        timed = self._begin_timing(tokens)
        return StepMetadata(plan, step.loads, tokens > 0, is_awaited, timed, self._plan_below())

    def _begin_timing(self, tokens: int) -> int | None:
        """The number of the step that begins now, if its duration is to be measured."""
        if tokens < MIN_TIMED_TOKENS:
            return None
        self._steps += 1
        self._begun[self._steps] = tokens, self.clock()
        return self._steps

    def _end_timing(self, step: int) -> None:
        """This step has ended, and all earlier ones: vLLM may have dropped their outputs."""
        while self._begun and (first := next(iter(self._begun))) <= step:
            tokens, began = self._begun.pop(first)
            if first == step:
                self.cache.prefilled(tokens, self.clock() - began)

    def _plan(self, output: SchedulerOutput) -> StepPlan:
        for id in output.preempted_req_ids or ():
            if id not in self._step.readmitted:
                self._preempted(id)
        for id in self.cache.due():
            known = self._requests.of(id)
            # When a load has ended, vLLM counts its tokens as computed before it gives the blocks their hashes.
            waits = known.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            tokens = 0 if waits else _computed_tokens(known.request)
            self._remember(known, tokens)
            self.cache.computed(id, tokens)
        if isinstance(self.cache, TieredCache | KeptCache):
            self.cache.passed(self.clock())
        return self.cache.step()

    def _plan_below(self) -> TierPlan | None:
        return None if self.tier is None else self.tier.plan_below()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._resets.follow()
        if output.invalid_block_ids:
            self.cache.invalidated(output.invalid_block_ids)
        reports: WorkerReports | None = output.kv_connector_worker_meta
        if reports is not None:
            self._unprepared.difference_update(reports.prepared)
        if self.tier is not None:
            for below in reports.tier if reports is not None else ():
                self.tier.report_below(below)
        for report in reports.reports if reports is not None else ():
            for each in self.cache.report(report):
                self._parked.pop(each.id, None)
                known = self._requests.if_admitted(each.request_id)
                if known is not None and not each.ok:
                    known.load_failed = True
        for id in (output.finished_recving or set()) - output.failed_recving:
            self.cache.goes_on(id)
        self.cache.catch_up()
        if reports is not None and reports.timed is not None:
            self._end_timing(reports.timed)

    def request_finished(self, request: EngineRequest) -> None:
        self._resets.follow()
        self._adapters.passed(request.request_id)
        known = self._requests.if_admitted(request.request_id)
        self._requests.ended(request.request_id)
        self._ends.left(request.request_id)
        if known is not None:
            tokens = _computed_tokens(request)
            self._remember(known, tokens)
            self.cache.finished(request.request_id, tokens)
        elif self.tier is not None:
            self.tier.abandoned(request.request_id)
        if self.tier is not None:
            self._sessions.ended(request)
        if self._events is not None:
            self._events.ended(request.request_id)

    def reset_cache(self) -> bool:
        return self._resets.requested()

    def _empty(self) -> None:
        self._adapters.forget(reset(self.cache, self._revision_file))

    def has_transfers(self) -> bool:
        """Whether an idle engine must go on stepping: also until all host memory is ready, so that it is before the
        first request, and with a tier until it is open, and nothing waits for it.
        """
        self._resets.follow()
        below = None if self.tier is None else self.tier.below
        return self.cache.has_transfers or bool(self._unprepared) or (below is not None and _has_work(below))

    def close(self) -> None:
        if isinstance(self.cache, KeptCache):
            self.cache.close()

    def take_stats(self) -> CacheStats | None:
        return self._counts.take()

    def take_events(self) -> list[KVCacheEvent]:
        return [] if self._events is None else self._events.take()

    def _request(self, request: EngineRequest) -> Request:
        keys = ChunkKeys.of(request.block_hashes, self._hashes_per_chunk)
        # Of a session of streaming input nothing is stored: vLLM 0.32 leaves wrong KV under the hashes of its later
        # parts (seen with asynchronous scheduling, and without any connector).
        is_other = request.resumable or not self._adapters.are_same(request.request_id, request.lora_request)
        stores = allows(request.kv_transfer_params, STORE) and not is_other
        return Request(request.request_id, keys, request.num_tokens, stores, _next_use(request))

    def _remember(self, known: Known, num_tokens: int) -> None:
        """Pass the hashes of a request's first `num_tokens` tokens to the device, which has these chunks now."""
        hashes = known.request.block_hashes
        stop = min(num_tokens // self._grid, len(hashes) // self._hashes_per_chunk)
        if known.remembered < stop:
            self.device.remember(hashes, known.remembered, stop)
            known.remembered = stop
            if self._events is not None:
                self._events.note(known.request)

    def _preempted(self, id: str) -> None:
        known = self._requests.if_admitted(id)
        computed = 0
        if known is not None and known.request.num_output_tokens:
            # All tokens but the last sampled one are computed; vLLM has set `num_computed_tokens` to 0 already.
            computed = known.request.num_tokens - 1
            if not self._planner.has_checkpoints:
                self._remember(known, computed)
        self._requests.preempted(id)
        self._ends.left(id)
        self.cache.preempted(id, computed)

    def _admitted_again(self, id: str) -> None:
        """End the earlier run of a request: its load failed, or a reset preempted it and this step resumes it."""
        self._step.readmitted.add(id)
        self._unwritten = _EVERYTHING  # which hashes this step will compute is not known before its end
        self._preempted(id)
        self._unwritten = ()

    def _unwritten_hashes(self) -> Container[bytes]:
        """The hashes of blocks that the step being planned will compute. Made on the first call in a step."""
        if self._unwritten is None:
            self._unwritten = frozenset() if self._scheduled is None else frozenset(self._filled_by(self._scheduled))
        return self._unwritten

    def _filled_by(self, output: SchedulerOutput) -> Iterator[bytes]:
        """The hashes of the blocks that this step fills."""
        for id, num_tokens in output.num_scheduled_tokens.items():
            known = self._requests.of(id)
            request, stop = known.request, known.request.num_computed_tokens + num_tokens
            before = request.num_computed_tokens
            if self._replayed_tokens:  # what vLLM replays is there already
                before = max(before, known.resumed)
            yield from request.block_hashes[before // self._hash_tokens : stop // self._hash_tokens]


def _most_awaited(settings: Settings, device: VllmDevice) -> int:
    """How many tokens of loads compute of a step may wait for. None where something uses blocks before the ranks have
    the plan, or a load may be planned as failed: in a pool, whose keeper may be another one by then.
    """
    if not device.plan_comes_first or settings.replayed_tokens or settings.pool is not None:
        return 0
    return settings.sync_load_bytes // settings.planner.chunk_bytes * settings.planner.grid_tokens


def _next_use(request: EngineRequest) -> Any:
    """The hint of a request, which may be anything; None without one."""
    given = next_use_of(request.kv_transfer_params)
    return next_use_of_actions(versions.hint_actions(request)) if given is None else given


def _may_be_loaded(request: EngineRequest) -> bool:
    return not request.skip_reading_prefix_cache and allows(request.kv_transfer_params, LOAD)


def _has_work(below: TierCache) -> bool:
    """Whether a tier has something to do in the next step although nothing is in flight."""
    return not below.is_off and (not below.demotion.is_open or below.demotion.num_waiting > 0)


class _Everything(Container[bytes]):
    def __contains__(self, key: object) -> bool:
        return True


_EVERYTHING = _Everything()


def _computed_tokens(request: EngineRequest) -> int:
    """Tokens whose KV the steps scheduled so far compute, without placeholders of tokens not sampled yet."""
    return max(0, int(request.num_computed_tokens - request.num_output_placeholders))
