"""Reads when a request came: a field of an object, or the beginning of a line that an engine logged."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cpu_prefix_cache.tools.replay.lines import BadLine, is_time, shown

TIMES = (
    "timestamp",
    "time",
    "created",
    "created_at",
    "createdAt",
    "created_time",
    "start_time",
    "startTime",
    "arrival_time",
    "@timestamp",
    "ts",
    "tstamp",
)
LOGGED = (
    (re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)"), "%Y-%m-%d %H:%M:%S", ""),
    (re.compile(rb"(\d\d-\d\d \d\d:\d\d:\d\d)"), "%Y-%m-%d %H:%M:%S", "2000-"),  # vLLM leaves out the year
)


class Time(NamedTuple):
    """In seconds, if it was a time of the day; a number may be in milliseconds."""

    value: float
    is_of_day: bool


def time_of(values: Mapping[str, Any]) -> Time | None:
    """The first of TIMES that the object has: a number, also in a text, or ISO 8601. Raises BadLine for others."""
    for name in TIMES:
        if values.get(name) is not None:
            return _parsed(dict(values), name)
    return None


def logged_time(line: bytes) -> Time:
    """Raises BadLine for a line without a time."""
    for pattern, style, year in LOGGED:
        if match := pattern.search(line):
            try:
                return _of_day(datetime.strptime(year + match[1].decode(), style))
            except ValueError as error:
                raise BadLine(f"its time is none: {error}") from error
    raise BadLine("it has no time")


def _parsed(values: dict[str, Any], name: str) -> Time:
    value = values[name]
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if is_time(number):
        return Time(float(number), is_of_day=False)
    try:
        return _of_day(datetime.fromisoformat(value))
    except (TypeError, ValueError) as error:
        wanted = "a number or a time such as 2026-01-31T12:00:00"
        raise BadLine(f"{name} must be {wanted}, got {shown(values, name)}") from error


def _of_day(time: datetime) -> Time:
    """Without a time zone, all of a log are of the same."""
    return Time((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), is_of_day=True)
