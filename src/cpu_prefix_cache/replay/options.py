"""Options that the subcommands share: which requests to read, the bytes of a token's KV, and rates."""

import argparse
import json
import math
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.groups import Group, GroupKind
from cpu_prefix_cache.replay.models import BLOCK_TOKENS, read_model
from cpu_prefix_cache.replay.seconds_saved import Rates
from cpu_prefix_cache.replay.traces import UNITS_A_SECOND, Trace, read_traces

MOST_DIGITS = 15


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trace_of`: TRACE, --block-tokens, --limit, --time-unit and --skip-bad-lines."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="JSON lines, plain or .gz: Mooncake (timestamp, input_length, output_length, hash_ids), or "
        "timestamp and prompt_token_ids or token_ids",
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        metavar="N",
        help="tokens of a block (default: 512 of hash_ids, 16 of token ids)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="replay the first N requests only")
    parser.add_argument(
        "--time-unit",
        choices=sorted(UNITS_A_SECOND),
        help="of timestamps (default: guessed from the time between the first and the last)",
    )
    parser.add_argument("--skip-bad-lines", action="store_true", help="count malformed lines, and go on without them")


def trace_of(args: argparse.Namespace) -> Trace:
    """Read the requests. Raises TraceError."""
    return read_traces(
        args.traces,
        block_tokens=args.block_tokens,
        limit=args.limit,
        skip_bad_lines=args.skip_bad_lines,
        time_unit=args.time_unit,
    )


def add_weight_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options of `groups_of`: --model with --tp and --kv-dtype, or --bytes-per-token."""
    weight = parser.add_mutually_exclusive_group(required=required)
    weight.add_argument("--model", type=Path, metavar="CONFIG", help="the model's config.json, or a folder with it")
    weight.add_argument(
        "--bytes-per-token", type=positive, metavar="N", help="KV of one token on all ranks, no checkpoints"
    )
    parser.add_argument("--tp", type=positive, metavar="N", help="ranks of tensor parallelism (default 1)")
    parser.add_argument("--kv-dtype", metavar="TYPE", help="of the KV, such as fp8 (default: the model's)")


def groups_of(args: argparse.Namespace, trace_block: int) -> list[Group]:
    """The model's groups, in blocks that divide the trace's; empty if neither option was given.

    Raises ConfigurationError as `read_model` does, and for --tp or --kv-dtype without --model.
    """
    block = math.gcd(BLOCK_TOKENS, trace_block)
    if args.model is not None:
        return read_model(args.model, args.tp or 1, block_tokens=block, kv_dtype=args.kv_dtype)
    for name in ("tp", "kv_dtype"):
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} is for --model, which says what it changes")
    if args.bytes_per_token is None:
        return []
    return [Group(name="full", kind=GroupKind.PREFIX, block_tokens=block, block_bytes=args.bytes_per_token * block)]


def add_rate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rates_of`: --prefill-rate, --host-rate and --below-rate."""
    parser.add_argument("--prefill-rate", type=rate, metavar="TOKENS/S", help="show prefill seconds saved")
    parser.add_argument("--host-rate", type=rate, metavar="GB/S", help="of loads from host memory to the device")
    parser.add_argument(
        "--below-rate",
        metavar="GB/S",
        help="of reads from the tier below, or the file of `bench --tier PATH --json FILE`",
    )


def rates_of(args: argparse.Namespace, block_bytes: int | None, block_tokens: int, *, has_below: bool) -> Rates | None:
    """The rates that were given; None without any.

    Raises ConfigurationError when some are missing, or the bytes of a block are not known.
    """
    wanted = ["prefill_rate", "host_rate", *(["below_rate"] if has_below else [])]
    if args.below_rate is not None and not has_below:
        raise ConfigurationError("--below-rate is for a tier below the host: give --below")
    missing = [f"--{name.replace('_', '-')}" for name in wanted if getattr(args, name) is None]
    if len(missing) == len(wanted):
        return None
    if missing:
        raise ConfigurationError(f"prefill seconds saved follow from all rates: give {', '.join(missing)}, too")
    if block_bytes is None:
        raise ConfigurationError("rates are in bytes: give the bytes of a token by --bytes-per-token or --model")
    return Rates(
        prefill_tokens=args.prefill_rate,
        host_bytes=args.host_rate * 1e9,
        below_bytes=_below_rate(args.below_rate) * 1e9 if has_below else None,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
    )


def _below_rate(text: str) -> float:
    """GB/s from a number, or from what `bench --tier` has written."""
    try:
        return rate(text)
    except argparse.ArgumentTypeError as error:
        if not Path(text).is_file():
            raise ConfigurationError(f"--below-rate {error}, or the file of `bench --tier PATH --json FILE`") from error
    try:
        return rate(str(json.loads(Path(text).read_text())["read_gb_per_s"]))
    except (OSError, ValueError, KeyError, TypeError, argparse.ArgumentTypeError) as error:
        raise ConfigurationError(f"--below-rate: {text} is not what `bench --tier PATH --json FILE` writes") from error


def rate(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text[:40]!r}")
    return number


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    return _whole_number(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    if len(text) > MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"must be a number of at most {MOST_DIGITS} digits, got {len(text)}")
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)
