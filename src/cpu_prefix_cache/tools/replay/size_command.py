"""`cpu-prefix-cache size TRACE --model CONFIG`: how much memory this model needs for this load.

The trace is replayed through the pool of the cache repeatedly, with different amounts of memory (sizing.py). It is that
of host and device together where these add: with lazy offload, without a tier below, in a model without checkpoints.

If the model needs checkpoints to resume (windows, states, local chunks), they are stored and evicted as in the cache:
one at the end of each prompt, and one where a second continuation of a prefix appears (resumable.py). The goal is a
share of the hit ratio of this model with infinite memory; the hit ratio of a model that could resume anywhere is
printed beside it. A trace does not contain the tokens of answers, so there are no checkpoints at their ends. A hit may
cover all of a prompt. The time of loads is that of the prefix, without checkpoints.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.model.groups import Group
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.tools.replay.capacities import doublings
from cpu_prefix_cache.tools.replay.clairvoyant import replay_ideal
from cpu_prefix_cache.tools.replay.describe import describe_depth, describe_rates, describe_trace
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.models import ANY_LENGTH, checkpoint_bytes, in_large_blocks, prefix_bytes_per_token
from cpu_prefix_cache.tools.replay.options import (
    WEIGHED_HELP,
    Joined,
    add_result_options,
    add_trace_options,
    add_weight_options,
    check_results_can_be_written,
    groups_of,
    policies_of,
    trace_of,
    write_json,
)
from cpu_prefix_cache.tools.replay.outcome import Ratios
from cpu_prefix_cache.tools.replay.plot import draw
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.rate_options import add_rate_options, even_depth_of, flops_of, rates_of
from cpu_prefix_cache.tools.replay.results_json import head
from cpu_prefix_cache.tools.replay.resumable import ResumableReplay, blocks_of_everything
from cpu_prefix_cache.tools.replay.size_report import GIB, KIB, MIB, Sized, answers, as_json, goals, panels, table
from cpu_prefix_cache.tools.replay.sizing import Point, Sizing, check_target, smallest_capacity
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.units import show_bytes

LEAST_SHOWN = 60 * GIB  # rows begin at sizes of memory that servers have, whatever the goal; 64 GiB in whole blocks


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "size",
        help="how much memory a model needs for a trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    add_weight_options(parser, required=True)
    parser.add_argument("--target", type=float, default=0.9, metavar="SHARE", help="of the ideal hits (default 0.9)")
    parser.add_argument(
        "--policy",
        action=Joined,
        metavar="NAME,...",
        help=f"what the host evicts: of {', '.join(POLICIES)} (default: all of them), or {WEIGHED_HELP}",
    )
    add_rate_options(parser)
    add_result_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises PrefixCacheError for invalid options, traces and models."""
    check_target(args.target)
    policies = policies_of(args.policy, list(POLICIES))
    check_results_can_be_written(args)
    flops = flops_of(args)
    trace = trace_of(args)
    groups = groups_of(args, trace.block_tokens)
    block_bytes = prefix_bytes_per_token(groups) * trace.block_tokens
    rates = rates_of(args, trace, block_bytes, flops)
    depth = describe_depth(flops, has_model=args.model is not None)
    described = [describe_trace(trace), _weights(groups), depth, "" if rates is None else describe_rates(rates, trace)]
    print("\n".join(line for line in described if line), flush=True)
    planner = HybridChunkPlanner(in_large_blocks(groups, trace.block_tokens), max_model_len=ANY_LENGTH)
    sizings = {policy: _sizing(trace, planner, policy, args.target) for policy in policies}
    sized = Sized(trace, sizings, planner.host_block_bytes, even_depth_of(flops), rates)
    ideal = Ratios.of(replay_ideal(trace), trace, sized.even_depth)
    print(goals(sized, ideal.block_hit_ratio, args.target, has_checkpoints=planner.has_checkpoints))
    print(f"\n{table(sized)}\n\n{answers(sized, has_checkpoints=planner.has_checkpoints)}")
    if args.json is not None:
        results = as_json(sized, ideal, args.target)
        write_json(args.json, {**head("size", trace, block_bytes, flops, rates), **results})
    if args.plot is not None:
        title = ", ".join(Path(path).name for path in trace.paths)
        draw(args.plot, title, panels(sized, ideal), sized.host_block_bytes)
    return 0


def _sizing(trace: Trace, planner: HybridChunkPlanner, policy: str, target: float) -> Sizing:
    least = planner.fewest_blocks
    largest = blocks_of_everything(planner, [request.keys for request in trace.requests])
    steps = doublings(least, largest, planner.host_block_bytes)
    return smallest_capacity(
        _measured(trace, planner, policy),
        target=target,
        least=least,
        largest=largest,
        steps=steps,
        shown=[size for size in steps if size * planner.host_block_bytes >= LEAST_SHOWN],
    )


def _measured(trace: Trace, planner: HybridChunkPlanner, policy: str) -> Callable[[int], Point]:
    """A function from a number of host blocks to what is found there."""

    def measured(blocks: int) -> Point:
        replay, found = ResumableReplay(planner, blocks, policy), Work()
        meter = Meter(f"{policy}, {show_bytes(blocks * planner.host_block_bytes)}", trace.blocks)
        for requests in meter.slices(trace.requests):
            for request in requests:
                hit = replay.serve(request.keys, request.now)
                found.add(0, min(hit * trace.block_tokens, request.tokens))
        return Point(blocks, replay.hit_ratio, found)

    return measured


def _weights(groups: Sequence[Group]) -> str:
    token, checkpoint = prefix_bytes_per_token(groups), checkpoint_bytes(groups)
    return (
        f"a token       {token:,} bytes ({token / KIB:,.1f} KiB) on all ranks together\n"
        f"a checkpoint  {checkpoint:,} bytes ({checkpoint / MIB:,.1f} MiB)"
        + ("" if checkpoint else ": this model needs none to resume")
    )
