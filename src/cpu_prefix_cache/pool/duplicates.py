"""Duplicates: cached chunks that the pool beside has, too.

    add      (none) -> leaving    the pool beside has it: it leaves first, after those that are leaving already
    victims  leaving -> (none)    it leaves
    victims  leaving -> kept      its turn has come, but what only this pool has hangs below it, within the overlap
    forget   (any) -> (none)      the pool beside has evicted it, or it is no cached chunk any more

Without room for it nothing is lost but the store that brings it back; scarcity.py has when that is worth it.
"""

from collections.abc import Collection, Iterable, KeysView, Sequence, Set

from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.pool.scarcity import Scarcity
from cpu_prefix_cache.pool.states import CACHED


class Duplicates:
    """The duplicates of a pool with this forest and these states of nodes. They leave in the order of their adding.
    `overlap` is that of `Beside`, and `scarcity` whether they leave before all others.
    """

    def __init__(self, forest: Forest, state: bytearray, overlap: int, scarcity: Scarcity) -> None:
        self._forest = forest
        self._state = state
        self._overlap = overlap
        self.scarcity = scarcity
        self._leaving: dict[int, None] = {}
        self._kept: set[int] = set()

    def __len__(self) -> int:
        """How many leave first."""
        return len(self._leaving)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._leaving or chunk in self._kept

    @property
    def leaving(self) -> KeysView[int]:
        """Duplicates that leave first."""
        return self._leaving.keys()

    def add(self, chunks: Iterable[int]) -> None:
        """The pool beside has these, too. Those that are not cached are passed over."""
        state = self._state
        cached = [chunk for chunk in chunks if state[chunk] == CACHED]
        self.forget(cached)
        self._leaving.update(dict.fromkeys(cached))

    def add_above(self, chunk: int) -> None:
        """A request has used this chunk in the pool beside, and all above it. They are added from there on up to one
        that leaves first or is absent: above that nothing has left the pool beside since.
        """
        while chunk != self._forest.root and self._state[chunk] == CACHED and chunk not in self._leaving:
            self._kept.discard(chunk)
            self._leaving[chunk] = None
            chunk = self._forest.parent[chunk]

    def forget(self, chunks: Sequence[int]) -> None:
        """These have left the pool beside, or are not cached any more."""
        self._kept.difference_update(chunks)
        for chunk in self._leaving.keys() & chunks:
            del self._leaving[chunk]

    def victims(self, count: int) -> list[int]:
        """Take the next `count` that no pin protects and that are not to be kept, or fewer."""
        kept, victims = list[int](), list[int]()
        for chunk in self._leaving:
            if len(victims) >= count:
                break
            if not self._forest.pins.protected_among((chunk,)):
                (kept if self._has_more_below(chunk, self._overlap, ()) else victims).append(chunk)
        for chunk in (*kept, *victims):
            del self._leaving[chunk]
        self._kept.update(kept)
        return victims

    def needed(self, chunks: Sequence[int]) -> Set[int]:
        """Cached chunks, of these, that have to stay if the others leave for the pool beside."""
        read = frozenset(chunks)
        above = {each for each in chunks if self._has_more_below(each, self._overlap, read)} if self._overlap else set()
        return self._forest.pins.protected_among(read) | above

    def _has_more_below(self, chunk: int, levels: int, read: Collection[int]) -> bool:
        """Whether one that only this pool has hangs below, at most so many levels down."""
        for child in self._forest.children(chunk) if levels else ():
            is_here_alone = self._state[child] == CACHED and child not in self and child not in read
            if is_here_alone or self._has_more_below(child, levels - 1, read):
                return True
        return False

    def check_valid(self) -> None:
        """Assert that each stands in one place and is cached. For tests."""
        assert self._kept.isdisjoint(self._leaving), "a duplicate is kept and leaves first"
        assert all(self._state[chunk] == CACHED for chunk in (*self._leaving, *self._kept)), "a duplicate is not cached"
