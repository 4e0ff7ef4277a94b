"""TieredKeeper: a Keeper with a tier below its pool, which outlives keeper and engines.

    commit     what an engine has written goes to the tier, too, and at once: all of a node may be killed
    run        the tier has more of a prompt than the pool: it is read, and the question answered later
    step       what is read can be found like anything else, and so the question is answered as any; the same when the
               tier is late, loses some, or pauses

The tier holds names (`names.py`), of all namespaces, in slots as large as those of the pool: a chunk with the rows of
all ranks of an engine. What is read takes slots of the pool as engines' writes do, and counts for the engine that asks.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from cpu_prefix_cache.keeper.answers import Leased
from cpu_prefix_cache.keeper.keeper import Keeper, path_of
from cpu_prefix_cache.keeper.protocol import MICROSECOND, MOST_MICROSECONDS
from cpu_prefix_cache.keeper.records import Records
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.options import USUAL_OPTIONS
from cpu_prefix_cache.messages.request import Pending, Request
from cpu_prefix_cache.messages.tier import TierOptions, TierPlan, TierReport
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.transfers import StoreTransfer
from cpu_prefix_cache.tiers.promotions import TRIAL_SECONDS, Promotions, Want
from cpu_prefix_cache.tiers.tier_cache import TierCache
from cpu_prefix_cache.tiers.time_saved import Candidate, best

ROOM_SECONDS = 0.02  # after which it is seen whether the pool has room again for a read that found none


class TieredKeeper(Keeper):
    """With a tier of so many `slots`. Besides messages it gets the time; `plan_below` goes to the tier, which sends
    `report_below`. Raises ConfigurationError for a tier smaller than twice the pool, and as Keeper.
    """

    def __init__(self, num_slots: int, records: Records, planner: HybridChunkPlanner, slots: int) -> None:
        super().__init__(num_slots, records, planner)
        options = TierOptions(slots, offload="eager")
        self.below = TierCache(planner, self._pool, options, USUAL_OPTIONS, ranks=1)
        self._promotions = Promotions(self._coordinator, self._edge, self.below)
        # the keys and the want of a question whose answer waits for that, by engine and number
        self._readings: dict[tuple[int, int], tuple[Sequence[bytes], Want]] = {}
        self._now = self._read_at = 0.0  # when a question last began to wait
        self._step_at = 0.0  # when to look at questions that wait: at once where something has come or ended

    # Questions that wait

    def run(
        self, engine: int, id: int, keys: Sequence[bytes], now: float = 0.0, chunk_nanoseconds: int = 0
    ) -> Leased | Pending:
        self.passed(now)
        names, path, depth, node = self._find(engine, id, keys)
        may_read = depth < len(names) and not self.absent and self.below.can_be_read
        pending = self._read(engine, id, keys, names, depth, chunk_nanoseconds) if may_read else None
        return pending or self._lease(engine, id, names, path, depth, node)

    def _read(
        self, engine: int, id: int, keys: Sequence[bytes], names: Sequence[bytes], depth: int, chunk_nanoseconds: int
    ) -> Pending | None:
        """Begin to read what the tier has of a prompt, of which so many chunks are here. None: it is not worth it."""
        path_of(names, self.below.pool)
        here = depth * self.planner.grid_tokens
        request = Request((engine, id), names, len(names) * self.planner.grid_tokens + 1)
        chosen = self._worth_it(request, here, chunk_nanoseconds)
        if chosen is None:
            return None
        self._read_at = self._step_at = self._now
        deadline = self._promotions.deadline(self._now, self._promotions.queue_bytes + chosen.num_bytes)
        deadline = min(deadline, self._now + MOST_MICROSECONDS * MICROSECOND)
        want = self._promotions.note(request, chosen, here, deadline)
        self._readings[engine, id] = keys, want
        return Pending(deadline)

    def _worth_it(self, request: Request, here: int, chunk_nanoseconds: int) -> Candidate | None:
        """How far to read for a request, where that saves time. Now and then a little, to measure the rate again."""
        candidates = self._promotions.reachable(request, here, here)
        prefill = self.planner.grid_tokens * 1e9 / chunk_nanoseconds if chunk_nanoseconds else None
        queue = self._promotions.queue_bytes
        chosen = best(candidates, prefill=prefill, rate=self.below.load_rate, queue_bytes=queue)
        if chosen is None and self._now >= self._read_at + TRIAL_SECONDS:
            trial = self._promotions.candidates(request, here, here, self._promotions.trial_budget)
            chosen = next(iter(trial), None)
        return chosen

    def step(self) -> Iterator[tuple[int, int, Leased | None]]:
        """Read on. Questions that are answered now, each with its engine and its number: None for one that no engine
        must ask.
        """
        if self._now < self._step_at:
            return
        self._advance()
        self._step_at = self._now + ROOM_SECONDS
        for (engine, id), (keys, want) in list(self._readings.items()):
            if want.is_over or self._now >= want.deadline:
                del self._readings[engine, id]
                try:
                    yield engine, id, self._lease(engine, id, *self._find(engine, id, keys))
                except MisuseError:
                    yield engine, id, None
                finally:
                    self._end(want)  # after the lease that the answer has
        self._step_at = min((self._step_at, *(want.deadline for _, want in self._readings.values())))

    def _advance(self) -> None:
        """Read more for questions that wait, those that came first before others. One that has not begun, behind one
        that finds no room, costs nothing.
        """
        may_read = True
        for (engine, _), (_, want) in self._readings.items():
            if (may_read or want.has_begun) and not want.is_over and self._now < want.deadline:
                self._policy.serve(engine)
                may_read = self._promotions.advance(want, may_read, self._now)

    def _end(self, want: Want) -> None:
        """Others find room where it was."""
        self._promotions.end(want)
        self._step_at = self._now

    def release(self, engine: int, id: int) -> None:
        if (engine, id) in self._readings:
            self._end(self._readings.pop((engine, id))[1])
        else:
            super().release(engine, id)

    def leave(self, engine: int) -> None:
        for other, id in list(self._readings):
            if other == engine:
                self.release(engine, id)
        super().leave(engine)

    # The tier

    def passed(self, now: float) -> None:
        """Time has come to `now`, in seconds."""
        self._now = now
        self.below.passed(now)

    def plan_below(self) -> TierPlan:
        return self.below.plan()

    def report_below(self, report: TierReport) -> None:
        """The tier has finished transfers."""
        for ended, load in self.below.report(report):
            _, want, _ = self._promotions.slices[load.owner]
            self._policy.serve(cast(tuple[int, int], want.request.id)[0])
            self._committed(self._promotions.ended(ended, load))
            self._step_at = self._now

    @property
    def is_reading(self) -> bool:
        """Whether a question waits for what is read."""
        return bool(self._readings)

    def check_valid(self) -> None:
        super().check_valid()
        self.below.edge.check_valid()
        self._promotions.check_valid()
        assert {*self._promotions.open} == {want for _, want in self._readings.values()}, "a want is nobody's"

    def _check_new(self, engine: int, id: int) -> None:
        super()._check_new(engine, id)
        if (engine, id) in self._readings:
            raise MisuseError(f"the number {id} is that of a question that waits")

    def _used(self, names: Sequence[bytes]) -> None:
        self.below.demotion.used(names, len(names))

    def _committed(self, stores: Sequence[StoreTransfer]) -> None:
        self.below.arrived(stores)
