"""Reads recorded requests for `plan`: traces, or logs, of which it makes a trace as `convert` does."""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.convert_command import EVERY, PAUSE, converted
from cpu_prefix_cache.tools.replay.lines import BadLine, LineReader, parsed_object
from cpu_prefix_cache.tools.replay.options import trace_of
from cpu_prefix_cache.tools.replay.trace_file import ROW_FIELDS
from cpu_prefix_cache.tools.replay.trace_guesses import LOG_BLOCK_TOKENS
from cpu_prefix_cache.tools.replay.traces import Trace


def recorded(args: argparse.Namespace) -> tuple[Trace, list[str]]:
    """The requests, and lines about how they were made of a log. Raises PrefixCacheError."""
    are_traces = [_is_trace(path) for path in args.traces]
    if all(are_traces):
        if args.tokenizer is not None:
            raise ConfigurationError("--tokenizer is for logs, and a trace has no texts: leave it out")
        return trace_of(args), []
    if any(are_traces):
        trace, log = (args.traces[are_traces.index(each)] for each in (True, False))
        raise ConfigurationError(f"{trace} is a trace and {log} is none: give one kind, or take `convert` first")
    return _of_logs(args)


def _is_trace(path: str) -> bool:
    """Whether its first line is a row of a trace. Raises TraceError for a file that cannot be read."""
    first = next(LineReader(path, False).parts(), {})
    try:
        values = first if isinstance(first, dict) else parsed_object(first)
    except BadLine:
        return False
    return not values.keys().isdisjoint(ROW_FIELDS)


def _of_logs(args: argparse.Namespace) -> tuple[Trace, list[str]]:
    tokens = args.block_tokens or LOG_BLOCK_TOKENS
    given = {"logs": args.traces, "block_tokens": tokens, "chat_template": None, "every": EVERY, "pause": PAUSE}
    lines, described = converted(argparse.Namespace(**{**vars(args), **given}))
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        path.write_text("".join(lines))
        made = {"traces": [str(path)], "block_tokens": tokens, "time_unit": None, "skip_bad_lines": False}
        trace = trace_of(argparse.Namespace(**{**vars(args), **made}))
    return replace(trace, paths=list(args.traces)), described
