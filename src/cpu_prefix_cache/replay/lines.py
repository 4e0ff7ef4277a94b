"""Reads files of one JSON object a line, plain or `.gz`, and says what is wrong with a line.

TraceError names the file; BadLine says only what is wrong, and whoever counts the lines adds where.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

from cpu_prefix_cache.messages.errors import PrefixCacheError

NO_TIME = 2**63  # timestamps must be less, in any unit
SHOWN = 40  # characters of a wrong value


class TraceError(PrefixCacheError):
    """A trace cannot be read. The operator corrects the file, or skips its bad lines."""


class BadLine(Exception):
    """What is wrong with a line, without its file and number."""


class LineReader:
    """Reads one file. `bad_lines` are complaints about lines, if these are skipped rather than raised."""

    def __init__(self, path: str, skip_bad_lines: bool) -> None:
        self.path = path
        self.bad_lines: list[str] = []
        self._skip = skip_bad_lines

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
            raise TraceError(f"{complaint} (--skip-bad-lines goes on without such lines)") from error
        self.bad_lines.append(complaint)

    def nothing_found(self) -> TraceError:
        """To be raised if no line was good."""
        bad = f", and {len(self.bad_lines):,} bad lines, the first: {self.bad_lines[0]}" if self.bad_lines else ""
        return TraceError(f"{self.path} has no requests{bad}")


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
