"""Options that the subcommands share: which requests to read, the bytes of a token's KV, where results go."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpu_prefix_cache.eviction import WEIGHED, policy_of
from cpu_prefix_cache.eviction.installed import installed_policies
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.codec import CODECS, RAW
from cpu_prefix_cache.model.groups import Group, PrefixGroup
from cpu_prefix_cache.tools.plots import check_plot_can_be_drawn
from cpu_prefix_cache.tools.replay.models import BLOCK_TOKENS, read_model
from cpu_prefix_cache.tools.replay.trace_guesses import UNITS_A_SECOND
from cpu_prefix_cache.tools.replay.trace_keys import CHAINED, CONTENT
from cpu_prefix_cache.tools.replay.traces import Trace, read_traces

MOST_DIGITS = 15
MOST = 1e15
WEIGHED_HELP = f"{WEIGHED}N for the most time saved, N as printed with --model"


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trace_of`: TRACE, --block-tokens, --limit, --time-unit, --ids and --skip-bad-lines."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="JSON, plain or .gz: Mooncake (timestamp, input_length, output_length, hash_ids), AIPerf, "
        "kv-cache-tester, or timestamp and prompt_token_ids or token_ids; `convert` makes them of logs, "
        "which `plan` reads as they are",
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        metavar="N",
        help="tokens of a block (default: guessed for hash_ids, 16 of token ids)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="replay the first N requests only")
    parser.add_argument(
        "--time-unit",
        choices=sorted(UNITS_A_SECOND),
        help="unit of timestamps (default: guessed from the time between the first and the last)",
    )
    parser.add_argument(
        "--ids",
        choices=(CHAINED, CONTENT),
        default=CHAINED,
        help="kind of hash_ids: an id is that of a whole prefix, or of a block's content alone (default: chained)",
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
        ids=args.ids,
    )


def add_weight_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options of `groups_of`: --model with --tp, --kv-dtype and --codec, or --bytes-per-token."""
    weight = parser.add_mutually_exclusive_group(required=required)
    weight.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="its config.json, a folder with it, or a name such as qwen3-8b",
    )
    weight.add_argument(
        "--bytes-per-token", type=positive, metavar="N", help="KV of one token on all ranks, no checkpoints"
    )
    parser.add_argument("--tp", type=positive, metavar="N", help="ranks of tensor parallelism (default 1)")
    parser.add_argument("--kv-dtype", metavar="TYPE", help="type of the KV, such as fp8 (default: the model's)")
    parser.add_argument("--codec", choices=CODECS, help=f"form in which the host keeps the KV (default: {RAW})")


def groups_of(args: argparse.Namespace, trace_block: int) -> list[Group]:
    """The model's groups, in blocks that divide the trace's; empty if neither option was given.

    Raises ConfigurationError as `read_model` does, and for --tp, --kv-dtype or --codec without --model.
    """
    block = math.gcd(BLOCK_TOKENS, trace_block)
    codec = args.codec or RAW
    if args.model is not None:
        return read_model(args.model, args.tp or 1, block_tokens=block, kv_dtype=args.kv_dtype, codec=codec)
    for name in ("tp", "kv_dtype", "codec"):
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} is for --model, which says what it changes")
    if args.bytes_per_token is None:
        return []
    return [PrefixGroup(name="full", block_tokens=block, block_bytes=args.bytes_per_token * block)]


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add --json and --plot."""
    parser.add_argument("--json", metavar="OUT", help="write the results here, too")
    parser.add_argument("--plot", metavar="OUT.png", help="draw the results over capacity (needs matplotlib)")


def check_results_can_be_written(args: argparse.Namespace) -> None:
    """Raises ConfigurationError before a long replay, not after it."""
    for option, path in (("json", args.json), ("plot", args.plot)):
        if path is not None:
            check_can_be_written(option, path)
    if args.plot is not None:
        check_plot_can_be_drawn(args.plot)


def check_can_be_written(option: str, path: str) -> None:
    if Path(path).is_dir():
        raise ConfigurationError(f"--{option} cannot be written to {path}, which is a folder")
    if not Path(path).parent.is_dir():
        raise ConfigurationError(f"--{option} cannot be written to {path}: there is no such folder")


def write_json(path: str, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the results cannot be written to {path}: {error.strerror}") from error


class Joined(argparse.Action):
    """Joins the values of an option that is given several times, with commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def names_of(text: str, option: str) -> list[str]:
    """Names between commas, each once. Raises ConfigurationError for an empty one."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigurationError(f"{option} has nothing between two commas, or none at all: {text[:40]!r}")
    return list(dict.fromkeys(names))


def policies_of(text: str | None, known: Sequence[str]) -> list[str]:
    """The policies between commas, `adaptive@N` and those of other packages among them; without text all `known`."""
    policies = list(known) if text is None else names_of(text, "--policy")
    for name in policies:
        if name not in known:
            _check_policy(name, known)
    return policies


def _check_policy(name: str, known: Sequence[str]) -> None:
    installed = installed_policies()
    if name.startswith(WEIGHED) or name in installed:
        policy_of(name)  # raises
    else:
        names = ", ".join([*known, *sorted(installed)])
        raise ConfigurationError(f"unknown policy {name!r}; known are {names}, and {WEIGHED}N")


def rate(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text[:40]!r}")
    if not 1 / MOST <= number <= MOST:
        raise argparse.ArgumentTypeError(f"must be a number from {1 / MOST:.0e} to {MOST:.0e}, got {text[:40]!r}")
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
