"""`cpu-prefix-cache bench`: which share of the rate of this machine's link our copies reach.

Measures a CUDA or HIP device in some seconds and prints a table. A store copies from the device to host memory, a load
from host memory to the device. GB are 1e9 bytes.

With --tier PATH a disk is measured instead: what it gives a tier in files, with checksums and O_DIRECT, beside plain
calls to the system. With --tier URL a store that machines share: 256 MiB are put there, got, and deleted. With a model:
from which rate on reading a prefix takes less time than computing it.
"""

import argparse

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.bench.rates import as_json, draw, table
from cpu_prefix_cache.tools.replay.options import add_weight_options, check_results_can_be_written, rate, write_json

TIER_OPTIONS = ("prefill_rate", "model", "bytes_per_token", "tp", "kv_dtype", "codec")


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="how fast copies, and files of a tier, are on this machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the table, too: .png, .svg, .pdf and others")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the CUDA or HIP device (default 0)")
    parser.add_argument(
        "--tier", metavar="PATH[:SIZE]|URL", help="measure a file of SIZE bytes there (default 1GiB), or a store"
    )
    parser.add_argument(
        "--json", metavar="OUT", help="write the rates here, for `replay --host-rate` and `--below-rate`"
    )
    parser.add_argument(
        "--prefill-rate", type=rate, metavar="TOKENS/S", help="with --tier: how fast prompts are computed"
    )
    add_weight_options(parser, required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.tier is not None:
        return _run_tier(args)
    for name in TIER_OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} is for --tier")
    try:
        import torch

        from cpu_prefix_cache.tools.bench.measure import measure
    except ImportError as missing:
        sentence = f"bench needs torch and Triton ({missing}): pip install torch triton, or torch for ROCm"
        raise ConfigurationError(sentence) from missing
    check_results_can_be_written(args)
    if args.device not in range(torch.cuda.device_count()):
        raise ConfigurationError(
            f"there is no CUDA or HIP device {args.device} here: {torch.cuda.device_count()} were found"
        )
    torch.cuda.set_device(args.device)
    measured = measure(torch.device("cuda", args.device))
    print(table(measured.rates, measured.limits))
    link = ", ".join(f"{direction} {rate:.1f} GB/s" for direction, rate in measured.limits.items())
    print(f"{measured.device}: one large copy, {link}; one large product of matrices, {measured.tflops:.0f} TFLOPS")
    if args.json is not None:
        write_json(args.json, as_json(measured.device, measured.limits, measured.tflops, measured.rates))
    if args.plot is not None:
        draw(args.plot, measured.device, measured.rates, measured.limits)
    return 0


def _run_tier(args: argparse.Namespace) -> int:
    if args.plot is not None:
        raise ConfigurationError("--plot draws rates of the link, and --tier measures none")
    try:
        from cpu_prefix_cache.tools.bench.tier_bench import run_tier
    except ImportError as missing:
        sentence = f"bench --tier needs torch ({missing}): pip install torch"
        raise ConfigurationError(sentence) from missing
    return run_tier(args)
