"""The scheduler half: translates ATOM's calls into calls of CPUPrefixCache. It decides nothing.

    ATOM's call                          becomes
    get_num_new_matched_tokens           cache.lookup, as if the device had nothing: ATOM has not looked there yet
    update_state_after_alloc             cache.lookup from where the device's prefix ends; cache.admit, cache.load
    should_park_for_load_after_alloc     whether that was a load
    build_connector_meta                 cache.computed, then cache.step
    process_completions                  cache.report
    should_defer_free                    cache.preempted: ATOM calls it right before it frees the blocks of a request
    request_finished                     cache.finished
    get_statistics                       cache.statistics

The life of a request that is loaded:

    allocated     it waits, with all of its blocks; those after the device's prefix are destinations
    awaiting      only where a tier below the host has more of it: until the host has that, or its deadline
    sent          every rank copies
    ended         ATOM gives the loaded blocks their hashes, and computes from the boundary on. If the load has failed,
                  it computes from where the device's prefix ends, into the same blocks

The sources of stores and the destinations of loads have references of their own, so ATOM need not keep a request's
blocks for them: `should_defer_free` always answers no.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atom.kv_transfer.disaggregation.base import KVConnectorSchedulerBase
from atom.kv_transfer.disaggregation.types import KVConnectorOutput

from connector.atom import geometry, touched
from connector.atom.device import AtomDevice, UnorderedDevice
from connector.atom.messages import StepMetadata, Unfit, Unpinned, ready_blocks_of
from connector.atom.requests import KnownRequests
from connector.atom.settings import Settings
from connector.atom.state_device import StateDevice
from connector.atom.states import States
from connector.tier.revision import reset
from cpu_prefix_cache import ConfigurationError, Hit, MisuseError, Pending
from cpu_prefix_cache.deciding import (
    MISS,
    Answer,
    CPUPrefixCache,
    RankReport,
    Request,
    Resolved,
    TieredCache,
)
from cpu_prefix_cache.tier import TierReport

logger = logging.getLogger(__name__)

# ATOM's status of a request that should_park_for_load_after_alloc has stopped, and of one whose client has gone.
WAITS, ABORTED = "WAITING_FOR_REMOTE_KVS", "ABORTED"


@dataclass(slots=True, eq=False)
class _Live:
    """A request with blocks. It is admitted, or waits for what the tier has of it."""

    seq: Any
    is_admitted: bool = False
    is_loading: bool = False
    is_unloaded: bool = False  # its wait has ended without a load, which is yet to be reported

    @property
    def is_parked(self) -> bool:
        return self.is_loading or not self.is_admitted


class CPUPrefixCacheScheduler(KVConnectorSchedulerBase):
    """A CPUPrefixCache over ATOM's block pool, called by ATOM's scheduler.

    There is no cache until all ranks have reported what a block takes, which they do before the first request.

    Raises ConfigurationError if ATOM's config does not fit.
    """

    is_producer = False
    is_offload = True

    def __init__(self, config: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = Settings.of(config)
        self._config = config
        self._clock = clock
        self._block_tokens = geometry.block_tokens(config)
        self._requests = KnownRequests(self._block_tokens, self._settings.hash)
        self.cache: CPUPrefixCache | None = None
        self.tier: TieredCache | None = None  # the cache, if there is a tier
        self._offered: Any = None  # the sequence that was looked up last, if some of it may be had
        self._live: dict[Any, _Live] = {}  # by id
        self._loading: dict[int, _Live] = {}  # by load
        self._parked: list[_Live] = []  # those that wait for a load, or whose load ATOM has not taken yet
        self._waiting: Any = None  # ATOM's queue of requests
        self._block_bytes: tuple[int, ...] | None = None  # as the ranks have reported them
        self._states = States()
        self._ready_blocks = 0
        self._unpinned: dict[int, int] = {}  # rank -> bytes of its host memory
        self._sent: tuple[Any, ...] = ()  # what the last metadata said beside its transfers

    def bind(self, block_manager: Any, waiting: Any) -> None:
        """These are the blocks and the queue of ATOM's scheduler. When it clears its own prefix cache, this one is
        reset.

        Raises ConfigurationError if they are not those of an ATOM that is known.
        """
        touched.check_manager(block_manager)
        self._waiting = waiting
        self._states = States.of(block_manager)
        self._requests.device = self._device_of(block_manager.kv)
        block_manager.clear_cache = partial(self._clear_both, block_manager.clear_cache)

    def reset_cache(self) -> None:
        """Nothing cached before now may be used again: new weights, for example."""
        if self.cache is not None:
            for live in self._live.values():  # with blocks from before the reset, so all are among what runs
                if not live.is_admitted:
                    self._end_wait(self.cache, live, MISS)
            reset(self.cache, self._settings.revision_file)
            running = [live.seq for live in self._live.values()]
            for seq in running:
                seq.offload_loaded_tokens = seq.num_cached_tokens  # if a load has ended, ATOM would take it in now
                self._states.forget(seq.id)
            self._requests.reset(running)
            self._sent = ()  # the ranks hear of it at once, from an idle engine too: the process may end

    # A request begins

    def get_num_new_matched_tokens(self, seq: Any) -> tuple[int, bool]:
        self._offered = None
        if self.cache is None or not self._requests.may_load(seq):
            return 0, False
        if self.tier is not None:  # is asked once for each request, when it is known what the device has
            self._offered = seq
            return 0, True
        request = self._requests.request(seq)
        n0 = self._on_device(request) if self.cache.pool.shape.is_shared else 0
        answer = self.cache.lookup(request, n0, self._clock())
        if not isinstance(answer, Hit):
            return 0, False
        self._offered = seq
        return answer.boundary, True

    def update_state_after_alloc(self, seq: Any) -> None:
        is_offered, self._offered = self._offered is seq, None
        request = self._requests.request(seq)  # also without a cache: later ATOM forgets that it has images
        if self.cache is None:
            return
        self._check_id(seq)
        answer = self._look_up(self.cache, request, seq) if is_offered else MISS
        live = self._live[seq.id] = _Live(seq)
        if not isinstance(answer, Pending):
            self._admit(self.cache, live, answer)

    def should_park_for_load_after_alloc(self, seq: Any) -> bool:
        live = self._live.get(seq.id)
        if live is None or not live.is_parked:
            return False
        self._parked.append(live)
        return True

    # A step

    def build_connector_meta(self) -> StepMetadata | None:
        """The plan of a step. None if it is no news for the ranks; ATOM then does not call them."""
        if self.cache is None:
            return None
        self._states.restore()
        for id in self.cache.due():
            self.cache.computed(id, self._requests.confirm(self._live[id].seq))
        if self.tier is not None:
            self.tier.passed(self._clock())
        plan = self.cache.step()
        metadata = StepMetadata(plan, self._ready_blocks, None if self.tier is None else self.tier.plan_below())
        if not metadata.moves and metadata.said == self._sent:
            return None
        self._sent = metadata.said
        return metadata

    def process_completions(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """ATOM's output, with the loads and waits that have ended in place of the completions on our channel."""
        ours = {each for each in output.connector_completions if each.channel == geometry.CHANNEL}
        output.connector_completions -= ours
        for completion in ours:
            self._hear(completion.operation_id)
        if ours and self.cache is not None:
            transfers = {each.operation_id: each.succeeded for each in ours if isinstance(each.operation_id, int)}
            done = frozenset(id for id, succeeded in transfers.items() if succeeded)
            unfit = tuple(each.operation_id[1:] for each in ours if isinstance(each.operation_id, Unfit))
            for resolved in self._report(self.cache, done, frozenset(transfers.keys() - done), unfit):
                live = self._loading.pop(resolved.id, None)
                if live is not None and self._has_blocks(live):
                    live.is_loading = False
                    self._states.load_ended(live.seq.id, resolved.ok)
                    (output.finished_loading if resolved.ok else output.failed_loading).add(live.seq.id)
        if self.cache is not None:
            self._end_waits(self.cache, output)
            self._free_aborted()
        return output

    def has_pending_work(self) -> bool:
        """Whether an idle engine must go on polling its ranks, and sending them plans."""
        is_opening = self.tier is not None and self.tier.tier_statistics().state == "opening"
        return not self._sent or is_opening or (self.cache is not None and self.cache.has_transfers)

    def get_statistics(self) -> dict[str, int]:
        """Statistics that ATOM shows of a connector: counts since the start, of all ranks alike, and what is under
        way. Beside that, how many bytes of host memory could not be pinned on all ranks together.
        """
        said = {"unpinned_bytes": sum(self._unpinned.values())}
        if self.cache is None:
            return said
        statistics = self.cache.statistics()
        return said | {
            "loaded_tokens": statistics.chunks_loaded * self._block_tokens,
            "load_failures": statistics.loads_failed,
            "saved_tokens": statistics.chunks_stored * self._block_tokens,
            "loads_pending": statistics.loading,
            "saves_pending": statistics.storing,
        }

    # A request ends

    def should_defer_free(self, seq: Any) -> bool:
        """No. If the request was not finished before, ATOM preempts it now."""
        if self.cache is not None:
            self._leave(seq, self.cache.preempted)
        return False

    def request_finished(self, seq: Any) -> None:
        if self.cache is not None:
            self._leave(seq, self.cache.finished)

    # Details

    def _device_of(self, pool: Any) -> AtomDevice:
        why_not_ordered = touched.why_not_ordered(pool)
        if why_not_ordered is None:
            return StateDevice(pool, self._states) if self._states.units else AtomDevice(pool)
        if self._states.units:
            raise ConfigurationError(f"{why_not_ordered}: its states cannot be kept; start ATOM without the host cache")
        if self._settings.is_lazy:
            logger.warning("%s: the host cache stores eagerly, as with the option offload: eager", why_not_ordered)
        self._settings = self._settings.made_eager()
        return UnorderedDevice(pool)

    def _check_id(self, seq: Any) -> None:
        """Raises MisuseError if another request with its id is alive. ATOM alone loses one of them, reads blocks of the
        other, or never ends.
        """
        if (live := self._live.get(seq.id)) is not None and live.seq is not seq:
            raise MisuseError(f"two live requests have the id {seq.id!r}: give each an id of its own")

    def _on_device(self, request: Request) -> int:
        """How many tokens of a prompt the device has, as ATOM will find: whole blocks, and not the last token."""
        device, most = self._requests.device, min(len(request.keys), (request.num_tokens - 1) // self._block_tokens)
        found = [None] if device is None else device.find_all(request.keys[:most])
        return self._block_tokens * next((at for at, blocks in enumerate(found) if blocks is None), most)

    def _look_up(self, cache: CPUPrefixCache, request: Request, seq: Any) -> Answer:
        """Find what can be loaded beyond what the device had when the request got its blocks."""
        return cache.lookup(request, int(seq.num_cached_tokens), self._clock())

    def _admit(self, cache: CPUPrefixCache, live: _Live, answer: Answer) -> None:
        """The request loads the answer's hit. When that has ended, ATOM reads from it how far that was."""
        seq = live.seq
        n0, now = int(seq.num_cached_tokens), self._clock()
        boundary = answer.boundary if isinstance(answer, Hit) else n0
        units = self._states.reserve(seq) if boundary > n0 else []
        if units is None:
            boundary = n0  # it is computed
        self._requests.confirm(seq)
        live.is_admitted = True
        cache.admit(self._requests.request(seq), n0, boundary, now)
        if units is not None and boundary > n0:
            blocks = seq.block_table[n0 // self._block_tokens : boundary // self._block_tokens]
            live.is_loading = True
            self._loading[cache.load(seq.id, boundary, [blocks, *units], now)] = live
        seq.offload_load_start_tokens, seq.offload_loaded_tokens = n0, boundary

    def _end_waits(self, cache: CPUPrefixCache, output: KVConnectorOutput) -> None:
        """Requests that wait for what the tier has are looked up again. One that was aborted waits no longer."""
        for live in filter(self._has_blocks, self._parked):
            seq = live.seq
            if not live.is_admitted:
                answer = self._look_up(cache, self._requests.request(seq), seq) if seq.status.name == WAITS else MISS
                if not isinstance(answer, Pending):
                    self._end_wait(cache, live, answer)
            if live.is_unloaded:
                live.is_unloaded = False
                output.finished_loading.add(seq.id)

    def _end_wait(self, cache: CPUPrefixCache, live: _Live, answer: Answer) -> None:
        """The request loads the answer's hit. Without one it goes on as after a load."""
        self._admit(cache, live, answer)
        live.is_unloaded = not live.is_loading

    def _free_aborted(self) -> None:
        """ATOM frees the blocks of an aborted request that waited for a load when that request heads its queue. If the
        head needs these blocks, it would wait for ever.
        """
        parked, self._parked = self._parked, []
        for live in filter(self._has_blocks, parked):
            seq = live.seq
            if live.is_loading or seq.status.name == WAITS:
                self._parked.append(live)
            elif seq.status.name == ABORTED and seq.block_table:
                self._waiting.remove(seq)
                self._waiting.appendleft(seq)

    def _has_blocks(self, live: _Live) -> bool:
        """Whether it has not left since."""
        return self._live.get(live.seq.id) is live

    def _report(
        self,
        cache: CPUPrefixCache,
        done: frozenset[int],
        failed: frozenset[int],
        unfit: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> list[Resolved]:
        """Report to the cache for all ranks: ATOM has passed on what all of them have reported."""
        ranks = range(self._config.tp_world_size)
        reports = (RankReport(rank, done, failed, self._ready_blocks, unfit=unfit) for rank in ranks)
        return [each for report in reports for each in cache.report(report)]

    def _leave(self, seq: Any, tell: Callable[[Any, int], None]) -> None:
        """A request still has its blocks, and will lose them."""
        live = self._live.pop(seq.id, None)
        if live is not None and live.is_admitted:
            tell(seq.id, self._requests.confirm(seq))
            self._requests.lost_blocks(seq)
            self._states.forget(seq.id)

    def _hear(self, operation: Any) -> None:
        """Take what ranks report besides transfers: on tiers, how many host blocks are ready, what a block takes."""
        if isinstance(operation, TierReport) and self.tier is not None:
            self.tier.report_below(operation)
        if isinstance(operation, Unpinned):
            self._hear_of_memory(operation)
        self._ready_blocks = max(self._ready_blocks, ready_blocks_of(operation))
        block_bytes = geometry.block_bytes_of(operation)
        if block_bytes is None or block_bytes == self._block_bytes:
            return
        if self._block_bytes is not None:
            raise ConfigurationError(
                f"the blocks of one rank take {self._block_bytes} bytes and those of another {block_bytes}: the host "
                "cache keeps them alike; start ATOM without it"
            )
        self._block_bytes = block_bytes
        device = self._requests.device
        if device is None:
            raise MisuseError(
                "the connector does not know ATOM's blocks: call connector.atom.plugin.register at the top level of "
                "the main module, and select the connector by itself, not as one of several"
            )
        self._states.check_bytes(block_bytes)
        self.cache = self._settings.build(self._settings.planner(block_bytes, self._states.units), device)
        self.tier = self.cache if isinstance(self.cache, TieredCache) else None

    def _hear_of_memory(self, unpinned: Unpinned) -> None:
        if unpinned.rank not in self._unpinned:
            logger.warning(
                "rank %d could not pin %d bytes of its host memory, and copies them more slowly (see `ulimit -l`)",
                *unpinned,
            )
        self._unpinned[unpinned.rank] = unpinned.num_bytes

    def _clear_both(self, clear_cache: Callable[[], None]) -> None:
        clear_cache()
        self.reset_cache()
