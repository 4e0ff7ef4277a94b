"""`cpu-prefix-cache convert LOG --out TRACE`: makes a trace for `replay` and `plan` of a server's log.

Reads request bodies of the OpenAI and Anthropic APIs in JSON, conversations such as ShareGPT's, and the request logs of
vLLM and SGLang (docs/traces.md has the list, and how to get them). Texts and messages become token ids with the
model's own tokenizer and chat template (--tokenizer). The trace has numbers of blocks instead of texts: equal number,
equal prefix. Prompts of different models, adapters or salts share none.

Without times, requests are taken to come one after the other: lines --every so many seconds. So are the questions of a
conversation that has one time for all, --pause seconds apart.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.converter import MADE_UP, NUMBERS, Converted, Converter
from cpu_prefix_cache.tools.replay.lines import TraceError
from cpu_prefix_cache.tools.replay.options import positive, rate
from cpu_prefix_cache.tools.replay.request_logs import RequestLog
from cpu_prefix_cache.tools.replay.sharing import describe_sharing
from cpu_prefix_cache.tools.replay.tokenizer import FolderTokenizer
from cpu_prefix_cache.tools.replay.trace_guesses import LOG_BLOCK_TOKENS, SHORTEST_MS, UNITS_A_SECOND, time_unit_of

EVERY, PAUSE = 1.0, 60.0


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a trace of a server's log: texts, messages or token ids",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="plain or .gz; several are one load")
    parser.add_argument("--out", required=True, metavar="TRACE", help="the trace to be written")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="folder of the model, with its tokenizer.json")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="instead of the one of the model")
    parser.add_argument(
        "--block-tokens", type=positive, default=LOG_BLOCK_TOKENS, metavar="N", help="tokens of a block (default: 16)"
    )
    parser.add_argument("--time-unit", choices=sorted(UNITS_A_SECOND), help="unit of times that are numbers")
    parser.add_argument(
        "--every", type=rate, default=EVERY, metavar="S", help="seconds between lines without times (default: 1)"
    )
    parser.add_argument(
        "--pause", type=rate, default=PAUSE, metavar="S", help="seconds between questions without times (default: 60)"
    )
    parser.add_argument("--skip-bad-lines", action="store_true", help="count malformed lines, and go on without them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises PrefixCacheError for invalid options and logs."""
    _check_out(args.out, args.logs)
    if args.chat_template is not None and args.tokenizer is None:
        raise ConfigurationError("--chat-template is for --tokenizer, which makes token ids of its text")
    lines, (summary, *assumed) = converted(args)
    _write(args.out, lines)
    print("\n".join([f"{summary}: {args.out}", *assumed]))
    return 0


def converted(args: argparse.Namespace) -> tuple[Iterable[str], list[str]]:
    """The lines of the trace, and about it: how much it is, and what was assumed."""
    tokenizer = None if args.tokenizer is None else FolderTokenizer(args.tokenizer, args.chat_template)
    logs = [RequestLog(path, args.skip_bad_lines) for path in args.logs]
    converter = Converter(tokenizer, args.block_tokens, args.every, args.pause)
    requests = [request for log in logs for request in converter.convert(log)]
    unit = _unit(requests, args.time_unit, converter.times)
    tokens, blocks = sum(request.tokens for request in requests), sum(len(request.ids) for request in requests)
    summary = (
        f"{len(requests):,} requests of {tokens:,} tokens, {blocks:,} whole blocks of {args.block_tokens} tokens, "
        f"{converter.different:,} of them different"
    )
    return _lines(requests, unit), [summary, *_assumed(logs, converter, unit, is_given=args.time_unit is not None)]


def _unit(requests: Sequence[Converted], given: str | None, times: str | None) -> str:
    """Unit of the times: seconds, unless they are numbers."""
    if not requests:
        raise TraceError("no request is left of the log: every line is bad")
    first, last = (choice(request.now for request in requests) for choice in (min, max))
    return (given or time_unit_of(last - first, first)) if times == NUMBERS else "s"


def _lines(requests: Sequence[Converted], unit: str) -> Iterable[str]:
    """Times begin at 0, in the unit for which `replay` takes them: milliseconds from ten minutes on."""
    a_second = UNITS_A_SECOND[unit]
    in_order = sorted(((one.now / a_second + one.later, one) for one in requests), key=lambda each: each[0])
    first, last = in_order[0][0], in_order[-1][0]
    scale = 1000 if (last - first) * 1000 >= SHORTEST_MS else 1
    for now, (_, _, tokens, ids) in in_order:
        timestamp = round((now - first) * scale, 3)
        yield json.dumps({"timestamp": timestamp, "input_length": tokens, "hash_ids": ids}) + "\n"


def _assumed(logs: Sequence[RequestLog], converter: Converter, unit: str, *, is_given: bool) -> Iterator[str]:
    """Lines about values that were made up, guessed, kept apart and left out."""
    if converter.times == MADE_UP:
        yield "no field of the log is known as a time: times were made up (--every, --pause)"
    elif converter.times == NUMBERS and not is_given:
        yield f"times were taken for {'seconds' if unit == 's' else 'milliseconds'} (--time-unit)"
    if converter.times != MADE_UP and converter.paused:
        yield f"questions without a time of their own, placed --pause after the one before: {converter.paused:,}"
    if apart := describe_sharing(converter.aparts):
        yield apart
    if others := sum(log.other_lines for log in logs):
        yield f"lines without a request: {others:,}"
    if failed := sum(log.failed for log in logs):
        yield f"requests that failed and were left out: {failed:,}"
    if later := sum(log.failed_later for log in logs):
        yield f"requests that are in the trace though a later line says that they failed: {later:,}"
    ignored = sum((log.ignored for log in logs), Counter[str]())
    if ignored:
        most_first = sorted(ignored.items(), key=lambda each: (-each[1], each[0]))
        yield f"ignored: {', '.join(f'{name} ({count:,})' for name, count in most_first)}"
    if bad := [line for log in logs for line in log.lines.bad_lines]:
        yield f"bad lines that were skipped: {len(bad):,}, the first: {bad[0]}"


def _check_out(out: str, logs: Sequence[str]) -> None:
    path = Path(out)
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"--out cannot be written to {out}, which is a folder or a device: give a file's name")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--out cannot be written to {out}: there is no such folder")
    if any(path.exists() and Path(log).exists() and path.samefile(log) for log in logs):
        raise ConfigurationError(f"--out would overwrite the log {out}: give another name")


def _write(out: str, lines: Iterable[str]) -> None:
    """As a whole or not at all."""
    part = Path(f"{out}.part")
    try:
        with part.open("w") as file:
            file.writelines(lines)
        os.replace(part, out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigurationError(f"the trace cannot be written to {out}: {error.strerror}") from error
