"""`cpu-prefix-cache replay`: hit ratios of recorded requests, by policy and capacity.

options -> tiers and policies to replay -> outcomes and references -> table, JSON, plot
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.options import OFFLOAD_MODES
from cpu_prefix_cache.messages.tier import SLOTS_BY_HOST
from cpu_prefix_cache.tools.replay.capacities import DEFAULT_PARTS, round_capacity
from cpu_prefix_cache.tools.replay.clairvoyant import Future, replay_ideal
from cpu_prefix_cache.tools.replay.describe import (
    describe_admission,
    describe_below,
    describe_depth,
    describe_device,
    describe_rates,
    describe_trace,
)
from cpu_prefix_cache.tools.replay.hints import Hints, describe_hints, hints_of, with_hints
from cpu_prefix_cache.tools.replay.models import prefix_bytes_per_token
from cpu_prefix_cache.tools.replay.options import (
    WEIGHED_HELP,
    Joined,
    add_result_options,
    add_trace_options,
    add_weight_options,
    check_results_can_be_written,
    groups_of,
    names_of,
    natural,
    policies_of,
    positive,
    trace_of,
    write_json,
)
from cpu_prefix_cache.tools.replay.outcome import Outcome, Ratios
from cpu_prefix_cache.tools.replay.plot import draw_replay
from cpu_prefix_cache.tools.replay.rate_options import add_below_rate, add_rate_options, flops_of, rates_of
from cpu_prefix_cache.tools.replay.replays import CLAIRVOYANT, Tiers, at_eviction, clairvoyant, replayed
from cpu_prefix_cache.tools.replay.report import References, best, notes, table
from cpu_prefix_cache.tools.replay.results_json import head, of_replay
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.units import parse_capacity

POLICY_NAMES = (*POLICIES, CLAIRVOYANT)


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay recorded requests: hit ratios by policy and capacity",
        description="Replays recorded requests through the code of the cache, and prints hit ratios by policy and "
        "capacity. Several traces are one load: merged by timestamp, with ids of different files kept apart.",
    )
    parser.set_defaults(run=run)
    add_trace_options(parser)
    _add_cache_options(parser)
    add_weight_options(parser, required=False)
    add_rate_options(parser)
    add_below_rate(parser)
    add_result_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises PrefixCacheError for invalid options and traces."""
    policies = policies_of(args.policy, POLICY_NAMES)
    check_results_can_be_written(args)
    hints = None if args.hints is None else hints_of(args.hints)
    trace = trace_of(args)
    block_bytes = _block_bytes(args, trace)
    tiers = _tiers(args, trace, block_bytes)
    hosts = _host_tiers(args, trace, block_bytes)
    _check_below_fits(tiers.below, hosts)
    if hints is not None:
        trace = with_hints(trace, hints)
    print("\n".join(_described(trace, hosts, tiers, hints, has_model=args.model is not None)), flush=True)
    outcomes, references = _replay_all(trace, policies, hosts, tiers)
    has_time = math.isfinite(tiers.even_depth)
    printed = table(outcomes, references, block_bytes, has_time=has_time)
    print(f"\n{printed}\n\n{notes(outcomes, has_time=has_time)}{best(outcomes, references)}")
    if args.json is not None:
        results = of_replay(references, outcomes)
        write_json(
            args.json, {**head("replay", trace, block_bytes, tiers.flops, tiers.rates), "hints": args.hints, **results}
        )
    if args.plot is not None:
        title = ", ".join(Path(path).name for path in trace.paths)
        draw_replay(args.plot, title, outcomes, references, block_bytes)
    return 0


def _described(
    trace: Trace, hosts: Sequence[HostTier], tiers: Tiers, hints: Hints | None, *, has_model: bool
) -> Iterator[str]:
    yield describe_trace(trace)
    if hints is not None:
        yield describe_hints(hints)
    if tiers.device is not None:
        yield describe_device(tiers.device)
    if tiers.below is not None:
        yield describe_below(tiers.below, hosts)
    if depth := describe_depth(tiers.flops, has_model=has_model):
        yield depth
    if tiers.rates is not None:
        yield describe_rates(tiers.rates, trace)
    if hosts[0].store_after > 1 or hosts[0].min_store_tokens:
        yield describe_admission(hosts[0], has_below=tiers.below is not None)


# Capacities to replay


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        action=Joined,
        metavar="NAME,...",
        help=f"some of {', '.join(POLICY_NAMES)} (default: all), or {WEIGHED_HELP}",
    )
    parser.add_argument(
        "--capacity",
        action=Joined,
        metavar="N,...",
        help="sizes of the host to replay: blocks, or bytes like 10GiB (default: from 1/32 to 1/2 of the trace's "
        "different blocks, in round numbers)",
    )
    parser.add_argument("--device-capacity", metavar="N", help="put a device pool of this capacity before the host")
    parser.add_argument("--below", metavar="N", help="put a tier of this capacity below the host, such as a file")
    parser.add_argument(
        "--below-offload",
        choices=OFFLOAD_MODES,
        help="when the host's blocks are written to it (default: eager from ten times the host on, else lazy; eager "
        "where the host is not LRU)",
    )
    parser.add_argument("--offload", choices=OFFLOAD_MODES, help="when the device's blocks are stored (default: lazy)")
    parser.add_argument(
        "--horizon",
        type=positive,
        metavar="N",
        help=f"blocks that lazy stores look ahead (default: {DeviceTier(1).horizon}; at most a quarter of the device)",
    )
    parser.add_argument(
        "--hints",
        metavar="exact|noisy:FACTOR:SHARE",
        help="give each request the time until its next use, as a client could: what would hints bring? FACTOR: by how "
        "much the time is wrong, SHARE: of requests that are wrong about whether they are used again",
    )
    parser.add_argument(
        "--store-after", type=positive, default=1, metavar="N", help="store what N prompts had (default: 1)"
    )
    parser.add_argument(
        "--min-store-tokens",
        type=natural,
        default=0,
        metavar="N",
        help="store nothing of shorter prompts (default: 0; with a device, lengths are whole blocks)",
    )


def _block_bytes(args: argparse.Namespace, trace: Trace) -> int | None:
    """Bytes of a block; None if no model and no bytes of a token were given."""
    groups = groups_of(args, trace.block_tokens)
    if not groups:
        return None
    per_token = prefix_bytes_per_token(groups)
    if per_token < 1:
        raise ConfigurationError(f"{args.model} keeps nothing for each token: give capacities in blocks")
    return per_token * trace.block_tokens


def _tiers(args: argparse.Namespace, trace: Trace, block_bytes: int | None) -> Tiers:
    on_device = _block_bytes(argparse.Namespace(**{**vars(args), "codec": None}), trace)
    device, below, flops = _device_tier(args, on_device), _tier_below(args, block_bytes), flops_of(args)
    if args.below_rate is not None and below is None:
        raise ConfigurationError("--below-rate is for a tier below the host: give --below")
    rates = rates_of(args, trace, block_bytes, flops, args.below_rate)
    if rates is not None and below is not None and args.below_rate is None:
        raise ConfigurationError("what a tier below saves follows from its rate: give --below-rate, too")
    return Tiers(device, below, flops, rates)


def _device_tier(args: argparse.Namespace, block_bytes: int | None) -> DeviceTier | None:
    if args.device_capacity is None:
        for name in ("offload", "horizon"):
            if getattr(args, name) is not None:
                raise ConfigurationError(f"--{name} is for two tiers: give --device-capacity")
        return None
    if args.horizon is not None and args.offload not in (None, "lazy"):
        raise ConfigurationError("--horizon is for lazy stores: eager ones do not look ahead")
    given = {name: getattr(args, name) for name in ("offload", "horizon") if getattr(args, name) is not None}
    return DeviceTier(parse_capacity(args.device_capacity, block_bytes), **given)


def _tier_below(args: argparse.Namespace, block_bytes: int | None) -> BelowTier | None:
    if args.below is not None:
        return BelowTier(parse_capacity(args.below, block_bytes), args.below_offload)
    if args.below_offload is not None:
        raise ConfigurationError("--below-offload is for a tier below the host: give --below")
    return None


def _check_below_fits(below: BelowTier | None, hosts: Sequence[HostTier]) -> None:
    largest = max(host.capacity for host in hosts)
    if below is not None and below.capacity < SLOTS_BY_HOST * largest:
        raise ConfigurationError(
            f"a tier below a host of {largest:,} blocks needs at least {SLOTS_BY_HOST * largest:,}, because it holds "
            f"what the host has too; got --below {below.capacity:,}, so give more, or a smaller --capacity"
        )


def _host_tiers(args: argparse.Namespace, trace: Trace, block_bytes: int | None) -> list[HostTier]:
    """A host tier for each capacity; its policy is set later."""
    if args.capacity is None:
        capacities = {round_capacity(trace.different_blocks // part, block_bytes) for part in DEFAULT_PARTS}
    else:
        capacities = {parse_capacity(text, block_bytes) for text in names_of(args.capacity, "--capacity")}
    return [
        HostTier(capacity, store_after=args.store_after, min_store_tokens=args.min_store_tokens)
        for capacity in sorted(capacities)
    ]


# Replaying


def _replay_all(
    trace: Trace, policies: Sequence[str], hosts: Sequence[HostTier], tiers: Tiers
) -> tuple[list[Outcome], References]:
    future = Future(trace)
    known = [clairvoyant(future, host, tiers) for host in hosts]
    outcomes = []
    for host, most in zip(hosts, known, strict=True):
        outcomes += [
            most if policy == CLAIRVOYANT else replayed(trace, replace(host, policy=policy), tiers)
            for policy in policies
        ]
    stored = [at_eviction(trace, host, tiers) for host in hosts if tiers.blocks_beside()]
    ideal = Ratios.of(replay_ideal(trace), trace, tiers.even_depth)
    return outcomes, References(ideal, known, stored)
