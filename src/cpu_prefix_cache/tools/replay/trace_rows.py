"""Reads rows of several tools as the rows of a trace: their fields have other names, or stand further in.

created_time, input_tokens, output_tokens      for timestamp, input_length, output_length
session_id and delay instead of timestamp      ms after the row before it of its session: AIPerf, Dynamo
{"requests": [{"t", "in", "hash_ids"}, ...]}   a session, in s: kv-cache-tester. Requests of a subagent are a list
                                               among them. "hash_id_scope": "local" keeps its ids apart
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from cpu_prefix_cache.tools.replay.lines import BadLine, is_time, length_of, list_of, shown

NAMES = {
    "created_time": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "t": "timestamp",
    "in": "input_length",
    "out": "output_length",
}
REQUESTS = "requests"
SCOPES = (None, "local", "global")


class TraceRow(NamedTuple):
    """A request.

    fields         by the names of a trace
    scope          ids of different scopes are unrelated
    unit           of its timestamp, where its format fixes it
    block_tokens   tokens of a block, where its file has them
    is_delayed     whether its timestamp was computed from a delay
    """

    fields: dict[str, Any]
    scope: str = ""
    unit: str | None = None
    block_tokens: int | None = None
    is_delayed: bool = False


class RowReader:
    """Reads the rows of one file."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}  # timestamp of the last row of each session

    def rows(self, number: int, values: dict[str, Any]) -> Iterator[TraceRow]:
        """The object that stands in this line. Raises BadLine."""
        if REQUESTS not in values:
            yield self._row(values)
            return
        scope = values.get("hash_id_scope")
        if scope not in SCOPES:
            raise BadLine(f"hash_id_scope must be local or global, got {shown(values, 'hash_id_scope')}")
        block_tokens = length_of(values, "block_size", least=1) if "block_size" in values else None
        for leaf in _leaves(values):
            unit = "s" if "t" in leaf else None
            yield TraceRow(_renamed(leaf), str(number) if scope == "local" else "", unit, block_tokens)

    def _row(self, values: dict[str, Any]) -> TraceRow:
        fields = _renamed(values)
        session = str(fields.get("session_id"))
        is_delayed = "timestamp" not in fields and "session_id" in fields
        if is_delayed:
            delay = fields.get("delay", 0)
            if not is_time(delay):
                raise BadLine(f"delay must be a number of ms, 0 or more, got {shown(fields, 'delay')}")
            fields["timestamp"] = self._last.get(session, 0) + delay
        if is_time(fields.get("timestamp")):
            self._last[session] = fields["timestamp"]
        return TraceRow(fields, unit="ms" if is_delayed else None, is_delayed=is_delayed)


def _leaves(session: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in list_of(session, REQUESTS, [dict], "requests"):
        if REQUESTS in each:
            yield from _leaves(each)
        else:
            yield each


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """With the names of a trace, where it has not got them already."""
    others = {to: values[name] for name, to in NAMES.items() if name in values and to not in values}
    return {**values, **others}
