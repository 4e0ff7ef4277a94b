"""Replays a trace through a host with a tier below it. Bytes are not copied; every copy is done before the next call.

    host and tier             the host is the device of a CPUPrefixCache, and what that is to a host is the tier
    device, host and tier     a TieredCache. A request with the answer Pending is looked up again after each step

With rates, the tier is read only where that takes less time than computing.
"""

from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.messages.plan import RankReport, TransferPlan
from cpu_prefix_cache.messages.request import MISS, Answer, Hit, Pending, Request
from cpu_prefix_cache.messages.tier import SLOTS_BY_HOST, TierOptions, TierReport
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.tiers.tiered_cache import TieredCache
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest
from cpu_prefix_cache.tools.replay.two_tiers import RANK, ReplayEngine, blocks_loaded

AHEAD = 400  # blocks of the host that are demoted before they leave, at most a quarter of it
TIMED_TOKENS, TIMES = 1 << 20, 2  # tokens of the steps that measure how fast prompts are computed: a rate takes two


def replay_host_and_tier(
    trace: Trace, host: HostTier, below: BelowTier, meter: Meter, rates: Rates | None = None
) -> Tally:
    """Replay the requests one after the other, without a device."""
    engine = HostEngine(trace, host, below, rates)
    tally = Tally()
    tally.count_all(trace, meter, engine.serve)
    now = engine.cache.statistics()
    tally.all_hits_were_loaded()
    tally.stored_blocks = engine.stored
    tally.evictions = engine.gpu.statistics().evictions
    tally.below_hit_blocks = tally.below_loaded_blocks = now.chunks_loaded
    tally.below_stored_blocks = now.chunks_stored
    tally.unsaved = now.lost_before_store
    tally.declined = engine.declined
    return tally


def replay_three_tiers(
    trace: Trace,
    host: HostTier,
    device: DeviceTier,
    below: BelowTier,
    meter: Meter,
    rates: Rates | None = None,
    planner: HybridChunkPlanner | None = None,
) -> Tally:
    """Replay the requests one after the other. `planner`: of a model with checkpoints (replayed_model.py)."""
    engine = ThreeTierEngine(trace, host, device, below, rates, planner)
    tally = Tally()
    tally.count_all(trace, meter, engine.serve)
    engine.count_copies(tally)
    tier = engine.tiered.tier_statistics()
    tally.below_hit_blocks = tier.hit_tokens // trace.block_tokens
    tally.below_loaded_blocks = engine.read_blocks
    tally.below_stored_blocks = tier.cache.chunks_stored
    tally.unsaved = tier.unsaved
    tally.declined = tier.declined
    return tally


class HostEngine(ReplayEngine):
    """Serves requests from a host pool and a tier below it. `stored` counts the blocks that the host took, `declined`
    the hits that were not worth reading.
    """

    def __init__(self, trace: Trace, host: HostTier, below: BelowTier, rates: Rates | None) -> None:
        super().__init__(
            trace,
            HostTier(below.capacity, store_after=host.store_after, min_store_tokens=host.min_store_tokens),
            DeviceTier(host.capacity, below.mode(host), AHEAD, policy=host.policy),
        )
        self._rates = rates
        self._mean_tokens = 0.0 if rates is None else rates.mean_tokens(trace.work)
        self.stored = self.declined = 0

    def serve(self, request: TraceRequest) -> int:
        hit = super().serve(request)
        self.stored += max(0, min(len(request.keys), self.gpu.capacity) - hit)
        return hit

    def lookup(self, prompt: Request, n0: int, now: float) -> Answer:
        answer = super().lookup(prompt, n0, now)
        if not isinstance(answer, Hit) or self._rates is None:
            return answer
        blocks = (answer.boundary - answer.start) // self.block_tokens
        if self._rates.is_worth_reading(blocks, self._mean_tokens):
            return answer
        self.declined += 1
        return MISS


class ThreeTierEngine(ReplayEngine):
    """Serves requests from a device, a host and a tier below it."""

    tiered: TieredCache

    def __init__(
        self,
        trace: Trace,
        host: HostTier,
        device: DeviceTier,
        below: BelowTier,
        rates: Rates | None = None,
        planner: HybridChunkPlanner | None = None,
    ) -> None:
        self._capacity, self._mode, self.read_blocks = below.capacity, below.mode(host), 0
        super().__init__(trace, host, device, planner)
        self._blocks_per_second = None  # a block has one byte here
        if rates is not None:
            self._blocks_per_second = rates.below_blocks
            for _ in range(TIMES):
                self.tiered.prefilled(TIMED_TOKENS, TIMED_TOKENS / rates.mean_tokens(trace.work))
        self.step()

    def new_cache(self, planner: HybridChunkPlanner, device: PooledDevice, options: dict[str, Any]) -> TieredCache:
        self.tiered = TieredCache(planner, device, below=self.tier_options(options["host_blocks"]), **options)
        return self.tiered

    def tier_options(self, host_blocks: int) -> TierOptions:
        """As many slots as this trace can fill, and at least as many as a tier must have."""
        slots = max(self.most_blocks, SLOTS_BY_HOST * host_blocks)
        return TierOptions(min(slots, self._capacity), self._mode)

    def lookup(self, prompt: Request, n0: int, now: float) -> Answer:
        """Looks up again after each step, and at the deadline when a step has moved nothing."""
        answer = super().lookup(prompt, n0, now)
        while isinstance(answer, Pending):
            now = now if self._move() else answer.deadline
            answer = super().lookup(prompt, n0, now)
        return answer

    def step(self) -> None:
        while self._move() and self.cache.has_transfers:
            pass

    def _move(self) -> bool:
        """One engine step, whose copies are done at once. Whether there were any."""
        plan, below = self.tiered.step(), self.tiered.plan_below()
        self.loaded_blocks += blocks_loaded(plan.transfers)
        self.read_blocks += blocks_loaded(below.step.transfers)
        self.tiered.report(RankReport(RANK, frozenset(transfer.id for transfer in plan.transfers)))
        self.tiered.report_below(self.reported(below.step.transfers))
        return bool(plan.transfers or below.step.transfers)

    def reported(self, transfers: Sequence[TransferPlan]) -> TierReport:
        """Report of the tier when it has done these."""
        done = frozenset(transfer.id for transfer in transfers)
        return TierReport(RankReport(RANK, done, load_bytes_per_second=self._blocks_per_second), is_scanned=True)
