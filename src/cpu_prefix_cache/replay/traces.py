"""Reads traces, files of recorded requests (one JSON object a line, plain or `.gz`), as requests with keys.

There are two kinds of lines, distinguished by their fields:

    Mooncake       timestamp, input_length, hash_ids       ids of blocks of 512 tokens, chained: equal id, equal prefix
    request log    timestamp, prompt_token_ids             or token_ids; hashed here, in blocks of 16 tokens

Timestamps are milliseconds or seconds (`time_unit_of`), lengths are tokens. `output_length` is optional and not used.
Other fields are ignored, and so are token ids beside hash_ids. A line that cannot be a request is malformed. So is one
in which an id follows another id than before, because then equal ids would not mean equal prefixes.

Several traces are one load: they are merged by timestamp, as given. Requests with equal timestamps are ordered by file,
then by line. Ids of different files are unrelated: the key of an id is the digest of the file's number and the id.
Token ids have the same meaning in all files, so request logs share prefixes across files, as in a server.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import xxhash

from cpu_prefix_cache.messages.errors import MisuseError, PrefixCacheError
from cpu_prefix_cache.model.hashing import ChainHasher

MOONCAKE_BLOCK_TOKENS = 512
LOG_BLOCK_TOKENS = 16
NO_TIME = 2**63  # timestamps must be less, in any unit
UNITS_A_SECOND = {"s": 1, "ms": 1000}
SHORTEST_MS = 600_000  # a span is taken for milliseconds if that makes ten minutes; in seconds it would be a week
TOKEN_FIELDS = ("prompt_token_ids", "token_ids")


class TraceError(PrefixCacheError):
    """A trace cannot be read. The operator corrects the file, or skips its bad lines."""


class TraceRequest(NamedTuple):
    """A prompt of `tokens` tokens that arrived at `now`, in seconds, with the `keys` of its blocks."""

    now: float
    keys: list[bytes]
    tokens: int


@dataclass
class Trace:
    """Requests in the order in which they are replayed.

    block_tokens   tokens of a block
    bad_lines      for each line that was skipped, what is wrong with it
    odd_lengths    requests with more or fewer blocks than their length requires; if not 0, `block_tokens` may be wrong
    out_of_order   requests with an earlier timestamp than the one above them in their file
    time_unit      of the timestamps in the files, "s" or "ms"
    guessed_from   if that was guessed, the time from the first to the last timestamp, in this unit
    """

    paths: list[str]
    block_tokens: int
    requests: list[TraceRequest] = field(default_factory=list)
    bad_lines: list[str] = field(default_factory=list)
    odd_lengths: int = 0
    out_of_order: int = 0
    time_unit: str = "ms"
    guessed_from: float | None = None

    @cached_property
    def blocks(self) -> int:
        return sum(len(request.keys) for request in self.requests)

    @cached_property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @cached_property
    def different_blocks(self) -> int:
        return len(set(chain.from_iterable(request.keys for request in self.requests)))

    def usable(self, capacity: int) -> int:
        """As many of `capacity` blocks as this trace can fill. More blocks would not change the replay."""
        return min(capacity, max(1, self.different_blocks))


def read_traces(
    paths: Sequence[str],
    *,
    block_tokens: int | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
    time_unit: str | None = None,
) -> Trace:
    """Read and merge traces; keep the first `limit` requests in order of time.

    `time_unit` is "s" or "ms"; if not given, it is guessed once for all files (`time_unit_of`).

    Raises TraceError for a file that cannot be read or has no requests, for files with blocks of different sizes if
    `block_tokens` is not given, if no request has a whole block, and for the first malformed line unless
    `skip_bad_lines`.
    """
    readers = [_FileReader(path, number, block_tokens, skip_bad_lines) for number, path in enumerate(paths)]
    requests = [request for reader in readers for request in reader.read()]
    sizes = {size for reader in readers for size in reader.sizes}
    if len(sizes) > 1:
        raise TraceError(f"blocks of {sorted(sizes)} tokens cannot share a cache: replay each trace alone")
    requests.sort(key=attrgetter("now"))
    span = requests[-1].now - requests[0].now
    unit = time_unit or time_unit_of(span)
    trace = Trace(
        paths=list(paths),
        block_tokens=sizes.pop(),
        requests=[request._replace(now=request.now / UNITS_A_SECOND[unit]) for request in requests[:limit]],
        bad_lines=[line for reader in readers for line in reader.bad_lines],
        odd_lengths=sum(reader.odd_lengths for reader in readers),
        out_of_order=sum(reader.out_of_order for reader in readers),
        time_unit=unit,
        guessed_from=span if time_unit is None else None,
    )
    if not trace.blocks:
        raise TraceError(f"no request has a whole block of {trace.block_tokens} tokens: nothing can be a hit")
    return trace


def time_unit_of(span: float) -> str:
    """Guess the unit of timestamps from the difference of the last and the first.

    It is milliseconds, as in Mooncake's traces, unless that makes less than ten minutes; also for a difference of 0.

    >>> time_unit_of(3_600_000), time_unit_of(3_600), time_unit_of(0)  # an hour, an hour, nothing
    ('ms', 's', 'ms')
    """
    return "s" if 0 < span < SHORTEST_MS else "ms"


class _BadLine(Exception):
    """What is wrong with a line, without its file and number."""


class _FileReader:
    """Reads one file; `now` of its requests is in the file's unit. `sizes` are the block sizes found, in tokens."""

    def __init__(self, path: str, number: int, block_tokens: int | None, skip_bad_lines: bool) -> None:
        self._path = path
        self._skip = skip_bad_lines
        self._id_tokens = block_tokens or MOONCAKE_BLOCK_TOKENS
        self._log_tokens = block_tokens or LOG_BLOCK_TOKENS
        self._keys_of_ids = _IdKeys(number)
        self._keys_of_tokens = _TokenKeys(self._log_tokens)
        self.sizes: set[int] = set()
        self.bad_lines: list[str] = []
        self.odd_lengths = 0
        self.out_of_order = 0

    def read(self) -> list[TraceRequest]:
        requests: list[TraceRequest] = []
        for number, line in enumerate(self._lines(), 1):
            try:
                requests.append(self._request(line))
            except _BadLine as error:
                complaint = f"{self._path}, line {number}: {error}"
                if not self._skip:
                    raise TraceError(f"{complaint} (--skip-bad-lines goes on without such lines)") from error
                self.bad_lines.append(complaint)
        if not requests:
            bad = f", and {len(self.bad_lines):,} bad lines, the first: {self.bad_lines[0]}" if self.bad_lines else ""
            raise TraceError(f"{self._path} has no requests{bad}")
        self.out_of_order = sum(one.now > next.now for one, next in pairwise(requests))
        return requests

    def _lines(self) -> Iterator[bytes]:
        """The lines of the file, without empty ones at its end."""
        try:
            with _open(self._path) as file:
                empty = 0
                for line in file:
                    if not line.strip():
                        empty += 1
                        continue
                    yield from [b""] * empty
                    empty = 0
                    yield line
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TraceError(f"{self._path} cannot be read: {reason}") from error

    def _request(self, line: bytes) -> TraceRequest:
        values = _parsed(line)
        now = _timestamp(values)
        _length(values, "output_length", default=0)
        if "hash_ids" in values:
            return self._of_ids(now, values)
        for name in TOKEN_FIELDS:
            if name in values:
                return self._of_tokens(now, name, _integers(values, name))
        raise _BadLine(f"it has neither hash_ids nor {' nor '.join(TOKEN_FIELDS)}")

    def _of_ids(self, now: float, values: dict[str, Any]) -> TraceRequest:
        tokens = _length(values, "input_length", least=1)
        keys = self._keys_of_ids.keys(_integers(values, "hash_ids"))
        self.sizes.add(self._id_tokens)
        self.odd_lengths += not 0 < tokens - (len(keys) - 1) * self._id_tokens < 2 * self._id_tokens
        return TraceRequest(now, keys, tokens)

    def _of_tokens(self, now: float, name: str, tokens: list[int]) -> TraceRequest:
        if not tokens:
            raise _BadLine(f"{name} is empty: a prompt has at least one token")
        keys = self._keys_of_tokens.keys(tokens)
        self.sizes.add(self._log_tokens)
        return TraceRequest(now, keys, len(tokens))


class _IdKeys:
    """The keys of one file's ids; equal ids get the same object. Remembers which id each id follows."""

    def __init__(self, file_number: int) -> None:
        self._file_number = file_number
        self._keys: dict[int, bytes] = {}
        self._above: dict[int, int | None] = {}

    def keys(self, ids: list[int]) -> list[bytes]:
        if len(set(ids)) < len(ids):
            raise _BadLine("hash_ids names a block twice: its ids are not chained")
        follows = list(zip([None, *ids], ids, strict=False))
        for above, id in follows:
            if self._above.get(id, above) != above:
                here, before = (_place(id) for id in (above, self._above[id]))
                raise _BadLine(f"id {id} {here} here and {before} before: its ids are not chained")
        self._above.update((id, above) for above, id in follows)
        return [self._keys.get(id) or self._new_key(id) for id in ids]

    def _new_key(self, id: int) -> bytes:
        key = self._keys[id] = xxhash.xxh3_128_digest(f"{self._file_number}/{id}".encode())
        return key


class _TokenKeys:
    """The keys of token ids, hashed as an engine does. Equal keys are one object, which saves memory."""

    def __init__(self, block_tokens: int) -> None:
        self._hasher = ChainHasher(chunk_tokens=block_tokens)
        self._known: dict[bytes, bytes] = {}

    def keys(self, tokens: list[int]) -> list[bytes]:
        try:
            return [self._known.setdefault(key, key) for key in self._hasher.keys(tokens)]
        except MisuseError as error:
            raise _BadLine(str(error)) from error


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if Path(path).suffix == ".gz" else open(path, "rb")


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"it is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _BadLine("it is not a JSON object")
    return values


def _timestamp(values: dict[str, Any]) -> float:
    value = values.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < NO_TIME:
        raise _BadLine(f"timestamp must be a number of seconds or ms, 0 or more, got {_shown(values, 'timestamp')}")
    return float(value)


def _length(values: dict[str, Any], name: str, default: int | None = None, least: int = 0) -> int:
    value = values.get(name, default)
    if type(value) is not int or value < least:
        raise _BadLine(f"{name} must be a number of tokens of at least {least}, got {_shown(values, name)}")
    return value


def _integers(values: dict[str, Any], name: str) -> list[int]:
    value = values[name]
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise _BadLine(f"{name} must be a list of integers")
    return value


def _place(above: int | None) -> str:
    return "begins a prompt" if above is None else f"follows {above}"


def _shown(values: dict[str, Any], name: str) -> str:
    return json.dumps(values[name])[:40] if name in values else "nothing"
