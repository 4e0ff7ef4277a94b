"""`cpu-prefix-cache replay`: hit ratios of recorded requests, by policy and capacity.

options -> plan of what to replay -> outcomes, and what they are compared with -> table, JSON, plot
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_prefix_cache.errors import ConfigurationError
from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.prefix_cache import OFFLOAD_MODES
from cpu_prefix_cache.replay.at_eviction import replay_at_eviction
from cpu_prefix_cache.replay.clairvoyant import Future, replay_ideal, replay_min
from cpu_prefix_cache.replay.meter import Meter
from cpu_prefix_cache.replay.one_tier import replay_one_tier
from cpu_prefix_cache.replay.options import add_trace_options, positive
from cpu_prefix_cache.replay.outcome import Outcome, Ratios, Tally, as_json
from cpu_prefix_cache.replay.plot import check_plots_can_be_drawn, draw
from cpu_prefix_cache.replay.report import References, describe_trace, notes, table
from cpu_prefix_cache.replay.traces import Trace, read_traces
from cpu_prefix_cache.replay.two_tiers import replay_two_tiers
from cpu_prefix_cache.replay.units import parse_capacity

CLAIRVOYANT = "min"
POLICY_NAMES = (*POLICIES, CLAIRVOYANT)
DEFAULT_HORIZON = 400
# Without --capacity: these parts of the different blocks of the trace.
DEFAULT_PARTS = (32, 16, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class DeviceTier:
    """In blocks. `horizon` is how far lazy stores look ahead."""

    capacity: int
    offload: str
    horizon: int


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay recorded requests: hit ratios by policy and capacity",
        description="Replays recorded requests through the code that serves, and prints hit ratios by policy and "
        "capacity. Several traces are one load: merged by timestamp, with ids of different files kept apart.",
    )
    parser.set_defaults(run=run)
    add_trace_options(parser)
    _add_cache_options(parser)
    parser.add_argument("--json", metavar="OUT", help="write the results here, too")
    parser.add_argument("--plot", metavar="OUT.png", help="draw hit ratio over capacity (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Raises PrefixCacheError for options and traces that will not do."""
    policies = _policies(args.policy)
    if args.plot:
        check_plots_can_be_drawn()
    trace = read_traces(
        args.traces, block_tokens=args.block_tokens, limit=args.limit, skip_bad_lines=args.skip_bad_lines
    )
    block_bytes = _block_bytes(args, trace)
    tier = _device_tier(args, block_bytes)
    print(describe_trace(trace), flush=True)
    if tier is not None:
        print(_describe_device(tier), flush=True)
    capacities = _capacities(args.capacity, trace, block_bytes)
    outcomes, references = _replay_all(trace, policies, capacities, tier)
    print(f"\n{table(outcomes, references, block_bytes)}\n\n{notes(tier is not None)}")
    if args.json:
        _write_json(args.json, as_json(trace, references.ideal, outcomes))
    if args.plot:
        title = ", ".join(Path(path).name for path in trace.paths)
        policies_only = [outcome for outcome in outcomes if outcome.policy != CLAIRVOYANT]
        draw(args.plot, title, references.ideal, policies_only, references.clairvoyant)
    return 0


# What to replay


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", metavar="NAME,...", help=f"of {', '.join(POLICY_NAMES)} (default: all of them)")
    parser.add_argument(
        "--capacity",
        metavar="N,...",
        help="of the host: blocks, or bytes like 10GiB (default: parts of what the trace takes altogether)",
    )
    parser.add_argument("--device-capacity", metavar="N", help="put a device pool of this capacity before the host")
    parser.add_argument("--offload", choices=OFFLOAD_MODES, help="when the device's blocks are stored (default: lazy)")
    parser.add_argument(
        "--horizon",
        type=positive,
        metavar="N",
        help=f"blocks that lazy stores look ahead (default: {DEFAULT_HORIZON}; at most a quarter of the device)",
    )
    weight = parser.add_mutually_exclusive_group()
    weight.add_argument("--bytes-per-token", type=positive, metavar="N", help="what the KV of a token weighs")
    weight.add_argument("--model", metavar="CONFIG", help="a model's config.json, which says what a token weighs")


def _policies(names: str | None) -> list[str]:
    if names is None:
        return list(POLICY_NAMES)
    policies = [name.strip() for name in names.split(",")]
    for name in policies:
        if name not in POLICY_NAMES:
            raise ConfigurationError(f"unknown policy {name!r}; known are {', '.join(POLICY_NAMES)}")
    return list(dict.fromkeys(policies))


def _block_bytes(args: argparse.Namespace, trace: Trace) -> int | None:
    """What a block weighs, if that was said."""
    if args.bytes_per_token is not None:
        return int(args.bytes_per_token) * trace.block_tokens
    if args.model is None:
        return None
    from cpu_prefix_cache.replay.models import prefix_bytes_per_token, read_model

    per_token: int = prefix_bytes_per_token(read_model(Path(args.model)))
    if per_token < 1:
        raise ConfigurationError(f"{args.model} keeps nothing for each token: give capacities in blocks")
    return per_token * trace.block_tokens


def _device_tier(args: argparse.Namespace, block_bytes: int | None) -> DeviceTier | None:
    if args.device_capacity is None:
        for name in ("offload", "horizon"):
            if getattr(args, name) is not None:
                raise ConfigurationError(f"--{name} is for two tiers: give --device-capacity")
        return None
    offload = args.offload or "lazy"
    if args.horizon is not None and offload != "lazy":
        raise ConfigurationError("--horizon is for lazy stores: eager ones do not look ahead")
    return DeviceTier(parse_capacity(args.device_capacity, block_bytes), offload, args.horizon or DEFAULT_HORIZON)


def _describe_device(tier: DeviceTier) -> str:
    ahead = (
        f", looking {min(tier.horizon, max(1, tier.capacity // 4)):,} blocks ahead" if tier.offload == "lazy" else ""
    )
    return f"behind a device of {tier.capacity:,} blocks, least recently used first out; {tier.offload} stores{ahead}"


def _capacities(texts: str | None, trace: Trace, block_bytes: int | None) -> list[int]:
    if texts is None:
        return sorted({max(1, trace.different_blocks // part) for part in DEFAULT_PARTS})
    return sorted({parse_capacity(text, block_bytes) for text in texts.split(",")})


# Replaying


def _replay_all(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], tier: DeviceTier | None
) -> tuple[list[Outcome], References]:
    future = Future(trace)
    clairvoyant = [_clairvoyant(future, capacity, tier) for capacity in capacities]
    outcomes = []
    for capacity, known in zip(capacities, clairvoyant, strict=True):
        outcomes += [known if policy == CLAIRVOYANT else _replay(trace, policy, capacity, tier) for policy in policies]
    at_eviction = []
    if tier is not None:
        at_eviction = [(size, Ratios.of(replay_at_eviction(trace, size, tier.capacity), trace)) for size in capacities]
    return outcomes, References(Ratios.of(replay_ideal(trace), trace), clairvoyant, at_eviction)


def _replay(trace: Trace, policy: str, capacity: int, tier: DeviceTier | None) -> Outcome:
    meter = Meter(f"{policy}, {capacity:,} blocks", trace.blocks)
    if tier is None:
        tally = replay_one_tier(trace, policy, capacity, meter)
    else:
        tally = replay_two_tiers(trace, policy, capacity, tier.capacity, tier.offload, tier.horizon, meter)
    return _outcome(trace, policy, capacity, tier, tally, meter)


def _clairvoyant(future: Future, capacity: int, tier: DeviceTier | None) -> Outcome:
    """In two tiers, of one cache as large as both."""
    meter = Meter(f"{CLAIRVOYANT}, {capacity:,} blocks", future.trace.blocks)
    tally = replay_min(future, capacity + (0 if tier is None else tier.capacity), meter)
    return _outcome(future.trace, CLAIRVOYANT, capacity, tier, tally, meter)


def _outcome(trace: Trace, policy: str, capacity: int, tier: DeviceTier | None, tally: Tally, meter: Meter) -> Outcome:
    return Outcome(
        policy=policy,
        capacity=capacity,
        device_capacity=None if tier is None else tier.capacity,
        offload=None if tier is None else tier.offload,
        tally=tally,
        ratios=Ratios.of(tally, trace),
        trace_blocks=trace.blocks,
        seconds=meter.seconds,
    )


def _write_json(path: str, values: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ConfigurationError(f"the results cannot be written to {path}: {error.strerror}") from error
