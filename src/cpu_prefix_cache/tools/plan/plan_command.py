"""`cpu-prefix-cache plan TRACE --model NAME --gpu NAME`: how much host memory to buy, on one page.

The requests of a trace, or of a server's log, are replayed behind the device's own cache with 64 GiB to 4 TiB of host
memory: with each policy, and with one that saves about the most of them, once coded and once above a tier of files. The
share of prefill time that the host saves, by size, has a knee, from which on twice as much adds less than 2 points.
Hits of the device alone are no savings of the host. What a GPU reaches is assumed where it is not given, and printed.

Checkpoints of a model with windows, states or local chunks take memory, and hits end at them, as in the cache.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.plan.curves import CODED, SIZES, TIER, preferred_of, sizes_of
from cpu_prefix_cache.tools.plan.gpus import GPUS, with_gpu
from cpu_prefix_cache.tools.plan.page import page
from cpu_prefix_cache.tools.plan.plan import Plan
from cpu_prefix_cache.tools.plan.plan_json import as_json
from cpu_prefix_cache.tools.plan.sentences import sentences
from cpu_prefix_cache.tools.plan.setting import Setting, coded
from cpu_prefix_cache.tools.plan.table import tables
from cpu_prefix_cache.tools.plan.worth import Worth, span
from cpu_prefix_cache.tools.replay.describe import describe_depth, describe_rates, describe_trace, describe_weights
from cpu_prefix_cache.tools.replay.options import (
    WEIGHED_HELP,
    Joined,
    add_trace_options,
    add_weight_options,
    check_can_be_written,
    groups_of,
    policies_of,
    rate,
    write_json,
    write_text,
)
from cpu_prefix_cache.tools.replay.rate_options import add_below_rate, add_rate_options
from cpu_prefix_cache.tools.replay.recorded import recorded
from cpu_prefix_cache.tools.replay.results_json import head
from cpu_prefix_cache.tools.replay.traces import Trace

BELOW, BELOW_RATE = "16TiB", "6"


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        help="how much host memory to buy: a curve, its knee, GPUs and money",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder of the model's tokenizer, for a log of texts"
    )
    add_weight_options(parser, required=True)
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}; --tp of them are one engine")
    parser.add_argument("--device-capacity", metavar="N", help="memory for KV on the device (default: half of --gpu's)")
    parser.add_argument(
        "--sizes", default=SIZES, metavar="FIRST:LAST", help=f"sizes of the host, each twice the one before ({SIZES})"
    )
    parser.add_argument(
        "--policy",
        action=Joined,
        metavar="NAME,...",
        help=f"some of {', '.join(POLICIES)} (default: all), or {WEIGHED_HELP}",
    )
    add_rate_options(parser)
    parser.add_argument(
        "--gib-price", type=rate, metavar="PRICE", help="price of a GiB of host memory, used for three years"
    )
    parser.add_argument("--below", default=BELOW, metavar="N", help=f"size of the tier of files (default: {BELOW})")
    add_below_rate(parser)
    parser.add_argument("--html", metavar="OUT.html", help="write the page with its curves here, too")
    parser.add_argument("--json", metavar="OUT", help="write the results here, too")
    parser.set_defaults(run=run, below_rate=BELOW_RATE)


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises PrefixCacheError for invalid options, traces and models."""
    policies, sizes = policies_of(args.policy, list(POLICIES)), sizes_of(args.sizes)
    _check(args)
    args, assumed = with_gpu(args)
    trace, made = recorded(args)
    _check_times(trace)
    setting = Setting.of(args, trace, sizes)
    with_codec, no_codec = coded(args, trace, sizes)
    weights = describe_weights(groups_of(args, trace.block_tokens))
    depth = describe_depth(setting.tiers.flops, has_model=args.model is not None)
    described = [*made, describe_trace(trace), weights, depth, assumed, no_codec, describe_rates(setting.rates, trace)]
    print("\n".join(filter(None, described)), flush=True)
    plan = _planned(args, policies, setting, with_codec)
    print(f"\n{tables(plan)}\n")
    print("\n".join(sentences(plan)))
    if args.html is not None:
        write_text(args.html, page(plan, _title(args, trace), described))
    if args.json is not None:
        rates = setting.rates
        write_json(args.json, {**head("plan", trace, rates.block_bytes, setting.tiers.flops, rates), **as_json(plan)})
    return 0


def _planned(args: argparse.Namespace, policies: Sequence[str], setting: Setting, with_codec: Setting | None) -> Plan:
    by_policy = tuple(setting.curve(policy) for policy in policies)
    preferred = preferred_of(by_policy)
    variants = [] if with_codec is None else [with_codec.curve(preferred.policy, CODED)]
    variants.append(setting.curve(preferred.policy, TIER))
    worth = Worth(setting.trace, setting.rates, setting.device_alone(), args.tp or 1, args.gib_price or 0.0)
    most = setting.without_limit(preferred).share_saved or 0.0
    return Plan(worth, setting.sizes, most, by_policy, tuple(variants))


def _title(args: argparse.Namespace, trace: Trace) -> str:
    files = ", ".join(Path(path).name for path in trace.paths)
    model = f"{args.bytes_per_token:,} bytes a token" if args.model is None else args.model
    return f"{files}: {model}" + (f" on {args.tp or 1} x {args.gpu}" if args.gpu else "")


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigurationError before a long replay, not after it."""
    if args.gib_price is not None and args.gpu_price is None:
        raise ConfigurationError("--gib-price is compared with what GPUs cost: give --gpu-price, too")
    for option in ("html", "json"):
        if (path := getattr(args, option)) is not None:
            check_can_be_written(option, path)


def _check_times(trace: Trace) -> None:
    if not span(trace):
        raise ConfigurationError(
            "all requests of this trace have the same time, so the GPUs that they need are not known: take replay, "
            "which needs no times"
        )
