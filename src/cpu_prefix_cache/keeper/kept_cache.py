"""KeptCache: the host cache of an engine whose pool is kept by another process, for all engines of a node.

To an engine it is a CPUPrefixCache that answers Pending more often: nothing is known here, so the keeper is queried.

    lookup     `run` goes to the keeper: Pending, until it has answered or the deadline has passed, which it may put off
               while it reads a tier (questions.py)
    lookup     what it has is leased for this request: Hit, or Miss
    load       straight from the keeper's slots; the lease ends with the load
    computed   the prompt is whole, or at a checkpoint that is wanted, or the request ends: what there is to store is
               held on the device, `take` goes out (takes.py)
    step       slots were granted for those that nobody has: they are stored
    report     they are committed: all engines find them

A reset is the namespace of the revision that it names: what is there under that one is found, also what was before, and
nothing else. Without a revision nothing is.

A slot has the rows of all ranks of an engine: a store is committed when every rank has written its own, and a lease
ends when every rank has read.

A chunk is stored if a request can resume after it, or after one below it that is stored with it: so of windows and
states nothing is, unless the device has the checkpoint.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice

from cpu_prefix_cache.keeper.answers import NOTHING, Leased
from cpu_prefix_cache.keeper.counts import Counts
from cpu_prefix_cache.keeper.messenger import Messenger
from cpu_prefix_cache.keeper.protocol import Kind, ProtocolError
from cpu_prefix_cache.keeper.questions import Question, Questions
from cpu_prefix_cache.keeper.shape import KINDS, MOST_GROUPS, MOST_PARTS, planner_of, spelled
from cpu_prefix_cache.keeper.takes import Take, Takes
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan
from cpu_prefix_cache.messages.request import MISS, Answer, Hit, Pending, Request
from cpu_prefix_cache.messages.stats import NO_HINTS, CacheStatistics
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.offload.destinations import check_destinations
from cpu_prefix_cache.offload.device import Device, check_fits
from cpu_prefix_cache.offload.prefill_rate import PrefillRate
from cpu_prefix_cache.offload.transfers import LoadTransfer, Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.group_copies import GroupCopies, num_bytes
from cpu_prefix_cache.pool.wanted import is_worth, wanted_depths
from cpu_prefix_cache.prefix_cache import Resolved

logger = logging.getLogger(__name__)

LOAD_SECONDS = 0.25  # for which a second request waits for the load of the same chunks (rule 12)


@dataclass(slots=True, eq=False)
class _Running:
    """`known` of its chunks are in the pool, or on their way there, and `confirmed` computed. `kept` are the depths, in
    chunks, at which checkpoints are wanted, ascending; `resumed` is where it began.
    """

    request: Request
    n0: int
    known: int
    question: Question | None  # whose lease its load uses
    resumed: int
    kept: Sequence[int]
    confirmed: int = 0
    stored: set[int] = field(default_factory=set)  # depths up to which something was taken, and not lost
    is_stale: bool = False
    load: LoadTransfer | None = None


class KeptCache:
    """For an engine of so many `ranks`, whose `device` has blocks as of `planner`, over the slots that the messenger
    knows. Of these `ready_slots`, from the first on, may be copied to and from; more as all ranks report them.

    After FAILURES_IN_A_ROW stores in a row, or loads, that failed, the cache turns itself off for good.

    Raises ConfigurationError for a model that it does not take.
    """

    def __init__(
        self,
        planner: HybridChunkPlanner,
        device: Device,
        messenger: Messenger,
        *,
        ready_slots: int,
        ranks: int = 1,
        min_load_tokens: int = 0,
    ) -> None:
        check_takes(planner)
        check_fits(device, planner)
        self.planner = planner
        self._copies = GroupCopies(planner)
        self._min_load_tokens = min_load_tokens
        self._device, self._messenger = device, messenger
        self._num_slots = messenger.num_slots
        self._ready_on = dict.fromkeys(range(ranks), ready_slots)
        self._ledger = TransferLedger(ranks)
        self._questions, self._takes = Questions(messenger), Takes(messenger, device, planner.host_blocks_per_chunk)
        self._pool_counts = Counts(messenger)
        self._loading: dict[int, Question] = {}  # by the load that uses its lease
        self._writing: dict[int, Take] = {}  # by its store
        self._running: dict[Hashable, _Running] = {}
        self._prefilling: dict[Hashable, _Running] = {}  # those whose prompts are not stored yet
        self._ids = count()
        self._epoch = 0
        self.is_off = False
        self._prefill = PrefillRate()
        self._failures = Counter[Direction]()
        self._counts = Counter[str]()  # by their names in CacheStatistics
        self._hit_tokens = 0

    # Questions

    def lookup(self, request: Request, n0: int, now: float) -> Answer:
        """As CPUPrefixCache. The first answer of a request is Pending, unless the pool could add nothing."""
        self.passed(now)
        grid = self.planner.grid_tokens
        keys = self._findable(request)
        least = n0 + max(1, self._min_load_tokens)
        if self.is_off or len(keys) * grid < least:
            return MISS
        question = self._questions.of(request.id, keys)
        if question is None:
            question = self._questions.ask(request.id, next(self._ids), keys, now, self._chunk_nanoseconds)
        if question is None:
            return MISS
        if question.leased is None:
            return Pending(question.deadline)
        boundary = self._usable(question.leased, n0 // grid) * grid
        if boundary < least:
            return MISS
        loading = self._ledger.loading.get(request.keys[n0 // grid])
        if loading is not None and now < loading.deadline:
            return Pending(loading.deadline)
        return Hit(boundary, self.planner.full_chunks(n0) * grid)

    def check_destinations(self, destinations: Sequence[Sequence[int]], n0: int, boundary: int) -> None:
        """As CPUPrefixCache."""
        check_destinations(self.planner, self._device.null_block, destinations, n0, boundary)

    def filling(self) -> dict[int, Hashable | None]:
        """As CPUPrefixCache."""
        return self._ledger.filling()

    def boundaries(self, request_id: Hashable) -> list[int]:
        """As CPUPrefixCache."""
        running = self._admitted(request_id)
        return [depth * self.planner.grid_tokens for depth in running.kept if depth > running.resumed]

    def branch(self, request: Request, end: int) -> int | None:
        """As CPUPrefixCache, once the keeper has answered."""
        if not self.planner.has_checkpoints:
            return None
        depth = self._branch(request, self._present(request), end)
        is_wanted = is_worth(self.planner, depth, end, request.num_tokens)
        return depth * self.planner.grid_tokens if is_wanted else None

    def boundaries_of(self, request: Request, end: int) -> list[int]:
        """As CPUPrefixCache, once the keeper has answered."""
        return [depth * self.planner.grid_tokens for depth in self._wanted(request, self._present(request), end)]

    def reserve(self, request: Request, boundary: int, n0: int = 0) -> None:
        """As CPUPrefixCache. None: what a lookup has found is leased until it is loaded."""

    def release(self, lease: Pin) -> None:
        """As CPUPrefixCache."""

    def may_have(self, key: bytes) -> bool:
        """Whether the pool may have this chunk. It is not queried."""
        return True

    # Events

    def passed(self, now: float) -> None:
        """Time has come to `now`, and answers may have come."""
        for connection, message in self._messenger.answers():
            if message.kind is Kind.RAN:
                self._questions.answered(connection, message, now)
            elif message.kind is Kind.READING:
                self._questions.reading(connection, message, now)
            elif message.kind is Kind.TOOK and (take := self._takes.answered(message)) is not None:
                self._plan_store(take)
            elif message.kind is Kind.COUNTED:
                self._pool_counts.answered(message)
        self._questions.passed(now)
        self._takes.passed(now)
        self._pool_counts.passed(now, self._ids)

    def admit(self, request: Request, n0: int, boundary: int | None = None, now: float | None = None) -> None:
        """As CPUPrefixCache."""
        if request.id in self._running:
            return
        question = self._questions.take(request.id, self._findable(request))
        leased = NOTHING if question is None else question.leased or NOTHING
        end = n0 if boundary is None else max(n0, boundary)
        if question is not None and end == n0:
            self._questions.give_up(question)
            question = None
        running = _Running(
            request,
            n0,
            leased.present,
            question,
            resumed=self.planner.full_chunks(end),
            kept=self._kept(request, n0, end, leased.present) if self.planner.has_checkpoints else (),
            is_stale=self.is_off or not request.stores,
        )
        self._running[request.id] = self._prefilling[request.id] = running
        self._hit_tokens += end - n0

    def load(self, request_id: Hashable, boundary: int, destinations: Sequence[Sequence[int]], now: float) -> int:
        """As CPUPrefixCache. If another keeper has come since the lookup, the load is planned as failed."""
        running, grid = self._admitted(request_id), self.planner.grid_tokens
        start, stop = running.n0 // grid, boundary // grid
        question = running.question
        if running.load is not None or question is None:
            raise MisuseError(f"request {request_id!r} is loading already, or was admitted without a boundary")
        leased = question.leased or NOTHING
        if boundary % grid or not running.n0 < boundary or stop > self._usable(leased, start):
            raise MisuseError(f"cannot load request {request_id!r} from token {running.n0} to {boundary} (rule 6)")
        self.check_destinations(destinations, running.n0, boundary)
        hold = self._device.hold([*chain.from_iterable(destinations)])
        running.question = None
        is_leased = stop == leased.depth or not self.planner.needs_checkpoint(stop)
        may_use = is_leased and self._messenger.begin_use(question.connection)
        copies = self._load_copies(leased, start, stop, destinations) if may_use else ()
        plan = self._ledger.new_plan(Direction.LOAD, copies, num_bytes(self.planner, copies), failed=not may_use)
        running.load = LoadTransfer(
            plan,
            Chain(None, running.request.keys[start:stop]),
            hold=hold,
            owner=request_id,
            deadline=now + LOAD_SECONDS,
        )
        if may_use:
            self._loading[plan.id] = question
        else:
            self._questions.give_up(question)
        self._ledger.add(running.load)
        return plan.id

    def due(self) -> list[Hashable]:
        """The requests whose prompts may be whole by now."""
        return list(self._prefilling)

    def computed(self, request_id: Hashable, num_tokens: int) -> None:
        """As CPUPrefixCache. A prompt is stored when it is whole, and when it has a checkpoint that is wanted."""
        running = self._prefilling.get(request_id)
        if running is None or running.load is not None:
            return
        is_whole = num_tokens >= running.request.num_tokens
        if is_whole:
            del self._prefilling[request_id]
        self._confirm(running, num_tokens, is_over=is_whole)

    def goes_on(self, request_id: Hashable) -> None:
        """As CPUPrefixCache."""
        running = self._running.get(request_id)
        if running is not None:
            running.load = None

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """As CPUPrefixCache. The keeper reads a tier only where that is sooner than computing."""
        self._prefill.timed(num_tokens, seconds)

    def finished(self, request_id: Hashable, num_tokens: int) -> None:
        """As CPUPrefixCache, here and in `preempted`."""
        running = self._running.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        if running is not None and running.question is not None:
            self._questions.give_up(running.question)
        if running is not None and running.load is None:
            self._confirm(running, num_tokens, is_over=True)

    preempted = finished

    def step(self) -> StepPlan:
        """An engine step begins: what is to be copied after the compute of the steps before."""
        self._takes.step(self._ids)
        return self._ledger.step(self._epoch)

    def catch_up(self) -> None:
        """Nothing: no plan waits for anything here."""

    def report(self, report: RankReport) -> list[Resolved]:
        """A rank has finished transfers. Those that end with this report."""
        if report.ready_blocks is not None:
            self._ready_on[report.rank] = report.ready_blocks
        for id in report.late:
            load = self._ledger.loads.get(id)
            if load is not None and not load.is_cancelled:
                self._counts["loads_failed"] += 1
                self._ledger.cancel(load)
        return [self._land(transfer) for transfer in self._ledger.take_in(report)]

    def invalidated(self, device_blocks: Iterable[int]) -> None:
        """As CPUPrefixCache."""
        if not list(device_blocks):
            return
        for transfer in list(self._ledger):
            if transfer.id in self._writing:
                self._ledger.cancel(transfer)
        self._takes.drop_all()

    def reset(self, revision: str | None = None) -> None:
        """As CPUPrefixCache, but what engines have stored under this `revision` is found; without one nothing is, and
        nobody meets this one.
        """
        self._epoch += 1
        for transfer in list(self._ledger):
            self._ledger.cancel(transfer)
        self._takes.drop_all()
        self._questions.reset()
        for running in self._running.values():
            running.is_stale = True
        self._prefilling.clear()
        self._messenger.rename(revision)

    def close(self) -> None:
        """The engine ends, and no copy is under way."""
        self._messenger.close()

    @property
    def has_transfers(self) -> bool:
        """Whether anything is copied, or may soon be, or has a lease. An idle engine keeps stepping until not."""
        return len(self._ledger) > 0 or len(self._takes) > 0 or len(self._questions) > 0

    def statistics(self) -> CacheStatistics:
        """Counts of this engine, but those of the pool, which are the keeper's (`counts.py`)."""
        loading = len(self._ledger.loads)
        return CacheStatistics(
            pool=self._pool_counts.statistics(self._num_slots, self._ready),
            running=len(self._running),
            storing=len(self._ledger) - loading,
            loading=loading,
            store_refusals=self._takes.refused,
            hit_tokens=self._hit_tokens,
            hints=NO_HINTS,
            **self._counts,
        )

    # Details

    @property
    def _ready(self) -> int:
        """How many slots, from the first on, every rank can copy to and from."""
        return min(self._ready_on.values())

    @property
    def _chunk_nanoseconds(self) -> int:
        """How long prefill computes a chunk; 0: that was not measured."""
        rate = self._prefill.tokens_per_second
        return 0 if rate is None else round(self.planner.grid_tokens / rate * 1e9)

    def _findable(self, request: Request) -> Sequence[bytes]:
        """The keys of a request that the keeper is queried for."""
        return tuple(request.keys[: self.planner.findable_chunks(request.num_tokens)])

    def _present(self, request: Request) -> int:
        """How many of its chunks the pool had, as far as the keeper has answered."""
        question = self._questions.of(request.id, self._findable(request))
        return (NOTHING if question is None else question.leased or NOTHING).present

    def _usable(self, leased: Leased, start: int) -> int:
        """Up to which chunk its slots can be copied from, by now: with a checkpoint all of it, or nothing."""
        if self._ready >= self._num_slots or max(leased.slots, default=0) < self._ready:
            return leased.depth
        width = self.planner.host_blocks_per_chunk
        late = (at for at in range(start * width, leased.depth * width) if leased.slots[at] >= self._ready)
        return 0 if self.planner.has_checkpoints else next(late, leased.depth * width) // width

    def _load_copies(
        self, leased: Leased, start: int, stop: int, destinations: Sequence[Sequence[int]]
    ) -> tuple[GroupCopy, ...]:
        width = self.planner.host_blocks_per_chunk
        chunks, rest = leased.slots[start * width : stop * width], iter(leased.slots[leased.depth * width :])
        pieces = None
        if self.planner.needs_checkpoint(stop):
            pieces = [tuple(islice(rest, width)) for width in self.planner.checkpoint_widths(stop)]
        return tuple(self._copies.of_load(chunks, pieces, start, stop, destinations))

    def _branch(self, request: Request, present: int, end: int) -> int:
        """Where this prompt departs from what somebody had before: the pool, as it was, or this device."""
        last = min(self.planner.hittable_chunks(request.num_tokens), len(request.keys))
        here = min(max(present, end // self.planner.grid_tokens), last)
        return here + bisect_left(range(here, last), True, key=lambda at: self._device.find(request.keys[at]) is None)

    def _kept(self, request: Request, n0: int, end: int, present: int) -> list[int]:
        """The depths at which checkpoints are wanted: also where it resumes, if the pool may not have that one."""
        depth = self.planner.full_chunks(end)
        return ([depth] if depth and end == n0 else []) + self._wanted(request, present, end)

    def _wanted(self, request: Request, present: int, end: int) -> list[int]:
        branch = self._branch(request, present, end)
        return wanted_depths(self.planner, len(request.keys), end, request.num_tokens, branch)

    def _confirm(self, running: _Running, num_tokens: int, *, is_over: bool) -> None:
        """Its first `num_tokens` tokens are computed. Store what that has completed, the deepest first; where the
        prompt or the request is over, also what was lost.
        """
        before, stop = running.confirmed, min(self.planner.full_chunks(num_tokens), len(running.request.keys))
        running.confirmed = max(before, stop)
        depths = {depth for depth in running.kept if depth <= stop and (is_over or depth > before)}
        if is_over:
            depths.add(stop)
        for depth in sorted(depths, reverse=True) if not (running.is_stale or self.is_off) else ():
            self._store(running, depth)

    def _store(self, running: _Running, depth: int) -> None:
        """Store what the pool may lack of so many of its chunks and, if resuming after them takes one, the checkpoint
        there. Where the device does not have that, the chunks up to the last that takes none.
        """
        keys, pieces = running.request.keys, None
        if depth in running.stored:
            return
        if self.planner.needs_checkpoint(depth):
            pieces = self._device.find_checkpoint(self._copies.checkpoint_at(keys, depth))
        while pieces is None and depth > running.known and self.planner.needs_checkpoint(depth):
            depth -= 1
        if depth > running.known or pieces is not None:
            first = min(running.known, depth)
            lost = partial(_lost, running, depth)
            end = self._takes.begin(next(self._ids), keys[:depth], first, pieces, lost)
            if end is not None:
                running.known = max(running.known, end)
                running.stored.add(depth)

    def _plan_store(self, take: Take) -> None:
        is_ready = max(take.granted.all_slots) < self._ready
        if not is_ready or self.is_off or not self._messenger.begin_use(take.connection):
            self._takes.end(take, 0)
            take.lost(take.first)
            return
        copies = self._store_copies(take)
        plan = self._ledger.new_plan(Direction.STORE, copies, num_bytes(self.planner, copies))
        self._writing[plan.id] = take
        self._ledger.add(Transfer(plan, Chain(None, take.keys[take.first :]), hold=None))

    def _store_copies(self, take: Take) -> tuple[GroupCopy, ...]:
        granted, copies = take.granted, list[GroupCopy]()
        if granted.pieces is not None and take.pieces is not None:
            pieces = [slots or None for slots in granted.pieces]
            copies += self._copies.checkpoint_copies(len(take.keys), pieces, take.pieces)
        if granted.slots:
            blocks = [*chain.from_iterable(take.blocks)]
            copies += self._copies.of_chunks(granted.slots, self._copies.chunk_blocks_by_group(blocks))
        return tuple(copies)

    def _land(self, transfer: Transfer) -> Resolved:
        """A transfer has ended: nothing reads or writes its blocks and slots any more."""
        direction = transfer.plan.direction
        self._ledger.remove(transfer)
        if isinstance(transfer, LoadTransfer):
            self._land_load(transfer)
        else:
            self._land_store(transfer, self._writing.pop(transfer.id))
        if not transfer.is_cancelled and not transfer.plan.failed and not transfer.unfit:
            self._failures[direction] = 0 if transfer.succeeded else self._failures[direction] + 1
        if self._failures[direction] >= FAILURES_IN_A_ROW and not self.is_off:
            logger.error("%d copies have failed in a row: the pool is not used from now on", FAILURES_IN_A_ROW)
            self.is_off = True
            self.reset()
        return Resolved(transfer.id, direction, transfer.owner, transfer.succeeded)

    def _land_load(self, load: LoadTransfer) -> None:
        """A failed load withdraws nothing (rule 10): one engine's device does not decide what all others find.
        FAILURES_IN_A_ROW of them end its use of the pool.
        """
        self._device.release(load.hold)
        if (question := self._loading.pop(load.id, None)) is not None:
            self._messenger.end_use()
            self._questions.give_up(question)
        running = self._running.get(load.owner)
        if running is not None and running.load is load:
            running.load = None
        if load.succeeded:
            self._counts["chunks_loaded"] += len(load.keys)
            self._counts["bytes_loaded"] += load.plan.num_bytes
        else:
            self._counts["loads_failed"] += not load.is_cancelled

    def _land_store(self, store: Transfer, take: Take) -> None:
        """A checkpoint is committed if all of the store is as it should be."""
        slots, width = take.granted.slots, self.planner.host_blocks_per_chunk
        fit = next((at for at, slot in enumerate(slots) if slot in store.unfit), len(slots)) // width
        good = fit if store.succeeded else 0
        was_granted = take.granted.pieces is not None
        has_checkpoint = was_granted and store.succeeded and not store.unfit
        self._takes.end(take, good, has_checkpoint)
        self._messenger.end_use()
        self._counts["chunks_stored"] += good
        self._counts["checkpoints_stored"] += has_checkpoint
        nodes = len(take.blocks) + was_granted
        self._counts["bytes_stored"] += store.plan.num_bytes * (good + has_checkpoint) // nodes
        self._counts["store_unfit"] += len(take.blocks) - fit
        self._counts["stores_failed"] += not all(store.reports.values())
        self._counts["store_cancelled"] += fit - good

    def _admitted(self, request_id: Hashable) -> _Running:
        running = self._running.get(request_id)
        if running is None:
            raise MisuseError(f"request {request_id!r} is not admitted")
        return running


def _lost(running: _Running, depth: int, first: int) -> None:
    """Note that chunks from `first` up to this depth are not stored: they are offered again at the request's end."""
    running.known = min(running.known, first)
    running.stored.discard(depth)


def check_takes(planner: HybridChunkPlanner) -> None:
    """Raise ConfigurationError for a model that a pool of a node does not take."""
    if planner.lookahead_chunks:
        raise ConfigurationError(
            "a pool of a node knows no drafter (EAGLE, MTP) yet; start this engine without one, or give it host memory "
            "of its own"
        )
    groups = ", ".join(f"{group.name!r} ({group.kind})" for group in planner.groups)
    if not planner.host_blocks_per_chunk:
        raise ConfigurationError(
            "a pool of a node takes models with some full attention or MLA, since a window or a state is found below "
            f"chunks of these, and the groups are {groups}; give this engine host memory of its own"
        )
    if not all(type(group) in KINDS for group in planner.groups):
        raise ConfigurationError(
            f"a pool of a node has the groups of this library alone, and here are {groups}; give this engine host "
            "memory of its own"
        )
    try:
        of_keeper = planner_of(spelled(planner))
    except ProtocolError as error:
        raise ConfigurationError(
            f"a pool of a node is for models of at most {MOST_GROUPS} groups and {MOST_PARTS} parts ({error}), and the "
            f"groups are {groups}; give this engine host memory of its own"
        ) from error
    if [piece.host_blocks for piece in of_keeper.pieces] != [piece.host_blocks for piece in planner.pieces]:
        raise ConfigurationError("a pool of a node has no host blocks in whole pages; leave the tier out")
