"""Replay of a trace on one host and the tiers around it, whichever there are, to an outcome with the seconds saved."""

from dataclasses import dataclass, replace

from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.tools.replay.at_eviction import replay_at_eviction
from cpu_prefix_cache.tools.replay.below import replay_host_and_tier, replay_three_tiers
from cpu_prefix_cache.tools.replay.clairvoyant import Future, replay_min
from cpu_prefix_cache.tools.replay.flops import Flops
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.one_tier import replay_one_tier
from cpu_prefix_cache.tools.replay.outcome import Outcome, Ratios, Tally
from cpu_prefix_cache.tools.replay.rate_options import even_depth_of
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.two_tiers import replay_two_tiers

CLAIRVOYANT = "min"


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers around each host that is replayed, and how long computing takes.

    `planner` is that of the model, for replays with a device (replayed_model.py); None: blocks of the trace are enough.
    """

    device: DeviceTier | None
    below: BelowTier | None
    flops: Flops | None
    rates: Rates | None
    planner: HybridChunkPlanner | None = None

    @property
    def even_depth(self) -> float:
        return even_depth_of(self.flops)

    def blocks_beside(self) -> int:
        """Blocks of device and tier together."""
        return sum(each.capacity for each in (self.device, self.below) if each is not None)


def replayed(trace: Trace, host: HostTier, tiers: Tiers) -> Outcome:
    meter = Meter(f"{host.policy}, {host.capacity:,} blocks", trace.blocks)
    tally = _tally(trace, host, tiers, meter)
    outcome = _outcome(trace, host, tiers, tally, meter)
    if tiers.rates is None:
        return outcome
    seconds = tiers.rates.saved(tally.loaded, tally.loaded_blocks, tally.below_loaded_blocks)
    return replace(
        outcome,
        seconds_saved=seconds,
        share_saved=seconds / tiers.rates.seconds(trace.work),
        money_saved=tiers.rates.money(seconds),
    )


def _tally(trace: Trace, host: HostTier, tiers: Tiers, meter: Meter) -> Tally:
    device, below = tiers.device, tiers.below
    if device is not None and below is not None:
        return replay_three_tiers(trace, host, device, below, meter, tiers.rates, tiers.planner)
    if device is not None:
        return replay_two_tiers(trace, host, device, meter, tiers.planner)
    if below is not None:
        return replay_host_and_tier(trace, host, below, meter, tiers.rates)
    return replay_one_tier(trace, host, meter)


def clairvoyant(future: Future, host: HostTier, tiers: Tiers) -> Outcome:
    """The outcome of MIN. With other tiers, of one cache as large as all of them."""
    meter = Meter(f"{CLAIRVOYANT}, {host.capacity:,} blocks", future.trace.blocks)
    tally = replay_min(future, host.capacity + tiers.blocks_beside(), meter)
    return _outcome(future.trace, replace(host, policy=CLAIRVOYANT), replace(tiers, below=None), tally, meter)


def at_eviction(trace: Trace, host: HostTier, tiers: Tiers) -> tuple[int, Ratios]:
    """Ratios of two tiers: the lowest one here, and above it one as large as all others."""
    lower = host.capacity if tiers.below is None else tiers.below.capacity
    upper = host.capacity + tiers.blocks_beside() - lower
    return host.capacity, Ratios.of(replay_at_eviction(trace, lower, upper), trace, tiers.even_depth)


def _outcome(trace: Trace, host: HostTier, tiers: Tiers, tally: Tally, meter: Meter) -> Outcome:
    device, below = tiers.device, tiers.below
    return Outcome(
        policy=host.policy,
        capacity=host.capacity,
        device_capacity=None if device is None else device.capacity,
        offload=None if device is None else device.offload,
        tally=tally,
        ratios=Ratios.of(tally, trace, tiers.even_depth),
        trace_blocks=trace.blocks,
        seconds=meter.seconds,
        below_capacity=None if below is None else below.capacity,
        below_offload=None if below is None else below.mode(host),
    )
