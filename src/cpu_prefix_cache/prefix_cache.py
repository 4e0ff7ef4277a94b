"""CPUPrefixCache: what an engine's KV cache manager holds.

An engine asks four questions and reports eight events. Everything is decided here, in one thread, without a clock:

    question                                      event
    lookup     how much could I skip?             admit        a request was scheduled
    load       bring it here                      computed     so many of its tokens hold KV now
    reserve    keep it until I ask for it         step         one engine step begins: what is to be copied?
    due        whose progress do you need?        preempted    the request lost its device blocks
                                                  finished     the request ended, or was aborted
                                                  report       a rank has copied
                                                  invalidated  these device blocks hold wrong bytes
                                                  reset        nothing cached before now may be used again

The life of a request:

    lookup -> Hit(b)     admit     load(b)     step: the plan goes to the ranks ... report: loaded
    computed ... computed     step: stores go out ... report: stored, and found by the next request
    finished

Rules are numbered in README.md beside this file.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpu_prefix_cache.block_pool import Pin
from cpu_prefix_cache.boundary_log import BoundaryEvent
from cpu_prefix_cache.break_even import PrefillRate, least_tokens
from cpu_prefix_cache.coordinator import KVCacheCoordinator, new_pool, num_bytes
from cpu_prefix_cache.device import Device
from cpu_prefix_cache.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.offload import Eager, Lazy, Offload
from cpu_prefix_cache.plan import Direction, GroupCopy, RankReport, StepPlan
from cpu_prefix_cache.planner import HybridChunkPlanner
from cpu_prefix_cache.request import MISS, Answer, CheckpointAt, Hit, Pending, Request
from cpu_prefix_cache.states import State
from cpu_prefix_cache.stats import CacheStatistics
from cpu_prefix_cache.stores import StorePlanner
from cpu_prefix_cache.transfers import Phase, Transfer, TransferLedger

logger = logging.getLogger(__name__)

# A second request for a prefix that is being loaded waits for it this long, beyond twice its time on the link: long
# enough for a few engine steps, short enough that a lost report delays nobody noticeably (rule 13).
PENDING_GRACE_SECONDS = 0.05
NEVER = 1 << 62  # more tokens than anybody has
FAILURES_IN_A_ROW = 5  # copies that fail one after another turn the cache off
OFFLOAD_MODES = ("lazy", "eager")


@dataclass(slots=True, eq=False)
class Running:
    """An admitted request. `confirmed` counts its chunks that hold computed tokens.

    `resumed` is the depth, in chunks, from which it goes on, and `kept` are those at which checkpoints are wanted;
    `checkpoints` are those the device had there.
    """

    request: Request
    n0: int
    touch: Any
    due: int  # the step in which it may have crossed a boundary again; 0: that is not asked
    resumed: int = 0
    kept: frozenset[int] = frozenset()
    checkpoints: list[CheckpointAt] = field(default_factory=list)
    confirmed: int = 0
    decodes: bool = False  # by what was reported last
    load: Transfer | None = None
    stale: bool = False  # it stores nothing: it does not want to, or what it computes is from before a reset

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def keys(self) -> Sequence[bytes]:
        return self.request.keys


@dataclass(frozen=True, slots=True)
class Resolved:
    """A transfer that ended. A load that is not `ok` left nothing usable in its destinations."""

    id: int
    direction: Direction
    request_id: str | None
    ok: bool


@dataclass(slots=True)
class Lease:
    """A prefix that stays on the host until the lease is released, exactly once."""

    boundary: int
    pin: Pin = field(repr=False)


class CPUPrefixCache:
    """A prefix cache in host memory for an engine that has one on its device.

    `host_blocks` blocks of `planner.host_block_bytes` bytes each lie in every rank's host region, of which
    `ready_blocks` may be used at once (default: all) and the rest as ranks report them. `max_step_tokens` is what one
    engine step can allocate, and `decode_step_tokens` how far a decoding request moves in one at most. A copy that
    ends with its step is reported `report_steps` steps after it. With `asks_in_decode` false, and where no checkpoints
    are needed, a decoding request is not asked for its progress before its end. (What it computes cannot be evicted
    before, so that nothing is lost by it.)

    Lazy stores of what waits hold at most `lazy_bytes_in_flight` on the device (default: what so many steps can
    allocate, and whole prompts where the device can spare them), and look ahead over the `lazy_horizon` chunks the
    device evicts next (default: four thirds of what so many steps and one more can allocate, at most half of the
    device; never more than all of it). An engine that allocates chunks as a whole leaves `device_groups` at 0; one that
    allocates a block in each of so many groups as tokens come says so: each request may then begin some.
    `device_blocks` is how many blocks of theirs a chunk takes (default: one of each).

    Where the model needs checkpoints, they are kept at the last boundary of prompts and of finished requests, where a
    second continuation of a prefix appears, and every `checkpoint_interval` tokens if given (a multiple of the grid).

    A chunk is stored once `store_after` admitted prompts of at least `min_store_tokens` tokens had it; both hold
    nothing back by default. A request that was preempted and is admitted again counts again (admission.py).

    Hits of fewer than `min_load_tokens` tokens are misses; None: of so few that they are computed sooner
    (break_even.py), which takes `prefilled` and ranks that know what they load at, and is 0 until then.

    When FAILURES_IN_A_ROW stores, or loads, have failed one after another it turns itself off (`is_off`): it then has
    nothing, and stores nothing.

    With `log_boundaries` it keeps a log of what can be hit on the host alone, which the engine takes (`take_events`).
    It goes by what is here: what groups that look ahead drop from the end of a hit is not taken off.

    Raises ConfigurationError when the parts do not fit together.
    """

    def __init__(
        self,
        planner: HybridChunkPlanner,
        device: Device,
        *,
        host_blocks: int,
        ready_blocks: int | None = None,
        offload: str = "lazy",
        policy: str = "lru",
        ranks: int = 1,
        max_step_tokens: int = 8192,
        decode_step_tokens: int = 1,
        lazy_bytes_in_flight: int | None = None,
        lazy_horizon: int | None = None,
        device_groups: int = 0,
        device_blocks: int | None = None,
        report_steps: int = 1,
        asks_in_decode: bool = True,
        link_bytes_per_second: float = 25e9,
        checkpoint_interval: int | None = None,
        store_after: int = 1,
        min_store_tokens: int = 0,
        min_load_tokens: int | None = 0,
        log_boundaries: bool = False,
    ) -> None:
        if offload not in OFFLOAD_MODES:
            raise ConfigurationError(f"offload must be one of {', '.join(OFFLOAD_MODES)}; got {offload!r}")
        for name, value in (
            ("ranks", ranks),
            ("max_step_tokens", max_step_tokens),
            ("decode_step_tokens", decode_step_tokens),
            ("lazy_bytes_in_flight", 1 if lazy_bytes_in_flight is None else lazy_bytes_in_flight),
            ("lazy_horizon", 1 if lazy_horizon is None else lazy_horizon),
            ("device_blocks", 1 if device_blocks is None else device_blocks),
            ("link_bytes_per_second", link_bytes_per_second),
            ("report_steps", report_steps),
            ("min_load_tokens", min_load_tokens or 1),
        ):
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}")
        if lazy_horizon is not None and lazy_horizon > device.num_chunks:
            raise ConfigurationError(
                f"lazy_horizon must be at most the {device.num_chunks} chunks of the device, got {lazy_horizon}"
            )
        if checkpoint_interval is not None and (checkpoint_interval < 1 or checkpoint_interval % planner.grid_tokens):
            raise ConfigurationError(
                f"checkpoint_interval must be a multiple of the grid's {planner.grid_tokens} tokens, "
                f"got {checkpoint_interval}"
            )
        least = planner.host_blocks_per_chunk + planner.checkpoint_blocks(1)
        if host_blocks < least:
            raise ConfigurationError(
                f"the host needs at least the {least} blocks of a chunk and its checkpoint, got {host_blocks}"
            )
        self.planner = planner
        self.pool = new_pool(
            planner,
            host_blocks,
            policy,
            ready=ready_blocks,
            store_after=store_after,
            min_store_tokens=min_store_tokens,
            log_boundaries=log_boundaries,
        )
        self.coordinator = KVCacheCoordinator(planner, self.pool)
        self.epoch = 0
        self._device = device
        self._ranks = ranks
        self._link_bytes_per_second = link_bytes_per_second
        self._decode_step_tokens = decode_step_tokens
        self._asks_in_decode = asks_in_decode or planner.has_checkpoints
        self._ledger = TransferLedger(ranks)
        self._stores = StorePlanner(self.coordinator, device, self._ledger)
        self._max_step_chunks = -(-max_step_tokens // planner.grid_tokens)
        self._device_groups = device_groups
        self._device_blocks = device_groups if device_blocks is None else device_blocks
        in_flight = device.num_chunks
        if lazy_bytes_in_flight is not None:
            in_flight = max(1, lazy_bytes_in_flight // max(1, planner.chunk_bytes))
        self._offload: Offload
        if offload == "eager":
            self._offload = Eager(self.pool, self._stores, device.num_chunks)
        else:
            self._offload = Lazy(
                self.pool,
                self._stores,
                device,
                horizon=lambda: lazy_horizon or self._horizon(report_steps),
                chunks_in_flight=lambda: min(report_steps * self._step_chunks(), in_flight),
                reserve=lambda: self._horizon(report_steps),
                most_in_flight=in_flight,
            )
        self._running: dict[str, Running] = {}
        self._steps = 0
        self._is_full = False  # a load was refused in this step: there was no room for it beside others
        self._agenda: dict[int, list[str]] = {}  # step -> requests that may have crossed a boundary by then
        self._ready: dict[int, int] = {}  # rank -> host blocks it has prepared
        self._checkpoint_interval = checkpoint_interval
        self._counts = Counter[str]()
        self._work = 0
        self._failures_in_a_row = Counter[Direction]()
        self.is_off = False
        self._min_load_tokens = min_load_tokens
        self._prefill = PrefillRate()
        self._load_rates: dict[int, float] = {}  # of the ranks that know theirs

    # Questions. They change nothing, but for what load and reserve are asked for

    def lookup(self, request: Request, n0: int, now: float) -> Answer:
        """How far `request` could be resumed, when the device has everything before token `n0`. Changes nothing.

        `now` is in seconds, on any clock that does not run backwards.
        """
        boundary = self.coordinator.longest_boundary(request.keys, n0, request.num_tokens)
        if boundary == n0 or self.is_off or boundary - n0 < self.min_load_tokens:
            return MISS
        loading = self._ledger.loading.get(request.keys[n0 // self.planner.grid_tokens])
        if loading is not None and now < loading.deadline:
            return Pending(loading.deadline)
        if not self.planner.has_checkpoints:  # else waiting costs hits, in random stories
            others = [load.deadline for load in self._ledger.loads.values() if now < load.deadline]
            if others and not self._has_room_for(n0, boundary):
                return Pending(min(others))
        return Hit(boundary)

    def reserve(self, request: Request, boundary: int) -> Lease | None:
        """Keep everything before `boundary` on the host until `release`. None when it is not all there.

        Raises MisuseError for a boundary that is not on the grid or beyond the request's keys.
        """
        node = self._resume_node(request, boundary)
        return None if node is None else Lease(boundary, self.pool.pin(node))

    def release(self, lease: Lease) -> None:
        """End a lease. Raises MisuseError the second time."""
        self.pool.unpin(lease.pin)

    def load(self, request_id: str, boundary: int, destinations: Sequence[Sequence[int]], now: float) -> int:
        """Plan the load of an admitted request's tokens [n0, boundary). The id of the transfer.

        `destinations` are device blocks, one list for each group, in token order. If a source has gone since the
        lookup, the load is planned all the same, marked failed, and reported by the ranks like any other failure.

        Raises MisuseError for a request that is not admitted or loads already, an n0 or a boundary that is not on
        the grid, a boundary not after n0, and destinations that are too few, null, or named twice (rule 7).
        """
        running = self._admitted(request_id)
        start, stop = running.n0 // self.planner.grid_tokens, boundary // self.planner.grid_tokens
        if running.load is not None:
            raise MisuseError(f"request {request_id!r} is loading already")
        off_grid = running.n0 % self.planner.grid_tokens or boundary % self.planner.grid_tokens
        if off_grid or not start < stop <= len(running.keys):
            raise MisuseError(f"cannot load request {request_id!r} from token {running.n0} to {boundary} (rule 6)")
        self._check_destinations(destinations, self.planner.device_blocks(start, stop))
        keys = tuple(running.keys[start:stop])
        node = self.coordinator.resume_node(running.keys, stop)
        copies: Sequence[GroupCopy] = ()
        if node is not None:
            copies = self.coordinator.load_copies(running.keys, start, stop, destinations)
        carried = num_bytes(self.planner, copies)
        transfer = Transfer(
            self._ledger.new_plan(Direction.LOAD, tuple(copies), carried, failed=node is None),
            keys,
            (),
            hold=self._device.hold([block for blocks in destinations for block in blocks]),
            pin=None if node is None else self.pool.pin(node),
            request_id=request_id,
            deadline=now + 2 * carried / self._link_bytes_per_second + PENDING_GRACE_SECONDS,
        )
        self._ledger.add(transfer)
        running.load = transfer
        self._work += stop - start
        return transfer.id

    def boundaries(self, request_id: str) -> list[int]:
        """Tokens at which the engine should let a step end, so that what it computed until there can be kept.

        These are the boundaries of the request's prompt at which a checkpoint is wanted, ascending; none in a model
        that needs none. Where the device has none when the boundary is reported as computed, none is kept.

        Raises MisuseError for a request that is not admitted.
        """
        return sorted(depth * self.planner.grid_tokens for depth in self._admitted(request_id).kept)

    # Events

    def admit(self, request: Request, n0: int, boundary: int | None = None, now: float | None = None) -> None:
        """The engine has scheduled `request`: `n0` tokens are on the device, and [n0, boundary) will be loaded.

        This is the request's one use of the cache (rule 3). Told again of a running request, it changes nothing.
        `now` is in seconds, as in `lookup`; only the policy `adaptive` asks for it.

        Raises MisuseError for a boundary that is not on the grid or beyond the request's keys, and without `now` if
        the policy needs it.
        """
        if request.id in self._running:
            return
        end = n0 if boundary is None else max(n0, boundary)
        deepest = self._resume_node(request, end) if end > n0 else None
        kept = frozenset[int]()
        if self.planner.has_checkpoints:
            kept = self.coordinator.wanted_checkpoints(
                *(request.keys, end, request.num_tokens, self._checkpoint_interval),
                is_elsewhere=lambda key: self._device.find(key) is not None,
            )
            self._counts["union_misses"] += self._is_union_miss(request, end)
        resumed = self.planner.full_chunks(end)
        touch = self.pool.touch(deepest, request.keys, now, request.num_tokens)
        running = Running(request, n0, touch, self._steps + 1, resumed, kept, stale=self.is_off or not request.stores)
        self._running[request.id] = running
        self._counts["hit_tokens"] += end - n0
        self._offload.used(self.planner.full_chunks(n0))
        self._agenda.setdefault(running.due, []).append(request.id)

    def due(self) -> list[str]:
        """The requests that may have crossed a boundary they are asked at, since they were last reported as computed.

        An engine that steps many requests at once calls `computed` for these and for no others (rule 18).
        """
        ids = self._agenda.get(self._steps)
        if ids is None:
            return []
        ids = list(dict.fromkeys(ids))  # a request that came back at once is there twice
        return [id for id in ids if id in self._running and self._running[id].due == self._steps]

    def computed(self, request_id: str, num_tokens: int) -> None:
        """A finished step has computed the first `num_tokens` tokens of the request: no drafts, no placeholders.

        The device finds the chunks of these tokens by now; what it does not find counts as evicted.

        Ignored while the request loads: its blocks count as computed before they hold anything. Ignored for one that
        is not running, or was admitted before a reset.
        """
        running = self._running.get(request_id)
        if running is None or running.stale:
            return
        if running.load is None:
            self._confirm(running, num_tokens)
        self._schedule(running, num_tokens)

    def goes_on(self, request_id: str) -> None:
        """The request computes from here on with what its load brings, though not all ranks have reported it: they see
        to it that nothing reads its blocks before they are filled. What it computes counts. The load stays open.
        """
        running = self._running.get(request_id)
        if running is not None:
            running.load = None

    def step(self) -> StepPlan:
        """One engine step: what all ranks are to copy, after the compute of the steps before it."""
        self._agenda.pop(self._steps, None)
        self._steps += 1
        self._is_full = False
        if not self.is_off:
            self._offload.plan(with_loads=self._ledger.plans_loads)
        plans, cancelled = self._ledger.launch()
        return StepPlan(self.epoch, plans, cancelled, self._ledger.settled_below, self._ledger.take_settled())

    def catch_up(self) -> None:
        """The step's plan has gone out to the ranks: time for what would have held it up. That is to forget what has
        left the device, after a step with loads to plan stores, and those that a growing host had no room for.

        `report` does so too. If neither comes before the next step, that does.
        """
        if not self.is_off:
            self._offload.catch_up()

    def preempted(self, request_id: str, num_tokens: int = 0) -> None:
        """The request lost its device blocks and will be admitted again. What it computed is stored, in both modes.

        That is what was reported as computed; of one that was decoding by then, its first `num_tokens` tokens.
        Here and in `finished`, a request that is not running is ignored: it may have ended already.
        """
        running = self._running.pop(request_id, None)
        if running is not None and not running.stale:
            if running.load is None:
                if running.decodes:
                    self._confirm(running, num_tokens)
                self._keep(running, running.confirmed)
            self._offload.preempted(running)
            self._forsake(running)  # it may never come back, and without a checkpoint it could not resume here

    def finished(self, request_id: str, num_tokens: int) -> None:
        """The request ended, with `num_tokens` computed, and still holds its device blocks."""
        running = self._running.pop(request_id, None)
        if running is not None and not running.stale:
            if running.load is None:
                self._confirm(running, num_tokens)
                self._keep(running, running.confirmed)
            self._offload.ended(running)
            self._forsake(running)

    def report(self, report: RankReport) -> list[Resolved]:
        """A rank has finished transfers. Those that are over now. Lost, late and repeated reports do no harm.

        Raises MisuseError for a rank that does not exist.
        """
        if not 0 <= report.rank < self._ranks:
            raise MisuseError(f"rank {report.rank} reported, but there are {self._ranks} ranks")
        if report.ready_blocks is not None:
            self._ready[report.rank] = report.ready_blocks
            if len(self._ready) == self._ranks:
                self.pool.grow(min(self._ready.values()))
        if report.load_bytes_per_second is not None:
            self._load_rates[report.rank] = report.load_bytes_per_second
        for id in report.late:
            self._give_up(id)
        landed = list(self._ledger.report(report.rank, report.failed, done=False))
        landed += self._ledger.report(report.rank, report.done, done=True)
        resolved = []
        self._is_full = False
        for transfer in landed:
            self._count_failure(transfer)
            resolved.append(self._land(transfer))
        self.catch_up()
        return resolved

    def invalidated(self, device_blocks: Iterable[int]) -> None:
        """The engine has declared device blocks bad: stores in flight that read them register nothing (rule 14)."""
        bad = set(device_blocks)
        if not bad:
            return
        for transfer in list(self._ledger):
            sources = (block for copy in transfer.plan.copies for block in copy.device_blocks)
            if transfer.is_store and not bad.isdisjoint(sources):
                self._doom(transfer)

    def reset(self) -> None:
        """Nothing cached before now may be used again. Never fails, takes effect at once (rule 14).

        Transfers in flight resolve as usual and register nothing. Requests that are running store no more: what they
        compute continues from before the reset.
        """
        self.epoch += 1
        for transfer in list(self._ledger):
            self._doom(transfer)
        self.pool.reset()
        self._offload.reset()
        for running in self._running.values():
            running.stale = True

    def turn_off(self) -> None:
        """Look up and store nothing any more, for good. Transfers in flight resolve as after a reset."""
        self.is_off = True
        self.reset()

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in one step, in so much time: what `min_load_tokens` may go by."""
        self._prefill.observe(num_tokens, seconds)

    @property
    def min_load_tokens(self) -> int:
        """The shortest load: as it was said, or from where on it is sooner there than computed."""
        if self._min_load_tokens is not None:
            return self._min_load_tokens
        prefill = self._prefill.tokens_per_second
        if prefill is None or len(self._load_rates) < self._ranks:
            return 0
        per_token = self.planner.chunk_bytes / self.planner.grid_tokens
        least = least_tokens(per_token, min(self._load_rates.values()), prefill)
        return NEVER if least is None else least

    @property
    def has_transfers(self) -> bool:
        """Whether anything is planned or moving: an engine at rest keeps stepping until it is not."""
        return len(self._ledger) > 0

    def statistics(self) -> CacheStatistics:
        """What the cache holds and has done so far. O(1)."""
        counts = self._counts
        loading = len(self._ledger.loads)
        return CacheStatistics(
            pool=self.pool.statistics(),
            running=len(self._running),
            storing=len(self._ledger) - loading,
            loading=loading,
            hit_tokens=counts["hit_tokens"],
            chunks_stored=counts["chunks_stored"],
            checkpoints_stored=counts["checkpoints_stored"],
            chunks_loaded=counts["chunks_loaded"],
            bytes_stored=counts["bytes_stored"],
            bytes_loaded=counts["bytes_loaded"],
            stores_failed=counts["stores_failed"],
            loads_failed=counts["loads_failed"],
            store_refusals=self._stores.refusals,
            store_declined=self._stores.declined,
            store_given_up=counts["store_given_up"],
            union_misses=counts["union_misses"],
            lost_before_store=self._offload.lost,
            remembered=self._offload.remembered,
            work=self._work + self._offload.work,
        )

    def take_events(self) -> list[BoundaryEvent]:
        """What can be hit on the host and could not before, and what no longer, since this was asked last.

        Nothing unless the cache was built with `log_boundaries`.
        """
        return self.pool.take_events()

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(blocks)."""
        self.pool.check_valid()
        writing = [chunk for transfer in self._ledger if transfer.is_store for chunk in transfer.nodes]
        assert len(set(writing)) == len(writing), "a block is written by two stores"
        for node in writing:
            assert self.pool.state(node) in (State.WRITING, State.RETIRED), "a store lost its blocks"
        for key, transfer in self._ledger.writing.items():
            assert not isinstance(key, bytes) or self.pool.find(key) is None, "a chunk is stored twice (rule 13)"
            assert not transfer.doomed, "a store that will register nothing stands in the way of another"
        for transfer in self._ledger:
            for key in transfer.keys if transfer.is_store and not transfer.doomed else ():
                assert self._ledger.writing.get(key) is transfer, "a chunk is stored twice at once (rule 13)"
            if transfer.phase is Phase.LANDED:
                assert transfer.follows, f"transfer {transfer.id} landed and was not resolved (rule 11)"

    # How transfers end

    def _land(self, transfer: Transfer) -> Resolved:
        """All ranks have reported: the device blocks are free again, whatever becomes of the bytes."""
        self._device.release(transfer.hold, self._waiting_parent(transfer))
        if transfer.is_store:
            if transfer.hold_in_place is not None:
                behind = transfer.behind
                if behind is not None and not self._device.is_waiting(*behind):
                    behind = None  # it was handed out, and all before it
                self._device.release_in_place(transfer.hold_in_place, None if behind is None else behind[0])
            self._offload.landed(transfer)
            ok = transfer.succeeded
            self._settle_stores(transfer)
        else:
            ok = self._settle_load(transfer)
        return Resolved(transfer.id, transfer.plan.direction, transfer.request_id, ok)

    def _waiting_parent(self, transfer: Transfer) -> int | None:
        """A device block of the chunk that a store hangs below, if it waits to be evicted: the request has ended, and
        what was stored before was given back before."""
        blocks = None if transfer.parent_key is None else self._device.find(transfer.parent_key)
        if not blocks:
            return None
        waiting = zip(blocks, self._device.are_waiting(blocks), strict=True)
        return next((block for block, waits in waiting if waits), None)

    def _settle_load(self, transfer: Transfer) -> bool:
        ok = transfer.succeeded
        self._ledger.remove(transfer)
        if ok:
            self._counts["chunks_loaded"] += len(transfer.keys)
            self._counts["bytes_loaded"] += transfer.plan.num_bytes
        else:
            self._counts["loads_failed"] += 1
        if transfer.pin is not None:
            self.pool.unpin(transfer.pin)
        if not ok and not transfer.doomed and not transfer.plan.failed:
            self._withdraw_sources(transfer)
        running = self._running.get(transfer.request_id or "")
        if running is not None and running.load is transfer:
            running.load = None
        return ok

    def _count_failure(self, transfer: Transfer) -> None:
        """A copy that failed may have been bad luck; so many in a row are not."""
        if transfer.doomed or transfer.plan.failed:
            return
        direction = transfer.plan.direction
        self._failures_in_a_row[direction] = 0 if transfer.succeeded else self._failures_in_a_row[direction] + 1
        if self._failures_in_a_row[direction] == FAILURES_IN_A_ROW and not self.is_off:
            logger.error("%d copies have failed in a row: the host cache is off from now on", FAILURES_IN_A_ROW)
            self.turn_off()

    def _give_up(self, id: int) -> None:
        """A load has come too late for its request. It is over but for its blocks, which it may still fill."""
        transfer = self._ledger.get(id)
        if transfer is not None and not transfer.is_store and not transfer.doomed:
            self._withdraw_sources(transfer)
            self._doom(transfer)

    def _withdraw_sources(self, load: Transfer) -> None:
        """Or the next lookup would find the same bytes, and fail again (rule 11)."""
        block = self.pool.find(load.keys[0])
        if block is not None:
            self.pool.withdraw(block)
            self._doom_orphans()

    def _settle_stores(self, transfer: Transfer) -> None:
        """Commit or give up a store that has landed, and after it those that waited for it."""
        waiting = [transfer]
        while waiting:
            store = waiting.pop()
            if store.follows or store.phase is not Phase.LANDED:
                continue
            committed = store.succeeded and self._commit(store)
            if not committed:
                self._counts["stores_failed"] += 1
                self._counts["store_given_up"] += len(store.keys)
                self._doom(store)
                self.pool.abort(store.nodes)
            self._ledger.remove(store)
            if store.pin is not None:
                self.pool.unpin(store.pin)
            for follower in store.followers:
                follower.follows.remove(store)
                if committed and not follower.doomed and follower.pin is None:
                    follower.pin = self._pin_cached(follower.parent_key)
            waiting += store.followers

    def _commit(self, store: Transfer) -> bool:
        """Make the chunks of a store findable, if what they hang below still is (rule 3)."""
        parent = self.pool.root if store.parent_key is None else self.pool.find(store.parent_key)
        if parent is None:
            return False
        self.pool.commit(store.nodes, store.keys, parent, store.touch)
        has_checkpoint = self.pool.is_checkpoint(store.nodes[-1])
        self._counts["chunks_stored"] += len(store.keys) - has_checkpoint
        self._counts["checkpoints_stored"] += has_checkpoint
        self._counts["bytes_stored"] += store.plan.num_bytes
        self._offload.committed(store.keys)
        if store.owner not in self._running:
            self.pool.ended(store.nodes[-1])
        return True

    def _doom_orphans(self) -> None:
        """Doom the stores below chunks that were withdrawn, or another store of the same chunks would meet them."""
        for transfer in list(self._ledger):
            if transfer.is_store and transfer.pin is not None and self.pool.key(transfer.pin.blocks[0]) is None:
                self._doom(transfer)

    def _doom(self, transfer: Transfer) -> None:
        for doomed in self._ledger.doom(transfer):
            if doomed.is_store:
                self.pool.retire(doomed.nodes)

    # Small things

    def _step_chunks(self) -> int:
        """Into how many chunks one step can write: those of its tokens, and one that each request has begun."""
        return self._max_step_chunks + (len(self._running) if self._device_groups else 0)

    def _step_blocks(self) -> int:
        """How many device blocks it can allocate for that."""
        if not self._device_groups:
            return self._step_chunks()
        return self._max_step_chunks * self._device_blocks + len(self._running) * self._device_groups

    def _horizon(self, report_steps: int) -> int:
        """How far lazy looks ahead, in device blocks: so far that what the next step and all that are taken until a
        store is heard of can allocate is left when a quarter of it is gone, before which it does not look again.
        """
        steps = -(-4 * (1 + report_steps) * self._step_blocks() // 3)
        return max(1, min(steps, self._device.num_chunks // 2))

    def _has_room_for(self, n0: int, boundary: int) -> bool:
        """Whether a load of tokens [n0, boundary) takes no device block that is still to be stored, whatever else this
        step allocates. When one was refused so are all that ask after it in this step, or small ones would be served
        for ever before a large one.
        """
        blocks = sum(self.planner.device_blocks(n0 // self.planner.grid_tokens, boundary // self.planner.grid_tokens))
        if not self._is_full and not self._offload.has_room_for(self._step_blocks() + blocks):
            self._is_full = True
        return not self._is_full

    def _resume_node(self, request: Request, boundary: int) -> int | None:
        """What must be held on the host to resume at `boundary`, if all of it is here."""
        chunks, off_grid = divmod(boundary, self.planner.grid_tokens)
        if off_grid or not 0 <= chunks <= len(request.keys):
            raise MisuseError(f"request {request.id!r} has no boundary at token {boundary} (rule 6)")
        return self.coordinator.resume_node(request.keys, chunks) if chunks else None

    def _is_union_miss(self, request: Request, end: int) -> bool:
        """Whether the last boundary was out of reach only because the chunks are here and the checkpoint is there."""
        last = min(self.planner.hittable_chunks(request.num_tokens), len(request.keys))
        if last * self.planner.grid_tokens <= end or self.pool.resident_run(request.keys, 0, last) < last:
            return False
        if self.coordinator.resume_node(request.keys, last) is not None:
            return False  # the host alone could have: the engine took less than it was offered
        return self._device.find_checkpoint(self.coordinator.checkpoint_at(request.keys, last)) is not None

    def _keep(self, running: Running, depth: int) -> None:
        """Remember the checkpoint at a confirmed boundary, if the device has it and it is of use."""
        known = any(checkpoint.depth == depth for checkpoint in running.checkpoints)
        if known or not depth or not self.planner.has_checkpoints or not self.planner.needs_checkpoint(depth):
            return
        checkpoint = self.coordinator.checkpoint_at(running.keys, depth)
        if self._device.find_checkpoint(checkpoint) is not None:
            running.checkpoints.append(checkpoint)
            self._offload.checkpointed(running, checkpoint)

    def _forsake(self, running: Running) -> None:
        """The request is over: chunks that it brought to the host and that led to no checkpoint are of no use."""
        if self.planner.has_checkpoints:
            here = self.pool.resident_run(running.keys, 0, running.confirmed)
            deepest = self.pool.find(running.keys[here - 1]) if here else None
            if deepest is not None:
                self.pool.ended(deepest)

    def _admitted(self, request_id: str) -> Running:
        running = self._running.get(request_id)
        if running is None:
            raise MisuseError(f"request {request_id!r} is not admitted")
        return running

    def _pin_cached(self, key: bytes | None) -> Pin | None:
        """A pin on the chunk with this key, once it is here."""
        block = None if key is None else self.pool.find(key)
        return None if block is None else self.pool.pin(block)

    def _confirm(self, running: Running, num_tokens: int) -> None:
        chunks, before = min(self.planner.full_chunks(num_tokens), len(running.keys)), running.confirmed
        if chunks > before:
            running.confirmed = chunks
            self._offload.confirmed(running, before)
            for depth in sorted(depth for depth in running.kept | {running.resumed} if before < depth <= chunks):
                self._keep(running, depth)

    def _schedule(self, running: Running, num_tokens: int) -> None:
        """The next step in which the request can have crossed a boundary that it is asked at: at once in prefill,
        seldom in decode, or never."""
        steps = 1
        running.decodes = num_tokens >= running.request.num_tokens
        if running.decodes:
            if not self._asks_in_decode:
                running.due = 0
                return
            missing = self.planner.grid_tokens - num_tokens % self.planner.grid_tokens
            steps = -(-missing // self._decode_step_tokens)
        due = self._steps + steps
        if due != running.due:
            running.due = due
            self._agenda.setdefault(due, []).append(running.id)

    def _check_destinations(self, destinations: Sequence[Sequence[int]], wanted: Sequence[int]) -> None:
        """Enough of them, none null, and within a group none twice (rule 7)."""
        if [len(blocks) for blocks in destinations] != wanted:
            raise MisuseError(f"destinations must be {wanted} blocks, got {[len(blocks) for blocks in destinations]}")
        for group, blocks in zip(self.planner.groups, destinations, strict=True):
            if self._device.null_block in blocks or len(set(blocks)) != len(blocks):
                raise MisuseError(f"a destination of group {group.name!r} is null or named twice (rule 7)")
