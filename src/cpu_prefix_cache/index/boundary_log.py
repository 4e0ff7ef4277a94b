"""A log of what can be hit: each boundary at which a request could resume from this pool, as it comes and goes.

    commit of the chunks a, b, c                stored a, b, c       where chunks are all that it takes
    one of them is absent from now on           removed it           the pool beside has it: a hit there goes on here
    the same in a model with checkpoints        nothing              no request could resume at any of them yet
    commit of the checkpoint after b            stored b, below a
    that checkpoint is evicted or withdrawn     removed b
    reset                                       removed, everything there was

A boundary is known by the key of the chunk that ends there. The log remembers these keys, since a chunk has lost its
key when it leaves. Replayed from the beginning the log gives exactly the boundaries that can be hit, and no key is
stored or removed twice in a row. Neighbours are in one event.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from cpu_prefix_cache.index.forest import Forest


class BoundariesStored(NamedTuple):
    """The chunk of `keys[0]` hangs below that of `parent_key` (None: it is a first chunk), each further one below the
    one before it. The parent need not be a boundary that can be hit."""

    keys: list[bytes]
    parent_key: bytes | None


class BoundariesRemoved(NamedTuple):
    keys: list[bytes]


BoundaryEvent = BoundariesStored | BoundariesRemoved


class BoundaryLog:
    """Changes of boundaries since the log was last taken. Notified of chunks while or after they are in the forest."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._told: list[bytes] = []  # by chunk: the key under which it was stored last
        self._events: list[BoundaryEvent] = []

    def stored(self, run: Sequence[int]) -> None:
        """After each chunk of `run` a request can resume, from now on. Each is the child of the one before it."""
        all_keys = self._forest.key
        self._told += [b""] * (len(all_keys) - len(self._told))
        keys = [key for chunk in run if (key := all_keys[chunk]) is not None]
        for chunk, key in zip(run, keys, strict=True):
            self._told[chunk] = key
        parent_key = all_keys[self._forest.parent[run[0]]]  # the root has none
        last = self._events[-1] if self._events else None
        if isinstance(last, BoundariesStored) and last.keys[-1] == parent_key:
            last.keys.extend(keys)
        else:
            self._events.append(BoundariesStored(keys, parent_key))

    def removed(self, chunks: Sequence[int]) -> None:
        """After these a request cannot resume any more."""
        self._removed([self._told[chunk] for chunk in chunks])

    def cleared(self, resumable: Iterable[int], forest: Forest) -> None:
        """Nor after any other. By chunk, from the first on: whether a request could. An empty forest is next."""
        self._removed(list(compress(self._told, resumable)))
        self._forest, self._told = forest, []

    def take(self) -> list[BoundaryEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _removed(self, keys: list[bytes]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BoundariesRemoved):
            last.keys.extend(keys)
        elif keys:
            self._events.append(BoundariesRemoved(keys))
