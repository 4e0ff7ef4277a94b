"""CPUPrefixCache: the host prefix cache, as an engine's KV cache manager uses it.

It decides in one thread, and takes the time as an argument. The manager queries it, and reports events:

    question                                      event
    lookup     how long a prefix can be loaded?   admit        a request was scheduled
    load       load it                            computed     so many of its tokens hold KV now
    reserve    keep it on the host for later      step         an engine step begins: what is to be copied?
    due        which progress is to be reported?  preempted    the request lost its device blocks
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
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.index.boundary_log import BoundaryEvent
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.next_use import counted_next_use
from cpu_prefix_cache.messages.options import USUAL_OPTIONS, CacheOptions
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.messages.request import MISS, Answer, Hit, Pending, Request
from cpu_prefix_cache.messages.stats import CacheStatistics, HintStatistics
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.offload.destinations import check_destinations
from cpu_prefix_cache.offload.device import Device, check_fits
from cpu_prefix_cache.offload.eager import Eager
from cpu_prefix_cache.offload.edge import PENDING_GRACE_SECONDS, Edge, Ended
from cpu_prefix_cache.offload.engine_steps import USUAL_ENGINE, EngineTraits
from cpu_prefix_cache.offload.late import Late
from cpu_prefix_cache.offload.lazy import MARGIN, Lazy
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.requests import RunningRequests
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import LoadTransfer, StoreTransfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool

logger = logging.getLogger(__name__)

# A request for what has left the device and is on its way to the host waits so long at most: a store is reported after
# its step, and one of 8,192 tokens takes a quarter of a second (Llama 3.1 8B, one H100).
STORE_SECONDS = 0.6


@dataclass(frozen=True, slots=True)
class Resolved:
    """A transfer that ended. A load that is not `ok` left nothing usable in its destinations."""

    id: int
    direction: Direction
    request_id: Hashable | None
    ok: bool


class CPUPrefixCache:
    """A prefix cache in host memory for an engine that has one on its device.

    Every rank's host region has `host_blocks` blocks of `planner.host_block_bytes` bytes each. Of these `ready_blocks`
    may be used at once (default: all), and more as ranks report them. `options` are the user's, and `engine` says how
    the engine steps and what it does by itself.

    With `is_above_tier` the host declines nothing and holds each chunk with all that it hangs below: so the tier has
    the choice, and what is written there is written with what it hangs below.

    After FAILURES_IN_A_ROW stores in a row, or loads, that failed, the cache turns itself off for good (`is_off`).

    Raises ConfigurationError when the parts do not fit together.
    """

    def __init__(
        self,
        planner: HybridChunkPlanner,
        device: Device,
        *,
        host_blocks: int,
        ready_blocks: int | None = None,
        options: CacheOptions = USUAL_OPTIONS,
        engine: EngineTraits = USUAL_ENGINE,
        is_above_tier: bool = False,
    ) -> None:
        _check(planner, host_blocks, options.checkpoint_interval)
        check_fits(device, planner)
        offload = options.offload
        self.planner = planner
        self._device = device
        # Device and host hold prompts together, the end of a prompt here and its beginning there.
        can_be = offload == "lazy" and not (planner.has_checkpoints or is_above_tier)
        is_shared = can_be and device.handed_out() is not None
        self.pool = new_pool(
            planner,
            host_blocks,
            options.policy,
            ready=ready_blocks,
            thresholds=None if is_above_tier else options,
            log_boundaries=engine.log_boundaries,
            beside=device.num_blocks // planner.device_blocks_per_chunk if is_shared else None,
        )
        self.coordinator = KVCacheCoordinator(planner, self.pool)
        self._steps = engine.steps
        self._checkpoint_interval = options.checkpoint_interval
        self._waits_for_loads = engine.waits_for_loads
        self._exchanges = engine.exchanges and self.pool.shape.is_shared and len(planner.pieces) == 1
        margin = MARGIN if offload == "lazy" and not is_shared else 1.0
        stores = StorePlanner(self.coordinator, device, TransferLedger(engine.ranks), margin)
        when = self._new_offload(stores, offload)
        self._running = RunningRequests(self.coordinator, device, when, engine.steps)
        self.edge = Edge(stores, when, min_load_tokens=options.min_load_tokens, running=self._running)
        self._is_full = False  # in this step a load had no room beside others
        self._hit_tokens = self._union_misses = 0
        self._hints = Counter[str]()  # by their names in HintStatistics
        self._work = 0

    @property
    def epoch(self) -> int:
        """The number of resets so far."""
        return self.edge.epoch

    @property
    def is_off(self) -> bool:
        """Whether nothing is found nor stored any more."""
        return self.edge.is_off

    # Questions

    def lookup(self, request: Request, n0: int, now: float) -> Answer:
        """How far `request` could be resumed, when the device has everything before token `n0`, and from where to load.

        Changes deadlines only: after an answer Pending for lack of device blocks, all later loads of this step are
        Pending too, and the wait for a store that is arriving begins (rule 12). `now` is in seconds, of any clock that
        does not run backwards.
        """
        loading = self._loading(request, n0)
        if loading is not None and now < loading.deadline and not self.is_off:
            return Pending(loading.deadline)
        boundary = self.coordinator.longest_boundary(request.keys, n0, request.num_tokens)
        is_worth = boundary - n0 >= max(1, self.min_load_tokens)
        arriving = self._arriving(request, boundary)
        if self.is_off or not (is_worth or arriving is not None or self._is_exchanged(request, n0)):
            return MISS
        awaited = self._awaited(request, n0, boundary, arriving, now) if self._waits_for_loads else None
        if awaited is not None:
            return Pending(awaited)
        if not is_worth:
            return MISS
        return Hit(boundary, self.planner.full_chunks(n0) * self.planner.grid_tokens)

    def reserve(self, request: Request, boundary: int, n0: int = 0) -> Pin | None:
        """A lease: everything from `n0` to `boundary` stays on the host until `release`. None when it is not all there.

        Raises MisuseError for a boundary that is not on the grid or beyond the request's keys.
        """
        node = self._resume_node(request, boundary)
        start, stop = self.planner.full_chunks(n0), self.planner.full_chunks(boundary)
        if node is None or self.pool.resident_run(request.keys, start, stop) < stop:
            return None
        return self.pool.pin(node)

    def release(self, lease: Pin) -> None:
        """End a lease. Raises MisuseError the second time."""
        self.pool.unpin(lease)

    def check_destinations(self, destinations: Sequence[Sequence[int]], n0: int, boundary: int) -> None:
        """Check what `load` demands of destinations, for a manager that checks before it admits the request.

        Raises MisuseError for blocks not given by group, too few or too many, null ones, and one named twice.
        """
        check_destinations(self.planner, self._device.null_block, destinations, n0, boundary)

    def filling(self) -> dict[int, Hashable | None]:
        """The device blocks that loads fill which no rank, or not every one, has reported; each with its request."""
        return self.edge.ledger.filling()

    def load(self, request_id: Hashable, boundary: int, destinations: Sequence[Sequence[int]], now: float) -> int:
        """Plan the load of an admitted request's tokens [start, boundary), `start` being its n0 rounded down to a
        boundary. The id of the transfer.

        `destinations` are device blocks, one list for each group, in token order; nobody else may read them. If a
        source was evicted since the lookup, the load is planned as failed, and the ranks report it like any other
        failure.

        Raises MisuseError for a request that is not admitted or loads already, a boundary that is not on the grid or
        not after n0, and destinations that are no lists, too few, null, or named twice (rule 7).
        """
        running = self._admitted(request_id)
        start, stop = running.n0 // self.planner.grid_tokens, boundary // self.planner.grid_tokens
        if running.load is not None:
            raise MisuseError(f"request {request_id!r} is loading already")
        if boundary % self.planner.grid_tokens or not running.n0 < boundary or stop > len(running.keys):
            raise MisuseError(f"cannot load request {request_id!r} from token {running.n0} to {boundary} (rule 6)")
        self.check_destinations(destinations, running.n0, boundary)
        chain = Chain(running.keys[start - 1] if start else None, tuple(running.keys[start:stop]))
        nodes = self.coordinator.resume_nodes(running.keys, stop)
        if self.pool.resident_run(running.keys, start, stop) < stop:
            nodes = ()
        device_blocks = [block for blocks in destinations for block in blocks]
        read = list[int | None]()
        copies: Sequence[GroupCopy] = ()
        if nodes:
            copies = self.coordinator.load_copies(running.keys, start, stop, destinations)
            if self._exchanges and self.pool.is_scarce and not running.stale:  # else it is not stored again
                read = self.pool.exchangeable(self.pool.path(nodes[0], stop - start))
        running.load = self.edge.load(request_id, chain, nodes, copies, device_blocks, now, read)
        self._work += stop - start
        return running.load.id

    def branch(self, request: Request, end: int) -> int | None:
        """The token beyond `end` at which `request` departs from an earlier prompt, if it needs a checkpoint there.

        For an engine that decides before it admits a request where steps end; afterwards `boundaries` has this one,
        too. Changes nothing.
        """
        if not self.planner.has_checkpoints:
            return None
        depth = self.coordinator.branch(request.keys, end, request.num_tokens, self._is_elsewhere)
        return None if depth is None else self.planner.resumable_chunks(depth) * self.planner.grid_tokens

    def boundaries_of(self, request: Request, end: int) -> list[int]:
        """The `boundaries` of a request that would resume at token `end`, before it is admitted. Changes nothing."""
        wanted = self._wanted_checkpoints(request, end)
        return [self.planner.resumable_chunks(depth) * self.planner.grid_tokens for depth in wanted]

    def _wanted_checkpoints(self, request: Request, end: int) -> list[int]:
        interval, elsewhere = self._checkpoint_interval, self._is_elsewhere
        return self.coordinator.wanted_checkpoints(request.keys, end, request.num_tokens, interval, elsewhere)

    def _is_elsewhere(self, key: bytes) -> bool:
        """Whether somebody other than the host has this chunk."""
        return self._device.find(key) is not None

    def boundaries(self, request_id: Hashable) -> list[int]:
        """Tokens at which the engine should let a step end, so that it has a checkpoint there. Ascending.

        Boundaries of the request's prompt; none in a model that needs no checkpoints. A checkpoint is kept if the
        device has it when the chunks are reported as computed that must be there to resume from it: those up to the
        boundary, and what prefix groups look ahead to.

        Raises MisuseError for a request that is not admitted.
        """
        running, planner = self._admitted(request_id), self.planner
        resumed = (planner.resumable_chunks(depth) for depth in running.kept)
        return [depth * planner.grid_tokens for depth in resumed if depth > running.resumed]

    # Events

    def admit(self, request: Request, n0: int, boundary: int | None = None, now: float | None = None) -> None:
        """The engine has scheduled `request`: `n0` tokens are on the device, and [n0, boundary) will be loaded.

        This is the request's one use of the cache (rule 3). For a running request it does nothing. `now` is in seconds,
        as in `lookup`; only the policy `adaptive` needs it.

        Raises MisuseError for a boundary that is not on the grid or beyond the request's keys, and without `now` if
        the policy needs it.
        """
        if request.id in self._running:
            return
        end = n0 if boundary is None else max(n0, boundary)
        deepest = self._resume_node(request, end) if end > n0 else None
        resumed = self.planner.full_chunks(end)
        kept: list[int] = []
        if self.planner.has_checkpoints:
            kept = [self.planner.chunks_to_resume(resumed)] if resumed else []
            kept += self._wanted_checkpoints(request, end)
            self._union_misses += self._is_union_miss(request, end)
        self.pool.missed(request.keys, resumed)
        next_use = counted_next_use(request.next_use, self._hints)
        touch = self.pool.touch(deepest, request.keys, now, request.num_tokens, next_use)
        self._running.admitted(Running(request, n0, touch, resumed, kept, stale=self.is_off or not request.stores))
        self._hit_tokens += end - n0
        self.edge.offload.used(request.keys, self.planner.full_chunks(n0))

    def due(self) -> list[Hashable]:
        """The requests that may have crossed a boundary since `computed` was last called for them.

        An engine that steps many requests at once calls `computed` for these and no others (rule 16).
        """
        return self._running.due()

    def computed(self, request_id: Hashable, num_tokens: int) -> None:
        """A finished step has computed the first `num_tokens` tokens of the request: no drafts, no placeholders.

        From now on a chunk of these that the device does not find counts as evicted. Ignored while the request loads,
        if it is not running, and if it was admitted before a reset.
        """
        self._running.computed(request_id, num_tokens)

    def goes_on(self, request_id: Hashable) -> None:
        """The request computes while its load is in flight: the ranks order its kernels after the load.

        `computed` counts for it from now on.
        """
        running = self._running.get(request_id)
        if running is not None:
            running.load = None

    def step(self) -> StepPlan:
        """An engine step begins: what all ranks are to copy after the compute of the steps before.

        Short loads come before long ones, each behind the stores that it follows: they wait for one link, and so their
        mean wait is least. Before them come those whose requests go on, because a step waits for these, and first
        stores that hold compute; last those that nobody waits for.
        """
        self._running.begin_step()
        self._is_full = False
        plan = self.edge.begin_step()
        return plan._replace(transfers=_in_turn(plan.transfers, self._turn)) if len(plan.transfers) > 1 else plan

    def catch_up(self) -> None:
        """Do what would have delayed the step's plan, now that it has gone out to the ranks.

        Optional: `report` and the next `step` do so too.
        """
        self.edge.catch_up()

    def preempted(self, request_id: Hashable, num_tokens: int = 0) -> None:
        """The request lost its device blocks and will be admitted again. What it computed is stored, at once or when
        the device hands it out.

        In prefill that is what was reported as computed, in decode its first `num_tokens` tokens. Ignored for a request
        that is not running, here and in `finished`.
        """
        running = self._running.leave(request_id)
        if running is not None:
            self._running.keep_last(running, num_tokens if running.decodes else None)
            self.edge.offload.preempted(running)
            self._note_useless(running)

    def finished(self, request_id: Hashable, num_tokens: int) -> None:
        """The request ended, with `num_tokens` computed, and still holds its device blocks."""
        running = self._running.leave(request_id)
        if running is not None:
            self._running.keep_last(running, num_tokens)
            self.edge.offload.ended(running)
            self._note_useless(running)

    def report(self, report: RankReport) -> list[Resolved]:
        """A rank has finished transfers. The transfers that end with this report. Reports may be late or repeated.

        Raises MisuseError for a rank that does not exist.
        """
        resolved = []
        for ended in self.edge.report(report):
            resolved.append(self._resolved(ended))
            self._committed(ended.committed)
            if ended.is_fatal and not self.is_off:
                logger.error("%d copies have failed in a row: the host cache is off from now on", FAILURES_IN_A_ROW)
                self.turn_off()
        self.catch_up()
        return resolved

    def invalidated(self, device_blocks: Iterable[int]) -> None:
        """These device blocks hold wrong bytes, and so may all that was computed over them: if there are any, no store
        in flight registers anything (rule 13). A load whose hit was found before saves nothing.
        """
        self.edge.invalidated(device_blocks)

    def reset(self) -> None:
        """Nothing cached before now may be used again. Never fails, takes effect at once (rule 13).

        Transfers in flight resolve as usual and register nothing. Nothing more is stored for running requests, whose
        tokens from before the reset must not be used either.
        """
        self._begin_anew()

    def turn_off(self) -> None:
        """Miss every lookup and store nothing from now on. Transfers in flight resolve as after a reset. What is below
        the host is as right as before, and stays.
        """
        self.edge.is_off = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The host forgets all that it has."""
        self.edge.reset()
        self._running.make_stale()

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds. `min_load_tokens` may follow from it."""
        self.edge.break_even.prefilled(num_tokens, seconds)

    @property
    def min_load_tokens(self) -> int:
        """The shortest load, in tokens: as given, or as it follows from the rates reported."""
        return self.edge.break_even.least_tokens

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is planned or in flight. An idle engine keeps stepping until none is."""
        return self.edge.has_transfers

    def statistics(self) -> CacheStatistics:
        """Counts of what the cache holds and has done so far. O(pins)."""
        return self.edge.statistics(
            self._work,
            running=len(self._running),
            hit_tokens=self._hit_tokens,
            union_misses=self._union_misses,
            hints=HintStatistics(**self._hints),
        )

    def take_events(self) -> list[BoundaryEvent]:
        """The boundaries that became hittable on the host, or no longer are, since the last call.

        Empty unless the cache was built with `log_boundaries`.
        """
        return self.pool.take_events()

    def may_be_named(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether events may still name each chunk although no request that has it runs: the device has it, and may
        store it; or the host has it or will, and may store its checkpoint, or write it to a tier.
        """
        here, is_covered = self._device.find_all(keys), self.edge.stores.is_covered
        return [blocks is not None or is_covered(key) for key, blocks in zip(keys, here, strict=True)]

    def may_have(self, key: bytes) -> bool:
        """Whether the host has this chunk."""
        return self.pool.find(key) is not None

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(blocks)."""
        self.edge.check_valid()

    # Details

    def _new_offload(self, stores: StorePlanner, mode: str) -> Offload:
        if mode == "eager":
            return Eager(stores)
        return Late(stores) if self.pool.shape.is_shared else Lazy(stores, self._steps, lambda: self._running)

    def _resolved(self, ended: Ended) -> Resolved:
        transfer = ended.transfer
        if not isinstance(transfer, LoadTransfer):
            return Resolved(transfer.id, Direction.STORE, None, ended.ok)
        running = self._running.get(transfer.owner)
        if running is not None and running.load is transfer:
            running.load = None
        return Resolved(transfer.id, Direction.LOAD, transfer.owner, ended.ok)

    def _committed(self, stores: Sequence[StoreTransfer]) -> None:
        """Hook of a cache above a tier: the chunks of these stores can be found from now on."""

    def _turn(self, load: TransferPlan) -> tuple[bool, int]:
        running = self._running.get(self.edge.ledger.loads[load.id].owner)
        goes_on = running is not None and running.load is None
        return not goes_on, load.num_bytes

    def _loading(self, request: Request, n0: int) -> LoadTransfer | None:
        """The load that brings enough from `n0` on to be waited for. Found by two keys, and not by all of the prompt: a
        convoy of prompts on one prefix is looked up in each step, while threads of the same process copy.
        """
        if not self.edge.ledger.loading or not self._waits_for_loads or self.planner.has_checkpoints:
            return None
        keys, grid = request.keys, self.planner.grid_tokens
        end = self.planner.chunks_to_resume(-(-(n0 + max(1, self.min_load_tokens)) // grid))
        if end > self.coordinator.findable(keys, request.num_tokens):
            return None
        first = self.edge.ledger.loading.get(keys[n0 // grid])
        return None if first is None or self.edge.ledger.loading.get(keys[end - 1]) is not first else first

    def _arriving(self, request: Request, boundary: int) -> StoreTransfer | None:
        """The store of the chunk at `boundary`, which has left the device, if enough is in flight to wait for."""
        at = boundary // self.planner.grid_tokens
        stop = self.coordinator.findable(request.keys, request.num_tokens)
        store = self.edge.ledger.writing.get(request.keys[at]) if self.edge.ledger.writing and at < stop else None
        if store is None or not self.pool.shape.is_shared or self._device.find(request.keys[at]) is not None:
            return None
        end = min(stop, at + -(-self.min_load_tokens // self.planner.grid_tokens))
        is_enough = (end - at) * self.planner.grid_tokens >= self.min_load_tokens
        return store if is_enough and all(map(self.edge.stores.is_covered, request.keys[at:end])) else None

    def _awaited(
        self, request: Request, n0: int, boundary: int, arriving: StoreTransfer | None, now: float
    ) -> float | None:
        """The deadline of the transfer that a load of tokens [n0, boundary) waits for."""
        if arriving is not None:
            arriving.deadline = arriving.deadline or now + STORE_SECONDS
            if now < arriving.deadline:
                return arriving.deadline
        loading = self.edge.ledger.loading.get(request.keys[n0 // self.planner.grid_tokens])
        if loading is not None and now < loading.deadline:
            return loading.deadline
        if boundary == n0:  # exchanged: nobody else can load it
            return now + PENDING_GRACE_SECONDS if self._is_exchanged(request, n0) else None
        if not self.planner.has_checkpoints:  # in those, waiting costs hits
            others = [load.deadline for load in self.edge.ledger.loads.values() if now < load.deadline]
            if others and not self._has_room_for(n0, boundary):
                return min(others)
        return None

    def _is_exchanged(self, request: Request, n0: int) -> bool:
        """Whether another load is taking the chunk at `n0` from the host to the device."""
        at = n0 // self.planner.grid_tokens
        loading = self.edge.ledger.loading if self._exchanges else ()
        if not loading or at >= self.coordinator.findable(request.keys, request.num_tokens):
            return False
        return request.keys[at] in loading and self.pool.find(request.keys[at]) is None

    def _has_room_for(self, n0: int, boundary: int) -> bool:
        """Whether a load of tokens [n0, boundary) takes no device block that is still to be stored, whatever else this
        step allocates. After one without room none has room in this step, or small loads could overtake a large one
        for ever.
        """
        blocks = self._num_destinations(n0, boundary) + self._steps.blocks(self.planner, len(self._running))
        if not self._is_full and not self.edge.offload.has_room_for(blocks):
            self._is_full = True
        return not self._is_full

    def _num_destinations(self, n0: int, boundary: int) -> int:
        """How many device blocks a load of tokens [n0, boundary) fills."""
        grid = self.planner.grid_tokens
        return sum(self.planner.device_blocks(n0 // grid, boundary // grid))

    def _resume_node(self, request: Request, boundary: int) -> int | None:
        """Node that must be pinned on the host to resume at `boundary`, if all of it is here."""
        chunks, off_grid = divmod(boundary, self.planner.grid_tokens)
        if off_grid or not 0 <= chunks <= len(request.keys):
            raise MisuseError(f"request {request.id!r} has no boundary at token {boundary} (rule 6)")
        return self.coordinator.resume_node(request.keys, chunks) if chunks else None

    def _is_union_miss(self, request: Request, end: int) -> bool:
        """Whether the last boundary was missed only because the host has the chunks and the device the checkpoint."""
        last = self.coordinator.findable(request.keys, request.num_tokens)
        boundary = self.planner.resumable_chunks(last)
        if boundary * self.planner.grid_tokens <= end or self.pool.resident_run(request.keys, 0, last) < last:
            return False
        if self.coordinator.resume_node(request.keys, boundary) is not None:
            return False  # the host has both: the engine took less than it was offered
        return self._device.find_checkpoint(self.coordinator.checkpoint_at(request.keys, last)) is not None

    def _note_useless(self, running: Running) -> None:
        """The request ended: those of its host chunks that lead to no checkpoint are no use."""
        if self.planner.has_checkpoints:
            here = self.pool.resident_run(running.keys, 0, running.confirmed)
            deepest = self.pool.find(running.keys[here - 1]) if here else None
            if deepest is not None:
                self.pool.resume_points.may_be_useless(deepest)

    def _admitted(self, request_id: Hashable) -> Running:
        running = self._running.get(request_id)
        if running is None:
            raise MisuseError(f"request {request_id!r} is not admitted")
        return running


def _check(planner: HybridChunkPlanner, host_blocks: int, checkpoint_interval: int | None) -> None:
    """Raises ConfigurationError when the parts of a cache do not fit together."""
    if checkpoint_interval is not None and checkpoint_interval % planner.grid_tokens:
        raise ConfigurationError(
            f"checkpoint_interval must be a multiple of the grid's {planner.grid_tokens} tokens, "
            f"got {checkpoint_interval}"
        )
    least = planner.fewest_blocks
    if host_blocks < least:
        raise ConfigurationError(
            f"the host needs at least the {least} blocks of a chunk and its checkpoint, got {host_blocks}"
        )


def _in_turn(
    transfers: Sequence[TransferPlan], turn: Callable[[TransferPlan], tuple[bool, int]]
) -> tuple[TransferPlan, ...]:
    """The transfers of a plan in the order of `CPUPrefixCache.step`; without loads as they were planned."""
    loads = sorted((each for each in transfers if each.direction is Direction.LOAD), key=turn)
    if not loads:
        return tuple(transfers)
    planned = {each.id: each for each in transfers}
    holding = [each.id for each in transfers if each.holds_compute]
    loading = [id for load in loads for id in (*load.after, load.id) if id in planned]
    return tuple(planned[id] for id in dict.fromkeys((*holding, *loading, *planned)))
