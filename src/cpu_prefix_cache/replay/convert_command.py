"""`cpu-prefix-cache convert LOG --out TRACE`: makes a trace for `replay` and `size` of a server's log.

Reads request bodies of the OpenAI API in JSON lines, ShareGPT's conversations, and the request logs of vLLM and SGLang
(docs/traces.md says how to get them). Texts and messages become token ids with the model's own tokenizer and chat
template (--tokenizer). The trace has numbers of blocks instead of texts: equal number, equal prefix.

Without times, requests are taken to come one after the other: lines --every so many seconds, and the questions of one
conversation --pause seconds apart.
"""

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.model.hashing import ChainHasher
from cpu_prefix_cache.replay.lines import BadLine, TraceError
from cpu_prefix_cache.replay.options import positive, rate
from cpu_prefix_cache.replay.request_logs import Recorded, RequestLog
from cpu_prefix_cache.replay.tokenizer import Tokenizer
from cpu_prefix_cache.replay.traces import LOG_BLOCK_TOKENS, SHORTEST_MS, UNITS_A_SECOND, time_unit_of

EVERY, PAUSE = 1.0, 60.0
MADE_UP, OF_DAY, NUMBERS = "missing", "a time of the day", "a number"


class Converted(NamedTuple):
    """A line of the trace to be. `now` is in the unit of the log."""

    now: float
    tokens: int
    ids: list[int]


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a trace of a server's log: texts, messages or token ids",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="plain or .gz; several are one load")
    parser.add_argument("--out", required=True, metavar="TRACE", help="the trace to be written")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of the model, with its tokenizer.json")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="instead of the one of the model")
    parser.add_argument(
        "--block-tokens", type=positive, default=LOG_BLOCK_TOKENS, metavar="N", help="tokens of a block (default: 16)"
    )
    parser.add_argument("--time-unit", choices=sorted(UNITS_A_SECOND), help="of times that are numbers")
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
    tokenizer = None if args.tokenizer is None else Tokenizer(args.tokenizer, args.chat_template)
    logs = [RequestLog(path, args.skip_bad_lines) for path in args.logs]
    converter = Converter(tokenizer, args.block_tokens, args.every, args.pause)
    requests = [request for log in logs for request in converter.convert(log)]
    requests.sort(key=lambda request: request.now)
    unit = _unit(requests, args.time_unit, converter.times)
    _write(args.out, _lines(requests, unit))
    tokens, blocks = sum(request.tokens for request in requests), sum(len(request.ids) for request in requests)
    print(
        f"{len(requests):,} requests of {tokens:,} tokens, {blocks:,} whole blocks of {args.block_tokens} tokens, "
        f"{converter.different:,} of them different: {args.out}"
    )
    _print_what_was_assumed(logs, converter, unit, is_given=args.time_unit is not None)
    return 0


class Converter:
    """Turns prompts into numbers of blocks. `times` says what those of the log are, once a request was seen."""

    def __init__(self, tokenizer: Tokenizer | None, block_tokens: int, every: float, pause: float) -> None:
        self._tokenizer = tokenizer
        self._hasher = ChainHasher(chunk_tokens=block_tokens)
        self._numbers: dict[bytes, int] = {}
        self._every, self._pause = every, pause
        self.times: str | None = None

    @property
    def different(self) -> int:
        return len(self._numbers)

    def convert(self, log: RequestLog) -> Iterable[Converted]:
        for request in log.read():
            try:
                yield self._converted(request)
            except BadLine as error:
                log.lines.refuse(request.line, error)

    def _converted(self, request: Recorded) -> Converted:
        now, tokens = self._time(request), self._tokens(request.content)
        try:
            keys = self._hasher.keys(tokens)
        except MisuseError as error:
            raise BadLine(str(error)) from error
        ids = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        return Converted(now, len(tokens), ids)

    def _time(self, request: Recorded) -> float:
        kind = MADE_UP if request.time is None else OF_DAY if request.time.is_of_day else NUMBERS
        if self.times is None:
            self.times = kind
        if self.times != kind:
            raise BadLine(f"its time is {kind}, and those before are {self.times}")
        if request.time is None:
            return (request.line - 1) * self._every + request.turn * self._pause
        return request.time.value

    def _tokens(self, content: Any) -> Sequence[int]:
        if isinstance(content, list):
            return content
        if self._tokenizer is None:
            raise TraceError("the log has texts, not token ids: give the model's folder by --tokenizer")
        tokens = self._tokenizer.ids(content)
        if not tokens:
            raise BadLine("its text has no tokens")
        return tokens


def _unit(requests: Sequence[Converted], given: str | None, times: str | None) -> str:
    """Of the times: seconds, unless they are numbers."""
    if not requests:
        raise TraceError("no request is left of the log: every line is bad")
    first, last = requests[0].now, requests[-1].now
    return (given or time_unit_of(last - first, first)) if times == NUMBERS else "s"


def _lines(requests: Sequence[Converted], unit: str) -> Iterable[str]:
    """Times begin at 0, in the unit for which `replay` takes them: milliseconds from ten minutes on."""
    a_second, first = UNITS_A_SECOND[unit], requests[0].now
    scale = 1000 if (requests[-1].now - first) / a_second * 1000 >= SHORTEST_MS else 1
    for now, tokens, ids in requests:
        timestamp = round((now - first) / a_second * scale, 3)
        yield json.dumps({"timestamp": timestamp, "input_length": tokens, "hash_ids": ids}) + "\n"


def _print_what_was_assumed(logs: Sequence[RequestLog], converter: Converter, unit: str, *, is_given: bool) -> None:
    if converter.times == MADE_UP:
        print("the log has no times: they were made up (--every, --pause)")
    elif converter.times == NUMBERS and not is_given:
        print(f"times were taken for {'seconds' if unit == 's' else 'milliseconds'} (--time-unit)")
    if others := sum(log.other_lines for log in logs):
        print(f"lines without a request: {others:,}")
    if bad := [line for log in logs for line in log.lines.bad_lines]:
        print(f"bad lines that were skipped: {len(bad):,}, the first: {bad[0]}")


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
