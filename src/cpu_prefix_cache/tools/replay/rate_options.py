"""Options about the time that hits save: how fast prompts are computed, how fast bytes come, and what an hour costs.

--prefill-rate 38000@8192     measured, with prompts of 8,192 tokens
--tflops 600                  estimated: what the GPUs reach together, over the FLOPs of a token of this model
"""

import argparse
import json
import math
import re
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.flops import Flops, read_flops
from cpu_prefix_cache.tools.replay.options import positive, rate
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.traces import Trace

BENCH, BENCH_TIER = "bench --json FILE", "bench --tier PATH --json FILE"
# Field that each option which takes a number or a file reads from the file, and the command that writes it.
FIELDS = {
    "host_rate": ("load_gb_per_s", BENCH),
    "below_rate": ("read_gb_per_s", BENCH_TIER),
    "tflops": ("matmul_tflops", BENCH),
}
POWERS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def add_rate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flops_of` and `rates_of`, without --below-rate."""
    prefill = parser.add_mutually_exclusive_group()
    prefill.add_argument(
        "--prefill-rate",
        metavar="TOKENS/S[@LENGTH]",
        help="show prefill seconds saved, at this rate, measured with prompts of LENGTH tokens (default: short ones)",
    )
    prefill.add_argument(
        "--tflops",
        metavar="TFLOPS",
        help=f"the same, estimated: what all GPUs of one server reach together, or the file of `{BENCH}`",
    )
    parser.add_argument(
        "--active-parameters",
        metavar="N",
        help="parameters that are active for a token, such as 22B (default: counted in the configuration of --model)",
    )
    parser.add_argument(
        "--host-rate",
        metavar="GB/S",
        help=f"rate of loads from host memory to the device, or the file of `{BENCH}` (default: they take no time)",
    )
    parser.add_argument(
        "--gpu-price",
        type=rate,
        metavar="PRICE",
        help="price of an hour of all GPUs of one engine, in any currency: show money, too",
    )


def add_below_rate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--below-rate",
        metavar="GB/S",
        help=f"rate of reads from the tier below, or the file of `{BENCH_TIER}`",
    )


def flops_of(args: argparse.Namespace) -> Flops | None:
    """FLOPs of a token of this model; None if they are not known. Raises ConfigurationError if --tflops needs it."""
    active = None if args.active_parameters is None else parse_count(args.active_parameters)
    if args.model is not None:
        try:
            return read_flops(args.model, active)
        except ConfigurationError:
            if args.tflops is not None or active is not None:
                raise
            return None
    if active is not None:
        return Flops(2 * active, 0)
    if args.tflops is not None:
        raise ConfigurationError("--tflops needs what a token takes to compute: give --model or --active-parameters")
    return None


def rates_of(
    args: argparse.Namespace, trace: Trace, block_bytes: int | None, flops: Flops | None, below_rate: str | None = None
) -> Rates | None:
    """The rates that were given; None without one of prefill.

    Raises ConfigurationError for others without that one, and for rates of bytes if the bytes of a block are not known.
    """
    if args.prefill_rate is None and args.tflops is None:
        for name, value in (
            ("host-rate", args.host_rate),
            ("below-rate", below_rate),
            ("gpu-price", args.gpu_price),
        ):
            if value is not None:
                raise ConfigurationError(f"--{name} is for prefill seconds saved: give --prefill-rate or --tflops, too")
        return None
    if block_bytes is None and (args.host_rate is not None or below_rate is not None):
        raise ConfigurationError("rates are in bytes: give the bytes of a token by --bytes-per-token or --model")
    even_depth = even_depth_of(flops)
    prefill, source = _prefill(args, flops, even_depth)
    return Rates(
        prefill_tokens=prefill,
        even_depth=even_depth,
        host_bytes=math.inf if args.host_rate is None else number_or_file("host_rate", args.host_rate) * 1e9,
        below_bytes=None if below_rate is None else number_or_file("below_rate", below_rate) * 1e9,
        block_bytes=block_bytes or 0,
        block_tokens=trace.block_tokens,
        gpu_price=args.gpu_price,
        source=source,
    )


def even_depth_of(flops: Flops | None) -> float:
    """Infinite if it is not known: then every token takes as long."""
    return math.inf if flops is None else flops.even_depth


def _prefill(args: argparse.Namespace, flops: Flops | None, even_depth: float) -> tuple[float, str]:
    """Tokens a second at the beginning of a prompt, and where that is from."""
    if args.prefill_rate is not None:
        tokens_a_second, length = parse_prefill_rate(args.prefill_rate)
        measured = Work()
        measured.add(0, length)
        slower = measured.at_start(even_depth) / length
        source = "given" if length == 1 else f"given: {tokens_a_second:,.0f} for prompts of {length:,} tokens"
        return tokens_a_second * slower, source
    if flops is None:
        raise ConfigurationError("--tflops needs what a token takes to compute: give --model or --active-parameters")
    tflops = number_or_file("tflops", args.tflops)
    return tflops * 1e12 / flops.token, f"estimated: {flops.token / 1e9:,.1f} GFLOP a token at {tflops:,.0f} TFLOPS"


def number_or_file(option: str, text: str) -> float:
    """A number above 0, or that in a file that `bench` has written."""
    name = option.replace("_", "-")
    field, command = FIELDS[option]
    try:
        return rate(text)
    except argparse.ArgumentTypeError as error:
        if not Path(text).is_file():
            raise ConfigurationError(f"--{name} {error}, or the file of `{command}`") from error
    try:
        return rate(str(json.loads(Path(text).read_text())[field]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, argparse.ArgumentTypeError) as error:
        raise ConfigurationError(f"--{name}: {text} is not what `{command}` writes") from error


def parse_prefill_rate(text: str) -> tuple[float, int]:
    """Tokens a second, and the length of the prompts with which that was measured.

    >>> parse_prefill_rate("38000@8192"), parse_prefill_rate("44000")
    ((38000.0, 8192), (44000.0, 1))
    """
    tokens_a_second, at, length = text.partition("@")
    try:
        return rate(tokens_a_second), positive(length) if at else 1
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"--prefill-rate is TOKENS/S or TOKENS/S@LENGTH; {error}") from error


def parse_count(text: str) -> float:
    """A number of parameters, with an optional M, B or T.

    >>> parse_count("22B"), parse_count("7e9")
    (22000000000.0, 7000000000.0)
    """
    match = re.fullmatch(r"(.+?)\s*([MBT]?)", text.strip(), re.IGNORECASE)
    try:
        return rate(match[1] if match else text) * POWERS[match[2].upper() if match else ""]
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"--active-parameters is a number such as 22B; it {error}") from error
