"""Reads files of JSON objects, plain or `.gz`, and names the fault of a line.

There is an object a line; or the whole file is one value: a list of objects, an object over several lines, or
`{"data": [...]}`. The objects of a list count as lines.

TraceError names the file; BadLine names only the fault, and the counter of lines adds the place.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

from cpu_prefix_cache.messages.errors import PrefixCacheError
from cpu_prefix_cache.tools.replay.other_formats import other_format

NO_TIME = 2**63  # timestamps must be less, in any unit
WHAT_IS_READ = "docs/traces.md lists the traces and logs that are read"
SHOWN = 40  # characters of a wrong value
MEMBERS = "data"
LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(\{.*)?", re.DOTALL)
OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")


class TraceError(PrefixCacheError):
    """A trace cannot be read. The operator corrects the file, or skips its bad lines."""


class BadLine(Exception):
    """Fault of a line, without its file and number."""


class LineReader:
    """Reads one file. `bad_lines` are complaints about lines, if these are skipped rather than raised."""

    def __init__(self, path: str, skip_bad_lines: bool) -> None:
        self.path = path
        self.bad_lines: list[str] = []
        self._skip = skip_bad_lines
        self._first = b""

    def parts(self) -> Iterator[bytes | dict[str, Any]]:
        """Lines, or the objects of the value that the whole file is. Raises TraceError."""
        lines = self.lines()
        first = next(lines, None)
        if first is None:
            return
        self._first = first
        if not _begins_a_larger_value(first):
            if members := _members(_parsed_or_none(first)):
                yield from members
            else:
                yield first
            yield from lines
            return
        rest = [first, *lines]
        try:
            whole = parsed(b"".join(rest))
        except BadLine as error:
            if LIST.match(first):
                raise TraceError(f"{self.path} begins like a list, and {error}") from error
            yield from rest
            return
        members = whole if isinstance(whole, list) else _members(whole) or [whole]
        if not all(isinstance(member, dict) for member in members):
            raise TraceError(f"{self.path} is a list of something else than JSON objects")
        yield from members

    def lines(self) -> Iterator[bytes]:
        """The lines of the file, without empty ones at its end. Raises TraceError."""
        try:
            with _open(self.path) as file:
                empty = 0
                for line in file:
                    if not line.strip():
                        empty += 1
                        continue
                    yield from [b""] * empty
                    empty = 0
                    yield line
        except (OSError, EOFError, zlib.error) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise TraceError(f"{self.path} cannot be read: {reason}") from error

    def refuse(self, number: int, error: BadLine) -> None:
        """Remember the complaint about this line, or raise it as a TraceError."""
        complaint = f"{self.path}, line {number}: {error}"
        if not self._skip:
            if number == 1 and (instead := other_format(self._first)):
                raise TraceError(f"{self.path} has no requests{instead}") from error
            raise TraceError(f"{complaint} (--skip-bad-lines goes on without such lines)") from error
        self.bad_lines.append(complaint)

    def nothing_found(self, failed: int) -> TraceError:
        """To be raised if no line was good, of which so many were of failed requests."""
        bad = f", and {len(self.bad_lines):,} bad lines, the first: {self.bad_lines[0]}" if self.bad_lines else ""
        lost = f", but {failed:,} that failed" if failed else ""
        return TraceError(f"{self.path} has no requests{lost}{bad or other_format(self._first) or f'; {WHAT_IS_READ}'}")


def _begins_a_larger_value(line: bytes) -> bool:
    """Whether it is the beginning of a list of objects, or of an object that ends in a later line."""
    return bool(LIST.fullmatch(line) or (OBJECT.match(line) and _parsed_or_none(line) is None))


def _parsed_or_none(line: bytes) -> Any:
    try:
        return parsed(line)
    except BadLine:
        return None


def _members(value: Any) -> list[dict[str, Any]]:
    """The objects that an object has under MEMBERS."""
    members = value.get(MEMBERS) if isinstance(value, dict) else None
    return members if isinstance(members, list) and all(isinstance(member, dict) for member in members) else []


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if Path(path).suffix == ".gz" else open(path, "rb")


def parsed(line: bytes) -> Any:
    """Raises BadLine for what is not JSON."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadLine(f"it is not JSON: {error}") from error


def parsed_object(line: bytes) -> dict[str, Any]:
    """Raises BadLine for what is no JSON object."""
    values = parsed(line)
    if not isinstance(values, dict):
        raise BadLine("it is not a JSON object")
    return values


def is_time(value: Any) -> TypeGuard[float]:
    """Whether this is a number that a timestamp can have."""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < NO_TIME


def length_of(values: dict[str, Any], name: str, default: int | None = None, least: int = 0) -> int:
    """A number of tokens. Raises BadLine."""
    value = values.get(name, default)
    if type(value) is not int or value < least:
        raise BadLine(f"{name} must be a number of tokens of at least {least}, got {shown(values, name)}")
    return value


def list_of(values: dict[str, Any], name: str, types: Sequence[type], words: str) -> list[Any]:
    """A list whose members are of one of these types. Raises BadLine."""
    value = values[name]
    if not isinstance(value, list) or not any(set(map(type, value)) <= {each} for each in types):
        raise BadLine(f"{name} must be a list of {words}")
    return value


def shown(values: dict[str, Any], name: str) -> str:
    return json.dumps(values[name])[:SHOWN] if name in values else "nothing"
