"""A setting: the tiers around the host and how it keeps KV, from the options, once as they are and once coded."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.codec import EXPONENT
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.tools.plan.curves import TIER, Curve, outcomes_by_size
from cpu_prefix_cache.tools.plan.gpus import GPUS
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.models import prefix_bytes_per_token
from cpu_prefix_cache.tools.replay.options import groups_of
from cpu_prefix_cache.tools.replay.outcome import Outcome, Tally
from cpu_prefix_cache.tools.replay.rate_options import flops_of, rates_of
from cpu_prefix_cache.tools.replay.replayed_model import counted, most_blocks, planner_of
from cpu_prefix_cache.tools.replay.replays import Tiers, replayed
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.two_tiers import replay_device
from cpu_prefix_cache.tools.replay.units import parse_capacity, show_bytes

UNKNOWN = (
    "how fast a prompt is computed, and how much KV the device keeps, is not known: give --gpu "
    f"({', '.join(GPUS)}); or --prefill-rate or --tflops, and --device-capacity"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """`tiers` has the device and the tier below, in host blocks of `block_bytes`, which `planner` counts.

    `rates` are those to describe: their blocks are those of the trace.
    """

    trace: Trace
    sizes: Sequence[int]
    planner: HybridChunkPlanner
    block_bytes: int
    device: DeviceTier
    tiers: Tiers
    rates: Rates

    @classmethod
    def of(cls, args: argparse.Namespace, trace: Trace, sizes: Sequence[int]) -> "Setting":
        """Raises ConfigurationError for rates and models that no plan can be made of."""
        groups, flops = groups_of(args, trace.block_tokens), flops_of(args)
        planner = planner_of(groups, trace)
        block_bytes = planner.host_block_bytes
        _check_sizes(sizes, planner)
        chunk_bytes = prefix_bytes_per_token(groups) * trace.block_tokens
        is_known = (args.prefill_rate or args.tflops) and args.device_capacity
        rates = rates_of(args, trace, chunk_bytes, flops, args.below_rate) if is_known else None
        if rates is None:
            raise ConfigurationError(UNKNOWN)
        device = _device(args, trace, planner)
        below = BelowTier(parse_capacity(args.below, block_bytes))
        moved = replace(rates, block_bytes=block_bytes)
        by_number = counted(planner)
        tiers = Tiers(device, below, flops, moved, by_number)
        return cls(trace, sizes, by_number, block_bytes, device, tiers, rates)

    def curve(self, policy: str, variant: str = "") -> Curve:
        """The curve of a policy; the tier is there if that is the variant."""
        capacities = [size // self.block_bytes for size in self.sizes]
        return Curve(policy, outcomes_by_size(self.trace, policy, capacities, self._tiers(variant)), variant)

    def without_limit(self, curve: Curve) -> Outcome:
        """The outcome of this way to keep blocks with all memory that it could use."""
        last = curve.outcomes[-1]
        if not last.tally.evictions:
            return last
        host = HostTier(most_blocks(self.trace, self.planner), curve.policy)
        return replayed(self.trace, host, self._tiers(curve.variant))

    def device_alone(self) -> Tally:
        """Hits without a host."""
        return replay_device(self.trace, self.device, Meter("no host", self.trace.blocks), self.planner)

    def _tiers(self, variant: str) -> Tiers:
        return self.tiers if variant == TIER else replace(self.tiers, below=None)


def coded(args: argparse.Namespace, trace: Trace, sizes: Sequence[int]) -> tuple[Setting | None, str]:
    """The setting in which the host keeps coded blocks; or none, and the reason, if it is not for this model."""
    if args.codec is not None:
        return None, ""
    try:
        return Setting.of(_with_codec(args, EXPONENT.name), trace, sizes), ""
    except ConfigurationError as error:
        return None, f"no curve of coded blocks: {error}"


def _with_codec(args: argparse.Namespace, codec: str | None) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "codec": codec})


def _device(args: argparse.Namespace, trace: Trace, host: HybridChunkPlanner) -> DeviceTier:
    """The device, which keeps KV as it is, in as many blocks as it would have of the host's size for such chunks."""
    own = planner_of(groups_of(_with_codec(args, None), trace.block_tokens), trace)
    blocks = parse_capacity(args.device_capacity, own.host_block_bytes)
    return DeviceTier(max(1, blocks * max(1, host.host_blocks_per_chunk) // max(1, own.host_blocks_per_chunk)))


def _check_sizes(sizes: Sequence[int], planner: HybridChunkPlanner) -> None:
    least = planner.fewest_blocks * planner.host_block_bytes
    if sizes[0] < least:
        raise ConfigurationError(
            f"the smallest host, {show_bytes(sizes[0])}, is less than the {show_bytes(least)} that the shortest prefix "
            f"of this model takes: begin --sizes at {show_bytes(1 << (least - 1).bit_length()).replace(' ', '')}"
        )
