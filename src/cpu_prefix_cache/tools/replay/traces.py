"""Reads traces, files of recorded requests in JSON, plain or `.gz`, as requests with keys.

There are two kinds of rows, distinguished by their fields (trace_rows.py has other names for them):

    Mooncake       timestamp, input_length, hash_ids       ids of blocks, chained: equal id, equal prefix
    request log    timestamp, prompt_token_ids             or token_ids; hashed here, in blocks of 16 tokens

Ids are all integers or all texts, such as digests. How many tokens their blocks have is guessed (`block_tokens_of`).
Timestamps are milliseconds or seconds (`time_unit_of`), lengths are tokens. `output_length` is optional and not used.
Other fields are ignored, and so are token ids beside hash_ids. Prompts of different models, adapters or salts share
nothing (sharing.py). A row that cannot be a request is malformed. If an id follows another id than before, equal ids do
not mean equal prefixes, and the whole trace is refused: a part of it would have another hit ratio.

Several traces are one load: they are merged by timestamp, as given. Requests with equal timestamps are ordered by file,
then by line. Ids of different files are unrelated: the key of an id is the digest of the file's number and the id.
Token ids have the same meaning in all files, so request logs share prefixes across files, as in a server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter

from cpu_prefix_cache.tools.replay.lines import TraceError
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.sharing import Apart
from cpu_prefix_cache.tools.replay.trace_file import TraceFile, TraceRequest
from cpu_prefix_cache.tools.replay.trace_guesses import UNITS_A_SECOND, time_unit_of
from cpu_prefix_cache.tools.replay.trace_keys import CHAINED

__all__ = ["Trace", "TraceError", "TraceRequest", "read_traces"]


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
    aparts           what keeps prompts apart (sharing.py): the different values of it
    failed           requests that failed, and are left out
    delayed          requests whose time was computed from their delay after the one before
    turns_anew       requests of a session that do not begin like the one before them
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
    aparts: set[Apart] = field(default_factory=set)
    failed: int = 0
    delayed: int = 0
    turns_anew: int = 0

    @cached_property
    def blocks(self) -> int:
        return sum(len(request.keys) for request in self.requests)

    @cached_property
    def work(self) -> Work:
        """Work of computing all prompts."""
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
    ids: str = CHAINED,
) -> Trace:
    """Read and merge traces; keep the first `limit` requests in order of time.

    `time_unit` is "s" or "ms"; if not given, it is that of the file's format, or guessed once for all files
    (`time_unit_of`). `ids` of blocks are "chained", or of each block's "content".

    Raises TraceError for a file that cannot be read or has no requests, for files with blocks of different sizes if
    `block_tokens` is not given, if no request has a whole block, for ids that should be chained and are not, and for
    the first malformed line unless `skip_bad_lines`.
    """
    readers = [TraceFile(path, number, block_tokens, ids, skip_bad_lines) for number, path in enumerate(paths)]
    read = [(reader, reader.read()) for reader in readers]
    sizes = {size for reader in readers for size in reader.sizes}
    if len(sizes) > 1:
        raise TraceError(
            f"blocks of {sorted(sizes)} tokens cannot share a cache: replay each trace alone, or give --block-tokens"
        )
    times = [request.now for reader, requests in read if reader.unit is None for request in requests]
    span = max(times) - min(times) if times else None
    unit = time_unit or ("s" if span is None else time_unit_of(span, min(times)))
    in_seconds = [
        request._replace(now=request.now / UNITS_A_SECOND[time_unit or reader.unit or unit])
        for reader, requests in read
        for request in requests
    ]
    in_seconds.sort(key=attrgetter("now"))
    trace = Trace(
        paths=list(paths),
        block_tokens=sizes.pop(),
        requests=in_seconds[:limit],
        bad_lines=[line for reader in readers for line in reader.lines.bad_lines],
        odd_lengths=sum(reader.odd_lengths for reader in readers),
        out_of_order=sum(reader.out_of_order for reader in readers),
        time_unit=unit,
        guessed_from=span if time_unit is None else None,
        is_size_guessed=any(reader.is_size_guessed for reader in readers),
        aparts={apart for reader in readers for apart in reader.aparts},
        failed=sum(reader.failed for reader in readers),
        delayed=sum(reader.delayed for reader in readers),
        turns_anew=sum(reader.turns_anew for reader in readers),
    )
    if not trace.blocks:
        raise TraceError(f"no request has a whole block of {trace.block_tokens} tokens: nothing can be a hit")
    return trace
