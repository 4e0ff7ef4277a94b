"""A setting: the tiers around the host and how it keeps a block, from the options, once as they are and once coded."""

import argparse
from dataclasses import dataclass, replace

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.codec import EXPONENT
from cpu_prefix_cache.tools.plan.curves import SIZES, TIER, Curve, outcomes_by_size
from cpu_prefix_cache.tools.plan.gpus import GPUS
from cpu_prefix_cache.tools.replay.models import prefix_bytes_per_token
from cpu_prefix_cache.tools.replay.options import groups_of
from cpu_prefix_cache.tools.replay.rate_options import flops_of, rates_of
from cpu_prefix_cache.tools.replay.replays import Tiers
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.units import parse_capacity


@dataclass(frozen=True, slots=True)
class Setting:
    """`block_bytes` are those of a block on the host; `tiers` has the device and the tier below."""

    trace: Trace
    block_bytes: int
    tiers: Tiers
    rates: Rates

    @classmethod
    def of(cls, args: argparse.Namespace, trace: Trace) -> "Setting":
        """Raises ConfigurationError for rates and models that no plan can be made of."""
        has_rate = args.prefill_rate is not None or args.tflops is not None
        block_bytes, flops = _block_bytes(args, trace), flops_of(args)
        rates = rates_of(args, trace, block_bytes, flops, args.below_rate) if has_rate else None
        if rates is None:
            raise ConfigurationError(
                f"how fast a prompt is computed is not known: give --gpu ({', '.join(GPUS)}); or --prefill-rate or "
                "--tflops, with --host-rate and --device-capacity"
            )
        device = None
        if args.device_capacity is not None:
            on_device = _block_bytes(_with_codec(args, None), trace)
            device = DeviceTier(parse_capacity(args.device_capacity, on_device))
        below = BelowTier(parse_capacity(args.below, block_bytes))
        return cls(trace, block_bytes, Tiers(device, below, flops, rates), rates)

    def curve(self, policy: str, variant: str = "") -> Curve:
        """The curve of a policy; the tier is there if that is the variant."""
        tiers = self.tiers if variant == TIER else replace(self.tiers, below=None)
        return Curve(policy, outcomes_by_size(self.trace, policy, self.block_bytes, tiers), variant)


def coded(args: argparse.Namespace, trace: Trace) -> tuple[Setting | None, str]:
    """The setting in which the host keeps coded blocks; or none, and the reason, if it is not for this model."""
    if args.codec is not None:
        return None, ""
    try:
        return Setting.of(_with_codec(args, EXPONENT.name), trace), ""
    except ConfigurationError as error:
        return None, f"no curve of coded blocks: {error}"


def _with_codec(args: argparse.Namespace, codec: str | None) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "codec": codec})


def _block_bytes(args: argparse.Namespace, trace: Trace) -> int:
    groups = groups_of(args, trace.block_tokens)
    if not all(group.is_prefix for group in groups):
        raise ConfigurationError(
            f"{args.model} needs checkpoints to resume (windows, states or local chunks), which are not replayed "
            "behind a device: take size, which counts them"
        )
    block_bytes = prefix_bytes_per_token(groups) * trace.block_tokens
    if not 0 < block_bytes <= SIZES[0]:
        raise ConfigurationError(f"a block must take 1 to {SIZES[0]:,} bytes, the smallest host; got {block_bytes:,}")
    return block_bytes
