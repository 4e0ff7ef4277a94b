"""Reads one file of a trace: its rows, the keys of their blocks, and facts about all of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cpu_prefix_cache.tools.replay.lines import (
    BadLine,
    LineReader,
    TraceError,
    is_time,
    length_of,
    list_of,
    parsed_object,
    shown,
)
from cpu_prefix_cache.tools.replay.request_outcomes import is_failed
from cpu_prefix_cache.tools.replay.sharing import Apart, ApartHasher, apart_of
from cpu_prefix_cache.tools.replay.trace_guesses import LOG_BLOCK_TOKENS, block_tokens_of, fits
from cpu_prefix_cache.tools.replay.trace_keys import CONTENT, ContentKeys, IdKeys, NotChainedError
from cpu_prefix_cache.tools.replay.trace_rows import REQUESTS, RowReader, TraceRow

TOKEN_FIELDS = ("prompt_token_ids", "token_ids")
ROW_FIELDS = ("hash_ids", *TOKEN_FIELDS, REQUESTS)  # a row has one of them
NOT_CHAINED = "its ids are not chained (--ids content reads ids of each block's content alone)"


class TraceRequest(NamedTuple):
    """A prompt of `tokens` tokens that arrived at `now`, in seconds, with the `keys` of its blocks.

    `next_use` is its hint, if requests are replayed with hints (hints.py).
    """

    now: float
    keys: list[bytes]
    tokens: int
    next_use: float | None = None


class TraceFile:
    """Reads one file. `sizes` are the block sizes found, in tokens.

    unit    of `now` of its requests, where the format of the file fixes it
    """

    def __init__(self, path: str, number: int, block_tokens: int | None, ids: str, skip_bad_lines: bool) -> None:
        self.lines = LineReader(path, skip_bad_lines)
        self._number, self._ids = number, ids
        self._id_tokens = block_tokens
        self._stated: set[int] = set()  # tokens of a block, where rows have them
        self._log_tokens = block_tokens or LOG_BLOCK_TOKENS
        self._rows = RowReader()
        self._keys_of_ids: dict[tuple[str, Apart], IdKeys | ContentKeys] = {}
        self._hasher = ApartHasher(self._log_tokens)
        self._known: dict[bytes, bytes] = {}  # keys of token ids, each one object
        self._prompts_of_ids: list[tuple[int, int]] = []
        self._turns: dict[str, list[bytes]] = {}
        self.aparts: set[Apart] = set()
        self.sizes: set[int] = set()
        self.unit: str | None = None
        self.is_size_guessed = False
        self.odd_lengths = self.out_of_order = self.failed = self.delayed = self.turns_anew = 0

    def read(self) -> list[TraceRequest]:
        requests: list[TraceRequest] = []
        for number, part in enumerate(self.lines.parts(), 1):
            try:
                rows = list(self._rows.rows(number, part if isinstance(part, dict) else parsed_object(part)))
            except BadLine as error:
                self.lines.refuse(number, error)
                continue
            for row in rows:
                self._add(requests, number, row)
        if not requests:
            raise self.lines.nothing_found(self.failed)
        if self._prompts_of_ids:
            self._find_size(self._prompts_of_ids)
        self.out_of_order = sum(one.now > next.now for one, next in pairwise(requests))
        return requests

    def _add(self, requests: list[TraceRequest], number: int, row: TraceRow) -> None:
        if is_failed(row.fields):
            self.failed += 1
            return
        try:
            request = self._request(row)
        except BadLine as error:
            self.lines.refuse(number, error)
            return
        except NotChainedError as error:
            raise TraceError(f"{self.lines.path}, line {number}: {error}: {NOT_CHAINED}") from error
        requests.append(request)
        self.unit = row.unit or self.unit
        self.delayed += row.is_delayed
        if "session_id" in row.fields:
            session = str(row.fields["session_id"])
            before = self._turns.get(session, [])[:-1]  # its last block may not have been full
            self.turns_anew += request.keys[: len(before)] != before
            self._turns[session] = request.keys

    def _find_size(self, prompts: Sequence[tuple[int, int]]) -> None:
        known = {self._id_tokens} if self._id_tokens else self._stated
        self.is_size_guessed = not known
        sizes = known or {block_tokens_of(prompts)}
        self.sizes |= sizes
        self.odd_lengths = sum(not any(fits(size, *prompt) for size in sizes) for prompt in prompts)

    def _request(self, row: TraceRow) -> TraceRequest:
        values = row.fields
        now = _timestamp(values)
        length_of(values, "output_length", default=0)
        apart = apart_of(values)
        self.aparts.add(apart)
        if "hash_ids" in values:
            return self._of_ids(now, row, apart)
        for name in TOKEN_FIELDS:
            if name in values:
                return self._of_tokens(now, name, list_of(values, name, [int], "integers"), apart)
        raise BadLine(
            f"it has neither hash_ids nor {' nor '.join(TOKEN_FIELDS)}; `convert` reads texts and logs of engines"
        )

    def _of_ids(self, now: float, row: TraceRow, apart: Apart) -> TraceRequest:
        tokens = length_of(row.fields, "input_length", least=1)
        ids = list_of(row.fields, "hash_ids", [int, str], "integers, or of texts")
        known = self._keys_of_ids
        if (row.scope, apart) not in known:
            make = ContentKeys if self._ids == CONTENT else IdKeys
            known[row.scope, apart] = make("/".join(map(str, [self._number, *filter(None, (row.scope, apart))])))
        keys = known[row.scope, apart].keys(ids)
        if row.block_tokens is not None:
            self._stated.add(row.block_tokens)
        self._prompts_of_ids.append((tokens, len(keys)))
        return TraceRequest(now, keys, tokens)

    def _of_tokens(self, now: float, name: str, tokens: list[int], apart: Apart) -> TraceRequest:
        if not tokens:
            raise BadLine(f"{name} is empty: a prompt has at least one token")
        keys = [self._known.setdefault(key, key) for key in self._hasher.keys(tokens, apart)]
        self.sizes.add(self._log_tokens)
        return TraceRequest(now, keys, len(tokens))


def _timestamp(values: dict[str, Any]) -> float:
    if not is_time(values.get("timestamp")):
        raise BadLine(f"timestamp must be a number of seconds or ms, 0 or more, got {shown(values, 'timestamp')}")
    return float(values["timestamp"])
