"""TieredCache: a CPUPrefixCache with a tier below it. To an engine it is a CPUPrefixCache that sometimes answers
Pending.

    lookup      the host has less of the prompt than the tier, and reading it saves time (time_saved.py):
                noted as a *want*, and answered Pending until its deadline
    step        wants become promotions, first come, first served: chunks in slices, then the checkpoint
    report      of the tier: what was read is committed to the host, the good leading chunks of each slice
    lookup      a hit on the host; or, after the deadline, what the host has by then
    admit       the want is over

    lookup      of a store that others write, too, it is not known yet what it has: Pending, until that is known or the
                question's deadline (questions.py)

    want        noted --slices are read--> over --> admitted, or abandoned
                  `--- its deadline passes ----------^

An engine may report a request as soon as it is queued. Then the store is queried, and the want noted, before the first
lookup: what waits for its turn is read meanwhile, and its deadline begins with the lookup.

A prompt that a hint expects is read before its request comes (expected.py), while nobody waits for the tier: one prompt
at a time, one slice after the other. Then it is on the host like anything else, and no lease keeps it.

What is read for a want is `promotions.py`'s. What the host has of it is kept there, until the request is admitted, or
some time after the deadline.

The host declines nothing, because what it declines never reaches the tier; only the tier may decline.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from cpu_prefix_cache.messages.next_use import usable_next_use
from cpu_prefix_cache.messages.options import USUAL_OPTIONS, CacheOptions
from cpu_prefix_cache.messages.plan import StepPlan
from cpu_prefix_cache.messages.request import Answer, Hit, Pending, Request
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.messages.tier import TierOptions, TierPlan, TierReport
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.engine_steps import USUAL_ENGINE, EngineTraits
from cpu_prefix_cache.offload.transfers import StoreTransfer
from cpu_prefix_cache.prefix_cache import CPUPrefixCache
from cpu_prefix_cache.tiers.expected import Expected
from cpu_prefix_cache.tiers.promotions import NEVER, Promotions, Want
from cpu_prefix_cache.tiers.questions import REMEMBERED_SECONDS
from cpu_prefix_cache.tiers.tier_cache import TierCache
from cpu_prefix_cache.tiers.time_saved import Candidate

LEASE_SECONDS = 1.0  # beyond the deadline: some steps of an engine whose device is full


class TieredCache(CPUPrefixCache):
    """A CPUPrefixCache of `host_blocks` blocks with a tier that has the options `below`. Its planner is `in_pages`.

    `store_after` and `min_store_tokens` hold back what is written to the tier.

    Besides `step` and `report`, the ranks' tiers get `plan_below` in each step, and send `report_below`.

    Raises ConfigurationError for a tier smaller than twice the host, and like CPUPrefixCache.
    """

    def __init__(
        self,
        planner: HybridChunkPlanner,
        device: Device,
        *,
        host_blocks: int,
        below: TierOptions,
        ready_blocks: int | None = None,
        options: CacheOptions = USUAL_OPTIONS,
        engine: EngineTraits = USUAL_ENGINE,
    ) -> None:
        super().__init__(
            planner,
            device,
            host_blocks=host_blocks,
            ready_blocks=ready_blocks,
            options=options,
            engine=engine,
            is_above_tier=True,
        )
        self.below = TierCache(
            planner, self.pool, below, options, ranks=engine.ranks, log_boundaries=engine.log_boundaries
        )
        self._wants: dict[Any, Want] = {}  # by request that is not admitted, in the order in which they came
        self._queued: dict[Any, Request] = {}  # neither wanted nor looked up, in the order in which they came
        self._promotions = Promotions(self.coordinator, self.edge, self.below)
        self._expected = Expected(self._promotions.budget)
        self._ahead: Want | None = None  # of the first expected prompt
        self._tier_hit_tokens = self._read_ahead = 0

    # Questions

    def lookup(self, request: Request, n0: int, now: float) -> Answer:
        """As in CPUPrefixCache, and notes what the tier has beyond that: then the answer is Pending."""
        self.passed(now)
        self._queued.pop(request.id, None)
        want = self._wants.get(request.id)
        if want is not None and want.deadline == NEVER:
            self._promotions.begin_deadline(want)
        answer = super().lookup(request, n0, now)
        if isinstance(answer, Pending) or self.is_off:
            return answer
        if want is None:
            host_end = answer.boundary if isinstance(answer, Hit) else n0
            unknown_until = self._unknown_until(request, n0, host_end, self._promotions.queue_bytes)
            if unknown_until is not None:
                return Pending(unknown_until)
            want = self._promotions.want(request, host_end, self._least(n0), self._prefill)
            if want is None:
                return answer
            self._wants[request.id] = want
        if want.is_over:
            return answer
        if now < want.deadline:
            return Pending(want.deadline)
        self._promotions.late(want)
        return answer

    def _unknown_until(self, request: Request, n0: int, host_end: int, queue_bytes: int) -> float | None:
        """Time until which this request waits for the tier's answer. None where it is known, or could save no time."""
        return self._promotions.unknown_until(request, host_end, self._least(n0), self._prefill, queue_bytes)

    @property
    def _prefill(self) -> float | None:
        return self.edge.break_even.prefill_tokens_per_second

    def _want_queued(self) -> None:
        """Note wants of queued requests, first come, first served, as far as there is room."""
        while self._queued and self._promotions.has_room:
            request = next(iter(self._queued.values()))
            early = self._early(request)
            if early is None:
                return
            del self._queued[request.id]
            chosen, host_end = early
            if chosen is not None:
                self._wants[request.id] = self._promotions.want_early(request, chosen, host_end)

    def _want_expected(self) -> None:
        """Note a want of the first expected prompt if no request waits for the tier; else end it, to begin again."""
        if not self._expected and self._ahead is None:
            return
        first, ahead = self._expected.first(self.below.now), self._ahead
        is_needed = bool(self._queued) or any(not want.is_over for want in self._promotions.open if want is not ahead)
        if ahead is not None and (is_needed or ahead.is_over or ahead.request is not first):
            self._end_ahead(ahead)
        while self._ahead is None and not is_needed and (first := self._expected.first(self.below.now)) is not None:
            early = self._early(first)
            if early is None:
                return
            chosen, host_end = early
            if chosen is not None and self._expected.has_room(chosen.num_bytes // self.planner.host_block_bytes):
                self._ahead = self._promotions.want_early(first, chosen, host_end, is_hint=True)
                self._wants[first.id] = self._ahead
            else:
                self.below.admitted(first.id)
                self._expected.done(first)

    def _early(self, request: Request) -> tuple[Candidate | None, int] | None:
        """The best to read of a request before its lookup, if anything, and the end of what the host has. None: a
        store has not answered yet.
        """
        n0, host_end = self._here(request)
        if self._unknown_until(request, n0, host_end, queue_bytes=0) is not None:
            return None
        return self._promotions.chosen_early(request, host_end, self._least(n0), self._prefill), host_end

    def _put_off_a_queued_one(self) -> None:
        """Give up what was read for the last request that was not looked up yet: one that was lacks room. It goes
        behind all that wait: before them it would be read for again at once, and an engine did not come to rest.
        """
        queued = (
            want for want in reversed(self._promotions.open) if want.deadline == NEVER and want is not self._ahead
        )
        want = next(queued, None)
        if want is not None:
            del self._wants[want.request.id]
            self._promotions.end(want)
            self._queued[want.request.id] = want.request

    def _end_ahead(self, ahead: Want) -> None:
        self._ahead = None
        self._expected.promoted(ahead.blocks)
        if ahead.is_over:
            self._read_ahead += 1
            self._expected.done(ahead.request)
        self.abandoned(ahead.request.id)

    def _here(self, request: Request) -> tuple[int, int]:
        """How many tokens the device has of a request, as far as can be seen, and the host together with it."""
        keys, grid = request.keys, self.planner.grid_tokens
        stop = min(len(keys), (request.num_tokens - 1) // grid)
        n0 = grid * bisect_left(range(stop), True, key=lambda at: self._device.find(keys[at]) is None)
        return n0, max(n0, self.coordinator.longest_boundary(keys, n0, request.num_tokens))

    def _least(self, n0: int) -> int:
        """Up to this token nothing would be loaded from the host."""
        return n0 + max(1, self.min_load_tokens) - 1

    # Events

    def admit(self, request: Request, n0: int, boundary: int | None = None, now: float | None = None) -> None:
        if now is not None:
            self.passed(now)
        is_new = request.id not in self._running
        super().admit(request, n0, boundary, now)
        self._queued.pop(request.id, None)
        self.below.admitted(request.id)
        want = self._wants.pop(request.id, None)
        if want is not None:
            self._tier_hit_tokens += max(0, (boundary or 0) - want.host_end)
        elif is_new:
            self.below.pool.touch(None, request.keys, now, request.num_tokens, usable_next_use(request.next_use))
        if is_new and boundary is not None and boundary > n0:
            self.below.demotion.used(request.keys, self.planner.full_chunks(boundary))

    def queued(self, request: Request, now: float) -> None:
        """The engine has a new request, which may wait for its turn: what the tier has of it is read meanwhile.

        It is admitted later, or `abandoned`.
        """
        self.passed(now)
        if not self.is_off:
            self._queued[request.id] = request
            self._unknown_until(request, *self._here(request), queue_bytes=0)  # queries a store
            self._want_queued()

    def abandoned(self, id: Hashable) -> None:
        """A request that was never admitted has ended, or will not be looked up again: nothing more is read for it."""
        self._queued.pop(id, None)
        self.below.admitted(id)
        want = self._wants.pop(id, None)
        if want is not None:
            self._promotions.end(want)

    def expected(self, keys: Sequence[bytes], now: float) -> None:
        """A prompt that begins with these chunks may come soon: what the tier has of it is read if nobody waits."""
        self.passed(now)
        self._expected.add(keys, len(keys) * self.planner.grid_tokens + 1, now)

    def passed(self, now: float) -> None:
        """Time has come to `now`. Called where no requests come: leases and pauses end by it."""
        self.below.passed(max(self.below.now, now))

    def step(self) -> StepPlan:
        for want in list(self._promotions.open):
            if self._wants.get(want.request.id) is not want:  # admitted: by now its load has pinned what it needs
                self._promotions.end(want)
        if not self.is_off:
            self._want_expected()
            self._want_queued()
        may_read = True
        for want in sorted(self._promotions.open, key=lambda want: want.deadline == NEVER):  # first those looked up
            if self.below.now >= want.deadline + (LEASE_SECONDS if want.has_begun else 0):
                self._promotions.late(want)
                self._promotions.end(want)
            elif not want.is_over and (may_read or want.has_begun):
                may_read = self._promotions.advance(want, may_read)
                if not may_read and want.deadline < NEVER:
                    self._put_off_a_queued_one()
        while self._wants and self.below.now >= next(iter(self._wants.values())).deadline + REMEMBERED_SECONDS:
            del self._wants[next(iter(self._wants))]
        return super().step()

    def plan_below(self) -> TierPlan:
        """Plan for the tier of every rank in this step. Called after `step`."""
        return self.below.plan()

    def catch_up(self) -> None:
        super().catch_up()
        self.below.edge.catch_up()

    def report_below(self, report: TierReport) -> None:
        """The tier of a rank has finished transfers."""
        loads = self.below.report(report)
        for ended, load in loads:
            self._committed(self._promotions.ended(ended, load))
        for want in list(self._promotions.open) if loads else ():
            if want.has_begun and not want.is_over:
                self._promotions.advance(want, may_read=False)

    def reset(self, revision: str | None = None) -> None:
        """As of any cache. Who names the same `revision` of the weights, shares a store from now on; without one this
        process shares with nobody. Raises ConfigurationError for one that is no text, or empty.
        """
        if revision is not None:
            check_text("the revision of a reset", revision)
        super().reset()
        self.below.reset(revision)

    @property
    def has_transfers(self) -> bool:
        return super().has_transfers or self.below.has_transfers or (bool(self._expected) and not self.is_off)

    def tier_statistics(self) -> TierStatistics:
        """Counts of what the tier holds and has done so far. O(pins)."""
        return replace(self._promotions.statistics(), hit_tokens=self._tier_hit_tokens, read_ahead=self._read_ahead)

    def may_be_named(self, keys: Sequence[bytes]) -> list[bool]:
        """As in CPUPrefixCache. A tier's write that has ended may be put off until the host has evicted the chunk."""
        may, writing = super().may_be_named(keys), self.below.edge.ledger.writing
        return [each or key in writing or checkpoint_key(key) in writing for key, each in zip(keys, may, strict=True)]

    def check_valid(self) -> None:
        super().check_valid()
        self.below.edge.check_valid()
        self._promotions.check_valid()

    # Details

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.below.demotion.reset()  # what is written by now of the host is right
        if self._ahead is not None:
            self._end_ahead(self._ahead)
        for want in list(self._promotions.open):
            self._promotions.end(want)

    def _is_elsewhere(self, key: bytes) -> bool:
        return super()._is_elsewhere(key) or self.below.pool.find(key) is not None

    def _committed(self, stores: Sequence[StoreTransfer]) -> None:
        self.below.arrived(stores)
