"""`cpu-prefix-cache size TRACE --model CONFIG`: how much host memory this model needs for this load.

The trace is replayed through the pool of the cache repeatedly, with different amounts of memory (sizing.py). If the
model needs checkpoints to resume (windows, states, local chunks), they are stored and evicted as in the cache: one at
the end of each prompt, and one where a second continuation of a prefix appears (resumable.py). The goal is a share of
the hit ratio of this model with infinite memory; the hit ratio of a model that could resume anywhere is printed beside
it. A trace does not contain the tokens of answers, so there are no checkpoints at their ends. A hit may cover all of a
prompt.
"""

import argparse
from collections.abc import Callable, Sequence

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.model.groups import Group
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.replay.clairvoyant import replay_ideal
from cpu_prefix_cache.replay.meter import Meter
from cpu_prefix_cache.replay.models import ANY_LENGTH, checkpoint_bytes, in_large_blocks, prefix_bytes_per_token
from cpu_prefix_cache.replay.options import add_trace_options, add_weight_options, groups_of, trace_of
from cpu_prefix_cache.replay.report import describe_trace
from cpu_prefix_cache.replay.resumable import ResumableReplay, blocks_of_everything, fewest_blocks
from cpu_prefix_cache.replay.sizing import Point, Sizing, check_target, smallest_capacity
from cpu_prefix_cache.replay.traces import Trace

GB, GIB, MIB, KIB = 10**9, 2**30, 2**20, 2**10


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "size",
        help="how much host memory a model needs for a trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    add_weight_options(parser, required=True)
    parser.add_argument("--target", type=float, default=0.9, metavar="SHARE", help="of the ideal hits (default 0.9)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru", help="what the host evicts (default lru)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises PrefixCacheError for invalid options, traces and models."""
    check_target(args.target)
    trace = trace_of(args)
    groups = groups_of(args, trace.block_tokens)
    print(f"{describe_trace(trace)}\n{_weights(groups)}", flush=True)
    planner = HybridChunkPlanner(in_large_blocks(groups, trace.block_tokens), max_model_len=ANY_LENGTH)
    sizing = smallest_capacity(
        _hit_ratio(trace, planner, args.policy),
        target=args.target,
        least=fewest_blocks(planner),
        largest=blocks_of_everything(planner, [request.keys for request in trace.requests]),
    )
    ideal = replay_ideal(trace).hit_blocks / trace.blocks
    print(_goal(planner, sizing, ideal, args.target, args.policy))
    print(_table(planner, sizing))
    print(_answer(planner, sizing))
    return 0


def _hit_ratio(trace: Trace, planner: HybridChunkPlanner, policy: str) -> Callable[[int], float]:
    """A function from a number of host blocks to the share of the trace's blocks that are hits."""

    def hit_ratio(blocks: int) -> float:
        replay = ResumableReplay(planner, blocks, policy)
        meter = Meter(f"{blocks * planner.host_block_bytes / GB:,.1f} GB", trace.blocks)
        for requests in meter.slices(trace.requests):
            for request in requests:
                replay.serve(request.keys, request.now)
        return replay.hit_ratio

    return hit_ratio


# What is printed


def _weights(groups: Sequence[Group]) -> str:
    token, checkpoint = prefix_bytes_per_token(groups), checkpoint_bytes(groups)
    return (
        f"a token       {token:,} bytes ({token / KIB:,.1f} KiB) on all ranks together\n"
        f"a checkpoint  {checkpoint:,} bytes ({checkpoint / MIB:,.1f} MiB)"
        + ("" if checkpoint else ": this model needs none to resume")
    )


def _goal(planner: HybridChunkPlanner, sizing: Sizing, ideal: float, target: float, policy: str) -> str:
    ceiling = sizing.points[-1].hit_ratio
    resumed = f", {ceiling:.4f} when resumed at checkpoints" if planner.has_checkpoints else ""
    return (
        f"ideal         hit ratio {ideal:.4f} with infinite memory{resumed}\n"
        f"goal          {sizing.goal:.4f}, {target:.0%} of {ceiling:.4f}; policy {policy}\n"
    )


def _table(planner: HybridChunkPlanner, sizing: Sizing) -> str:
    ceiling = sizing.points[-1].hit_ratio

    def row(point: Point) -> str:
        memory = point.capacity * planner.host_block_bytes
        share = point.hit_ratio / ceiling if ceiling else 0.0
        mark = "  <- the least that reaches the goal" if point == sizing.enough else ""
        return f"{memory / GB:12,.1f} {memory / GIB:12,.1f} {point.hit_ratio:10.4f} {share:9.1%}{mark}"

    header = f"{'GB':>12} {'GiB':>12} {'hit ratio':>10} {'of ideal':>9}"
    return "\n".join([header, *map(row, sizing.points)])


def _answer(planner: HybridChunkPlanner, sizing: Sizing) -> str:
    memory = sizing.enough.capacity * planner.host_block_bytes
    return (
        f"\n{memory / GB:,.1f} GB ({memory / GIB:,.1f} GiB) of host memory reach {sizing.enough.hit_ratio:.4f}.\n"
        "More memory nearly always gives more hits, but not quite always, so less might do where the table has no row."
    )
