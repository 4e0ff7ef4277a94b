"""The options that every subcommand has: which requests to read, and how."""

import argparse


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """For `read_traces`: TRACE, --block-tokens, --limit and --skip-bad-lines."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="JSON lines, plain or .gz: Mooncake (timestamp in ms, input_length, output_length, hash_ids), or "
        "timestamp and prompt_token_ids or token_ids",
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        metavar="N",
        help="tokens of a block (default: 512 of hash_ids, 16 of token ids)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="replay the first N requests only")
    parser.add_argument("--skip-bad-lines", action="store_true", help="count malformed lines, and go on without them")


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
