"""The latest prompt of each session, which a hint names when it is to come again.

    a request with a `session_id` ends     its keys are those of the session
    a hint names the session               found: the tier may read ahead what it has under these keys

A session has the `cache_salt` of its requests, and a hint those of other requests: with another salt it is not found.
A key of sha256 takes 90 bytes with its place in the list (resident memory, CPython 3.11), so all of them 94 MB; of the
sessions that ended longest ago none are kept.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request

from connector.vllm import versions
from connector.vllm.keys import ChunkKeys

MOST_HASHES = 1 << 20
ACCEPTED, UNKNOWN, MALFORMED = OUTCOMES = ("accepted", "unknown", "malformed")


class Sessions:
    """`counts` is of hints, by what came of them."""

    def __init__(self, hashes_per_chunk: int) -> None:
        self._each = hashes_per_chunk
        self._hashes = OrderedDict[tuple[str, str | None], Sequence[bytes]]()
        self._kept = 0
        self.counts = dict.fromkeys(OUTCOMES, 0)

    def ended(self, request: Request) -> None:
        session = versions.session_of(request)
        # nothing of a session of streaming input is stored, nor of a prompt without a whole block
        if session is None or request.resumable or not request.block_hashes:
            return
        of = session, request.cache_salt
        self._kept += len(request.block_hashes) - len(self._hashes.pop(of, ()))
        self._hashes[of] = request.block_hashes
        while self._kept > MOST_HASHES:
            self._kept -= len(self._hashes.popitem(last=False)[1])

    def keys(self, session: Any, by: Request) -> Sequence[bytes] | None:
        """The keys of the session that a hint of request `by` names, which may be anything. None: there is none."""
        hashes = self._hashes.get((session, by.cache_salt)) if isinstance(session, str) else None
        self.counts[MALFORMED if not isinstance(session, str) else UNKNOWN if hashes is None else ACCEPTED] += 1
        return None if hashes is None else ChunkKeys.of(hashes, self._each)
