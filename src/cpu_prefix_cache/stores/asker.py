"""Queries a shared store, in a thread of its own, in the order in which requests came.

Prompts share their beginnings and part then, and after a missing chunk all are missing. So chunks are queried in
portions, each twice as large as the one before, until one of them is not there. Then, in models that have checkpoints,
for their pieces in the chunks that are.

A query that nobody waits for any more is dropped. An answer that comes too late for its request is reported all the
same.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from cpu_prefix_cache.messages.plan import CHUNK
from cpu_prefix_cache.messages.tier import Ask, TierPlan, TierReport, Told
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.stores.frame import Names
from cpu_prefix_cache.stores.keyed_store import KeyedStore

logger = logging.getLogger(__name__)

FIRST_PORTION = 16  # chunks
CALL_SECONDS = 0.25  # for one call: longer than any request waits, and short enough to see a server come back
NAMES_AT_ONCE = 4096  # to a call


class Asker:
    """`names` gives the names of what may be read now; `pieces` are the planner's. One thread calls it."""

    def __init__(self, store: KeyedStore, names: Callable[[], Names], pieces: Sequence[Piece]) -> None:
        self._store, self._names, self._pieces = store, names, pieces
        self._in_chunk = [
            (at, place) for at, piece in enumerate(pieces) if piece.in_chunk for place in range(piece.host_blocks)
        ]
        self._beside = [at for at, piece in enumerate(pieces) if not piece.in_chunk]
        self._asks = SimpleQueue[Ask | None]()
        self._told: dict[int, Told] = {}
        self._told_below = 0
        self._last = self._done = -1  # asks, in the order of their numbers
        self._thread = threading.Thread(target=self._run, daemon=True, name="store-asker")
        self._thread.start()

    def begin(self, plan: TierPlan) -> None:
        self._told_below = plan.told_below
        for id in list(self._told):  # at once: the thread may be adding to it
            if id < plan.told_below:
                del self._told[id]
        for ask in plan.asks:
            self._asks.put(ask)
            self._last = ask.id

    def told(self, report: TierReport) -> TierReport:
        return report._replace(told=tuple(self._told.copy().values()), heard=self._last + 1)

    @property
    def is_busy(self) -> bool:
        return self._done != self._last

    def close(self) -> None:
        """The call that is under way ends by its timeout, or when the store is closed."""
        self._asks.put(None)

    def _run(self) -> None:
        while (ask := self._asks.get()) is not None:
            if ask.id >= self._told_below:
                self._told[ask.id] = self._answer(ask)
            self._done = ask.id

    def _answer(self, ask: Ask) -> Told:
        try:
            names = self._names()
            if not ask.keys:
                self._store.exists([names.of_nothing], CALL_SECONDS)
                return Told(ask.id, ok=True)
            chunks = self._num_chunks(ask, names)
            return Told(ask.id, True, chunks, tuple(self._pieces_there(ask, chunks, names)))
        except BaseException as error:  # whatever a store raises, its request computes
            logger.warning("the store could not be asked: %s", error)
            return Told(ask.id, ok=False)

    def _num_chunks(self, ask: Ask, names: Names) -> int:
        """How many chunks, from the first on, are there with all that a chunk has."""
        begin, count = 0, FIRST_PORTION
        while begin < len(ask.keys) and self._in_chunk:
            portion = ask.keys[begin : begin + count]
            there = self._exist([names.of(key, *each, CHUNK) for key in portion for each in self._in_chunk])
            if False in there:
                return begin + there.index(False) // len(self._in_chunk)
            begin, count = begin + count, count * 2
        return len(ask.keys)

    def _pieces_there(self, ask: Ask, chunks: int, names: Names) -> Iterator[tuple[bytes, int, int]]:
        pieces = list(self._pieces_in(ask, chunks))
        named = [
            (at, names.of(key, group, place, block))
            for at, (key, group, block) in enumerate(pieces)
            for place in range(self._pieces[group].host_blocks)
        ]
        there = self._exist([name for _, name in named])
        missing = {at for (at, _), is_there in zip(named, there, strict=True) if not is_there}
        return (piece for at, piece in enumerate(pieces) if at not in missing)

    def _pieces_in(self, ask: Ask, chunks: int) -> Iterator[tuple[bytes, int, int]]:
        """The pieces that a checkpoint at the end of a chunk has in that chunk: those of later ones are among them."""
        for at, key in enumerate(ask.keys[:chunks]):
            boundary = (ask.depth + at + 1) * ask.grid_tokens
            for group in self._beside:
                needed, width = self._pieces[group].group.needed(boundary), self._pieces[group].group.block_tokens
                first = (boundary - ask.grid_tokens) // width
                for block in needed[bisect_left(needed, first) :]:
                    yield key, group, block - first

    def _exist(self, names: Sequence[str]) -> list[bool]:
        there: list[bool] = []
        for begin in range(0, len(names), NAMES_AT_ONCE):
            there += self._store.exists(names[begin : begin + NAMES_AT_ONCE], CALL_SECONDS)
        return there
