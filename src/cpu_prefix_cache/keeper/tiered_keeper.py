"""TieredKeeper: a Keeper with a tier below its pool, which outlives keeper and engines.

    commit     what an engine has written goes to the tier, too, and at once: all of a node may be killed
    run        the tier has more of a prompt than the pool: it is read, and the question answered later
    run        of a store that others write, too, it is not known yet what it has: that is asked first
    step       what is read can be found like anything else, and so the question is answered as any; the same when the
               tier is late, loses some, or pauses

The tier holds names (`names.py`), of all namespaces, in slots as large as those of the pool: a chunk with the rows of
all ranks of an engine. What is read takes slots of the pool as engines' writes do, and counts for the engine that asks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from cpu_prefix_cache.keeper.answers import Leased
from cpu_prefix_cache.keeper.keeper import Keeper, path_of
from cpu_prefix_cache.keeper.protocol import MICROSECOND, MOST_MICROSECONDS
from cpu_prefix_cache.keeper.records import Records
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.options import USUAL_OPTIONS
from cpu_prefix_cache.messages.request import Pending, Request
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.tier import TierOptions, TierPlan, TierReport
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.transfers import StoreTransfer
from cpu_prefix_cache.tiers.promotions import Promotions, Want
from cpu_prefix_cache.tiers.tier_cache import TierCache

ROOM_SECONDS = 0.02  # after which it is seen whether the pool has room again for a read that found none


@dataclass(slots=True, eq=False)
class _Waiting:
    """A question whose answer waits until the deadline: for what a store says that it has, and then for its `want`."""

    keys: Sequence[bytes]
    chunk_nanoseconds: int
    want: Want | None = None
    deadline: float = 0.0


class TieredKeeper(Keeper):
    """With a tier that has these `options`, but is eager. Besides messages it gets the time; `plan_below` goes to the
    tier, which sends `report_below`. Raises ConfigurationError for a tier smaller than twice the pool, and as Keeper.
    """

    def __init__(self, num_slots: int, records: Records, planner: HybridChunkPlanner, options: TierOptions) -> None:
        super().__init__(num_slots, records, planner)
        self.below = TierCache(planner, self._pool, replace(options, offload="eager"), USUAL_OPTIONS, ranks=1)
        self._promotions = Promotions(self._coordinator, self._edge, self.below)
        self._waiting: dict[tuple[int, int], _Waiting] = {}  # by engine and number
        self._step_at = 0.0  # when to look at questions that wait: at once where something has come or ended

    # Questions that wait

    def run(
        self, engine: int, id: int, keys: Sequence[bytes], now: float = 0.0, chunk_nanoseconds: int = 0
    ) -> Leased | Pending:
        self.passed(now)
        return self._answer(engine, id, _Waiting(keys, chunk_nanoseconds))

    def _answer(self, engine: int, id: int, waiting: _Waiting) -> Leased | Pending:
        """An answer, or until when the question waits from now on."""
        names, path, depth, node = self._find(engine, id, waiting.keys)
        may_read = waiting.want is None and depth < len(names) and not self.absent and self.below.can_be_read
        if not may_read or not self._read(engine, id, waiting, names, depth):
            return self._lease(engine, id, names, path, depth, node)
        self._waiting[engine, id] = waiting
        return Pending(waiting.deadline)

    def _read(self, engine: int, id: int, waiting: _Waiting, names: Sequence[bytes], depth: int) -> bool:
        """Whether the question waits: what the tier has of a prompt, of which so many chunks are here, is asked, or
        begins to be read.
        """
        path_of(names, self.below.pool)
        here = depth * self.planner.grid_tokens
        request = Request((engine, id), names, len(names) * self.planner.grid_tokens + 1)
        prefill, queue_bytes = self._prefill(waiting), self._promotions.queue_bytes
        unknown_until = self._promotions.unknown_until(request, here, here, prefill, queue_bytes)
        if unknown_until is not None:
            waiting.deadline = unknown_until
            return True
        want = self._promotions.want(request, here, here, prefill)
        if want is None or want.is_over:
            return False
        self._step_at = self.below.now
        waiting.deadline = want.deadline = min(want.deadline, self.below.now + MOST_MICROSECONDS * MICROSECOND)
        waiting.want = want
        return True

    def _prefill(self, waiting: _Waiting) -> float | None:
        """Tokens a second that the engine computes, as it says."""
        chunk = waiting.chunk_nanoseconds
        return self.planner.grid_tokens * 1e9 / chunk if chunk else None

    def step(self) -> Iterator[tuple[int, int, Leased | Pending | None]]:
        """Read on. Questions that are answered now, or wait anew, each with its engine and its number: None for one
        that no engine must ask.
        """
        if self.below.now < self._step_at:
            return
        self._advance()
        self._step_at = self.below.now + ROOM_SECONDS
        for (engine, id), waiting in list(self._waiting.items()):
            is_over = not self.below.is_asked((engine, id)) if waiting.want is None else waiting.want.is_over
            if is_over or self.below.now >= waiting.deadline:
                yield engine, id, self._again(engine, id)
        self._step_at = min((self._step_at, *(each.deadline for each in self._waiting.values())))

    def _again(self, engine: int, id: int) -> Leased | Pending | None:
        waiting = self._waiting.pop((engine, id))
        try:
            answer = self._answer(engine, id, waiting)
        except MisuseError:
            answer = None
        if waiting.want is not None and isinstance(answer, Leased):
            here = waiting.want.host_end // self.planner.grid_tokens
            self._tier_hit_chunks += max(0, answer.depth - here)
            self._promotions.late(waiting.want)
        if not isinstance(answer, Pending):
            self._end((engine, id), waiting)  # after the lease that the answer has
        return answer

    def _advance(self) -> None:
        """Read more for questions that wait, those that came first before others. One that has not begun, behind one
        that finds no room, costs nothing.
        """
        may_read = True
        for (engine, _), waiting in self._waiting.items():
            want = waiting.want
            if want is None or want.is_over or self.below.now >= want.deadline:
                continue
            if may_read or want.has_begun:
                self._policy.serve(engine)
                may_read = self._promotions.advance(want, may_read)

    def _end(self, question: tuple[int, int], waiting: _Waiting) -> None:
        """Nobody waits for it any more. Others find room where what was read for it is."""
        self.below.admitted(question)
        if waiting.want is not None:
            self._promotions.end(waiting.want)
            self._step_at = self.below.now

    def release(self, engine: int, id: int) -> None:
        if (engine, id) in self._waiting:
            self._end((engine, id), self._waiting.pop((engine, id)))
        else:
            super().release(engine, id)

    def leave(self, engine: int) -> None:
        for other, id in list(self._waiting):
            if other == engine:
                self.release(engine, id)
        super().leave(engine)

    # The tier

    def passed(self, now: float) -> None:
        """Time has come to `now`, in seconds."""
        self.below.passed(now)

    def plan_below(self) -> TierPlan:
        return self.below.plan()

    def report_below(self, report: TierReport) -> None:
        """The tier has finished transfers, or a store has answered."""
        if report.told:
            self._step_at = self.below.now
        for ended, load in self.below.report(report):
            _, want, _ = self._promotions.slices[load.owner]
            self._policy.serve(cast(tuple[int, int], want.request.id)[0])
            self._committed(self._promotions.ended(ended, load))
            self._step_at = self.below.now

    def tier_statistics(self) -> TierStatistics:
        """O(pins)."""
        return self._promotions.statistics()

    @property
    def is_awaited(self) -> bool:
        """Whether a question waits for the tier."""
        return bool(self._waiting)

    def check_valid(self) -> None:
        super().check_valid()
        self.below.edge.check_valid()
        self._promotions.check_valid()
        wants = {each.want for each in self._waiting.values()} - {None}
        assert {*self._promotions.open} == wants, "a want is nobody's"

    def _check_new(self, engine: int, id: int) -> None:
        super()._check_new(engine, id)
        if (engine, id) in self._waiting:
            raise MisuseError(f"the number {id} is that of a question that waits")

    def _used(self, names: Sequence[bytes]) -> None:
        self.below.demotion.used(names, len(names))

    def _committed(self, stores: Sequence[StoreTransfer]) -> None:
        self.below.arrived(stores)
