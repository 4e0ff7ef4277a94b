"""Reads traces, files of recorded requests (one JSON object a line, plain or `.gz`), as requests with keys.

There are two kinds of lines, distinguished by their fields:

    Mooncake       timestamp, input_length, hash_ids       ids of blocks, chained: equal id, equal prefix
    request log    timestamp, prompt_token_ids             or token_ids; hashed here, in blocks of 16 tokens

Ids are all integers or all texts, such as digests. How many tokens their blocks have is guessed (`block_tokens_of`).
Timestamps are milliseconds or seconds (`time_unit_of`), lengths are tokens. `output_length` is optional and not used.
Other fields are ignored, and so are token ids beside hash_ids. A line that cannot be a request is malformed. So is one
in which an id follows another id than before, because then equal ids would not mean equal prefixes.

Several traces are one load: they are merged by timestamp, as given. Requests with equal timestamps are ordered by file,
then by line. Ids of different files are unrelated: the key of an id is the digest of the file's number and the id.
Token ids have the same meaning in all files, so request logs share prefixes across files, as in a server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import xxhash

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.model.hashing import ChainHasher
from cpu_prefix_cache.model.prefill_work import Work
from cpu_prefix_cache.replay.lines import (
    BadLine,
    LineReader,
    TraceError,
    is_time,
    length_of,
    list_of,
    parsed_object,
    shown,
)

MOONCAKE_BLOCK_TOKENS = 512
LOG_BLOCK_TOKENS = 16
# Sizes that engines and published traces have; the first is taken where several fit.
LIKELY_BLOCK_TOKENS = (MOONCAKE_BLOCK_TOKENS, 16, 32, 64, 128, 256, 8, 4, 1, 1024, 2048)
UNITS_A_SECOND = {"s": 1, "ms": 1000}
SHORTEST_MS = 600_000  # a span is taken for milliseconds if that makes ten minutes; in seconds it would be a week
SINCE_1970_S, SINCE_1970_MS = 10**9, 10**12  # a day in 2001
TOKEN_FIELDS = ("prompt_token_ids", "token_ids")


class TraceRequest(NamedTuple):
    """A prompt of `tokens` tokens that arrived at `now`, in seconds, with the `keys` of its blocks."""

    now: float
    keys: list[bytes]
    tokens: int


@dataclass
class Trace:
    """Requests in the order in which they are replayed.

    block_tokens     tokens of a block
    bad_lines        for each line that was skipped, what is wrong with it
    odd_lengths      requests with more or fewer blocks than their length requires; if any, that may be wrong
    out_of_order     requests with an earlier timestamp than the one above them in their file
    time_unit        of the timestamps in the files, "s" or "ms"
    guessed_from     if that was guessed, the time from the first to the last timestamp, in this unit
    is_size_guessed  whether block_tokens was guessed from the lengths of prompts and the number of their ids
    """

    paths: list[str]
    block_tokens: int
    requests: list[TraceRequest] = field(default_factory=list)
    bad_lines: list[str] = field(default_factory=list)
    odd_lengths: int = 0
    out_of_order: int = 0
    time_unit: str = "ms"
    guessed_from: float | None = None
    is_size_guessed: bool = False

    @cached_property
    def blocks(self) -> int:
        return sum(len(request.keys) for request in self.requests)

    @cached_property
    def work(self) -> Work:
        """Of computing all prompts."""
        work = Work()
        for request in self.requests:
            work.add(0, request.tokens)
        return work

    @property
    def tokens(self) -> int:
        return self.work.tokens

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
        raise TraceError(
            f"blocks of {sorted(sizes)} tokens cannot share a cache: replay each trace alone, or give --block-tokens"
        )
    requests.sort(key=attrgetter("now"))
    span = requests[-1].now - requests[0].now
    unit = time_unit or time_unit_of(span, requests[0].now)
    trace = Trace(
        paths=list(paths),
        block_tokens=sizes.pop(),
        requests=[request._replace(now=request.now / UNITS_A_SECOND[unit]) for request in requests[:limit]],
        bad_lines=[line for reader in readers for line in reader.lines.bad_lines],
        odd_lengths=sum(reader.odd_lengths for reader in readers),
        out_of_order=sum(reader.out_of_order for reader in readers),
        time_unit=unit,
        guessed_from=span if time_unit is None else None,
        is_size_guessed=any(reader.is_size_guessed for reader in readers),
    )
    if not trace.blocks:
        raise TraceError(f"no request has a whole block of {trace.block_tokens} tokens: nothing can be a hit")
    return trace


def time_unit_of(span: float, first: float = 0) -> str:
    """Guess the unit of timestamps from the difference of the last and the first, and from the first.

    It is milliseconds, as in Mooncake's traces, unless that makes less than ten minutes; also for a difference of 0.
    Timestamps that are large enough count from 1970, and say themselves what they are.

    >>> time_unit_of(3_600_000), time_unit_of(3_600), time_unit_of(0)  # an hour, an hour, nothing
    ('ms', 's', 'ms')
    >>> time_unit_of(3_600_000, 1.7e9), time_unit_of(3_600, 1.7e12)  # 41 days, 4 seconds
    ('s', 'ms')
    """
    if first >= SINCE_1970_S:
        return "s" if first < SINCE_1970_MS else "ms"
    return "s" if 0 < span < SHORTEST_MS else "ms"


def block_tokens_of(prompts: Sequence[tuple[int, int]]) -> int:
    """Guess the tokens of a block from prompts, each given as its tokens and the number of its ids.

    It is the size, of those that are common, that fits most prompts: with the last block that is not full, or without.

    >>> block_tokens_of([(1100, 3), (512, 1)]), block_tokens_of([(1100, 69), (512, 32)]), block_tokens_of([(9, 1)])
    (512, 16, 512)
    """
    return max(LIKELY_BLOCK_TOKENS, key=lambda size: sum(fits(size, *prompt) for prompt in prompts))


def fits(block_tokens: int, tokens: int, blocks: int) -> bool:
    """Whether so many blocks of this size are a prompt of so many tokens, its last block being full or not."""
    return 0 < tokens - (blocks - 1) * block_tokens < 2 * block_tokens


class _FileReader:
    """Reads one file; `now` of its requests is in the file's unit. `sizes` are the block sizes found, in tokens."""

    def __init__(self, path: str, number: int, block_tokens: int | None, skip_bad_lines: bool) -> None:
        self.lines = LineReader(path, skip_bad_lines)
        self._id_tokens = block_tokens
        self._log_tokens = block_tokens or LOG_BLOCK_TOKENS
        self._keys_of_ids = _IdKeys(number)
        self._keys_of_tokens = _TokenKeys(self._log_tokens)
        self._prompts_of_ids: list[tuple[int, int]] = []
        self.sizes: set[int] = set()
        self.is_size_guessed = False
        self.odd_lengths = 0
        self.out_of_order = 0

    def read(self) -> list[TraceRequest]:
        requests: list[TraceRequest] = []
        for number, line in enumerate(self.lines.lines(), 1):
            try:
                requests.append(self._request(line))
            except BadLine as error:
                self.lines.refuse(number, error)
        if not requests:
            raise self.lines.nothing_found()
        if self._prompts_of_ids:
            self._find_size(self._prompts_of_ids)
        self.out_of_order = sum(one.now > next.now for one, next in pairwise(requests))
        return requests

    def _find_size(self, prompts: Sequence[tuple[int, int]]) -> None:
        self.is_size_guessed = self._id_tokens is None
        size = self._id_tokens or block_tokens_of(prompts)
        self.sizes.add(size)
        self.odd_lengths = sum(not fits(size, *prompt) for prompt in prompts)

    def _request(self, line: bytes) -> TraceRequest:
        values = parsed_object(line)
        now = _timestamp(values)
        length_of(values, "output_length", default=0)
        if "hash_ids" in values:
            return self._of_ids(now, values)
        for name in TOKEN_FIELDS:
            if name in values:
                return self._of_tokens(now, name, list_of(values, name, [int], "integers"))
        raise BadLine(
            f"it has neither hash_ids nor {' nor '.join(TOKEN_FIELDS)}; `convert` reads texts and logs of engines"
        )

    def _of_ids(self, now: float, values: dict[str, Any]) -> TraceRequest:
        tokens = length_of(values, "input_length", least=1)
        keys = self._keys_of_ids.keys(list_of(values, "hash_ids", [int, str], "integers, or of texts"))
        self._prompts_of_ids.append((tokens, len(keys)))
        return TraceRequest(now, keys, tokens)

    def _of_tokens(self, now: float, name: str, tokens: list[int]) -> TraceRequest:
        if not tokens:
            raise BadLine(f"{name} is empty: a prompt has at least one token")
        keys = self._keys_of_tokens.keys(tokens)
        self.sizes.add(self._log_tokens)
        return TraceRequest(now, keys, len(tokens))


Id = int | str


class _IdKeys:
    """The keys of one file's ids; equal ids get the same object. Remembers which id each id follows."""

    def __init__(self, file_number: int) -> None:
        self._file_number = file_number
        self._keys: dict[Id, bytes] = {}
        self._above: dict[Id, Id | None] = {}

    def keys(self, ids: Sequence[Id]) -> list[bytes]:
        if len(set(ids)) < len(ids):
            raise BadLine("hash_ids names a block twice: its ids are not chained")
        follows = list(zip([None, *ids], ids, strict=False))
        for above, id in follows:
            if self._above.get(id, above) != above:
                here, before = (_place(id) for id in (above, self._above[id]))
                raise BadLine(f"id {id} {here} here and {before} before: its ids are not chained")
        self._above.update((id, above) for above, id in follows)
        return [self._keys.get(id) or self._new_key(id) for id in ids]

    def _new_key(self, id: Id) -> bytes:
        key = self._keys[id] = xxhash.xxh3_128_digest(f"{self._file_number}/{id!r}".encode())
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
            raise BadLine(str(error)) from error


def _timestamp(values: dict[str, Any]) -> float:
    if not is_time(values.get("timestamp")):
        raise BadLine(f"timestamp must be a number of seconds or ms, 0 or more, got {shown(values, 'timestamp')}")
    return float(values["timestamp"])


def _place(above: Id | None) -> str:
    return "begins a prompt" if above is None else f"follows {above}"
