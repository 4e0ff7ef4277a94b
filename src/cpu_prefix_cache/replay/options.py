"""Options that the subcommands share: which requests to read, and the bytes of a token's KV."""

import argparse
import math
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.groups import Group, GroupKind
from cpu_prefix_cache.replay.models import BLOCK_TOKENS, read_model
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
