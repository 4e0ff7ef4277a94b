"""What a tier holds from before a restart, taken into its pool portion by portion.

Ranks tell chunks and pieces of checkpoints in the order in which they were written. So a parent comes before its
children, and what hangs below something that is gone is left out; its slots are free, like all that is not taken in.

    chunk                       below its parent, if that is here and the chunk is not
    piece of a checkpoint       kept until all pieces of the checkpoint are known; then the checkpoint below its chunk

A model without prefix groups keeps no slots for chunks, so nothing says what a checkpoint hangs below, and nothing is
taken in.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import CHUNK
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.messages.tier import Found
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


class TakenIn(NamedTuple):
    slot: int
    generation: int


class FoundBefore:
    """Takes what was found into the coordinator's pool, of which all slots are free at first."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._pieces: dict[Hashable, Found] = {}  # by the key of the piece
        self._boundaries: dict[bytes, None] = {}  # keys of chunks whose checkpoint may be complete
        self.chunks = 0
        self._last = self._pool.root  # what was taken in last
        self._touch = self._pool.touch(None)

    def take_in(self, found: Iterable[Found]) -> Iterator[TakenIn]:
        """The slots that are in use now."""
        for each in found:
            if each.label.block == CHUNK:
                yield from self._take_chunk(each)
            else:
                self._pieces[each.label.key, each.label.group, each.label.block] = each
                self._boundaries[each.label.parent] = None
        for boundary in list(self._boundaries):
            yield from self._take_checkpoint(boundary)

    def clear(self) -> None:
        """Forget what is not taken in yet."""
        self._pieces.clear()
        self._boundaries.clear()
        self._last, self._touch = self._pool.root, self._pool.touch(None)

    def _take_chunk(self, found: Found) -> Iterator[TakenIn]:
        key, above = found.label.key, found.label.parent
        parent = self._pool.find(above) if above else self._pool.root
        if parent is None or self._pool.find(key) is not None:
            return
        node = self._claim(found.slots)
        if node is not None:
            self._commit(node, key, parent)
            self.chunks += 1
            yield from (TakenIn(slot, found.label.generation) for slot in found.slots)

    def _take_checkpoint(self, boundary: bytes) -> Iterator[TakenIn]:
        chunk = self._pool.find(boundary)
        if chunk is None:
            return
        depth = self._pool.depth(chunk)
        path = self._pool.path(chunk, self._coordinator.planner.reach(depth))
        tail = tuple(key for key in map(self._pool.key, path) if key is not None)
        needs = self._coordinator.needs(CheckpointAt(depth, tail))
        missing = [need.key for need in self._pool.checkpoints.missing(needs)]
        key = checkpoint_key(boundary)
        if not needs or self._pool.find(key) is not None or any(each not in self._pieces for each in missing):
            return
        found = [self._pieces.pop(each) for each in missing]
        del self._boundaries[boundary]
        node = self._claim([slot for each in found for slot in each.slots], needs)
        if node is not None:
            self._commit(node, key, chunk)
            yield from (TakenIn(slot, each.label.generation) for each in found for slot in each.slots)

    def _claim(self, slots: Sequence[int], needs: Sequence[PieceNeed] | None = None) -> int | None:
        """None where a slot is in use: another copy of the same bytes was taken in before."""
        try:
            return self._pool.claim(slots, needs)
        except MisuseError:
            return None

    def _commit(self, node: int, key: bytes, parent: int) -> None:
        if parent != self._last:
            self._touch = self._pool.touch(None)
        self._pool.commit([node], [key], parent, self._touch)
        self._last = node
