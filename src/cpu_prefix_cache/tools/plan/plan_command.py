"""`cpu-prefix-cache plan TRACE --model CONFIG --gpu NAME`: how much host memory to buy, on one page.

The trace is replayed behind the device's own cache with 64 GiB to 4 TiB of host memory: with each policy, and with one
that saves about the most of them, once coded and once above a tier of files. The share of prefill time that the host
saves, by size, has a knee, from which on twice as much adds less than 2 points. Hits of the device alone are no savings
of the host. What a GPU reaches is assumed where it is not given, and printed.
"""

import argparse
from pathlib import Path

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.plan.curves import CODED, TIER, device_alone, preferred_of
from cpu_prefix_cache.tools.plan.gpus import GPUS, with_gpu
from cpu_prefix_cache.tools.plan.page import page
from cpu_prefix_cache.tools.plan.plan import Plan
from cpu_prefix_cache.tools.plan.sentences import sentences
from cpu_prefix_cache.tools.plan.setting import Setting, coded
from cpu_prefix_cache.tools.plan.table import tables
from cpu_prefix_cache.tools.plan.worth import Worth, span
from cpu_prefix_cache.tools.replay.describe import describe_rates, describe_trace
from cpu_prefix_cache.tools.replay.options import (
    Joined,
    add_trace_options,
    add_weight_options,
    check_can_be_written,
    policies_of,
    rate,
    trace_of,
    write_text,
)
from cpu_prefix_cache.tools.replay.rate_options import add_below_rate, add_rate_options

BELOW, BELOW_RATE = "16TiB", "6"


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        help="how much host memory to buy: a curve, its knee, GPUs and money",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    add_weight_options(parser, required=True)
    parser.add_argument("--gpu", choices=sorted(GPUS), help="what computes; --tp of them are one engine")
    parser.add_argument("--device-capacity", metavar="N", help="of KV on the device (default: half of --gpu's memory)")
    parser.add_argument(
        "--policy", action=Joined, metavar="NAME,...", help=f"of {', '.join(POLICIES)} (default: all of them)"
    )
    add_rate_options(parser)
    parser.add_argument("--gib-price", type=rate, metavar="PRICE", help="of a GiB of host memory, used for three years")
    parser.add_argument("--below", default=BELOW, metavar="N", help=f"size of the tier of files (default: {BELOW})")
    add_below_rate(parser)
    parser.add_argument("--html", metavar="OUT.html", help="write the page with its curves here, too")
    parser.set_defaults(run=run, below_rate=BELOW_RATE)


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises PrefixCacheError for invalid options, traces and models."""
    policies = policies_of(args.policy, list(POLICIES))
    if args.gib_price is not None and args.gpu_price is None:
        raise ConfigurationError("--gib-price is compared with what GPUs cost: give --gpu-price, too")
    if args.html is not None:
        check_can_be_written("html", args.html)
    args, assumed = with_gpu(args)
    trace = trace_of(args)
    if not span(trace):
        raise ConfigurationError(
            "all requests of this trace have the same time, so the GPUs that they need are not known: take replay or "
            "size, which need no times"
        )
    setting = Setting.of(args, trace)
    with_codec, no_codec = coded(args, trace)
    described = [describe_trace(trace), assumed, no_codec, describe_rates(setting.rates, trace)]
    print("\n".join(filter(None, described)), flush=True)
    by_policy = tuple(setting.curve(policy) for policy in policies)
    policy = preferred_of(by_policy).policy
    variants = [] if with_codec is None else [with_codec.curve(policy, CODED)]
    variants.append(setting.curve(policy, TIER))
    worth = Worth(trace, setting.rates, device_alone(trace, setting.tiers), args.tp or 1, args.gib_price or 0.0)
    plan = Plan(worth, by_policy, tuple(variants))
    print(f"\n{tables(plan)}\n")
    print("\n".join(sentences(plan)))
    if args.html is not None:
        write_text(args.html, page(plan, ", ".join(Path(path).name for path in trace.paths), described))
    return 0
