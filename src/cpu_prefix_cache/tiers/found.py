"""Slots of a tier from before a restart, taken into its pool portion by portion.

Ranks report chunks and pieces of checkpoints in the order in which they were written. So a parent comes before its
children, and what hangs below something that is gone is left out; its slots are free, like all that is not taken in.

    chunk                       below its parent, if that is here and the chunk is not
    piece of a checkpoint       kept until all pieces of the checkpoint are known; then the checkpoint below its chunk

A model without prefix groups keeps no slots for chunks, so the parent of a checkpoint is unknown, and nothing is
taken in.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import CHUNK
from cpu_prefix_cache.messages.tier import Found
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


class FoundBefore:
    """Takes what was found into the coordinator's pool, of which all slots are free at first."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._pieces: dict[Hashable, Found] = {}  # by the key of the piece
        self.chunks = 0

    def take_in(self, found: Iterable[Found]) -> Iterator[tuple[int, int]]:
        """The slots that are in use now, each with its generation."""
        run: list[Found] = []  # each the child of the one before it
        boundaries: dict[bytes, None] = {}  # keys of chunks whose checkpoint may be complete with this portion
        for each in found:
            if each.label.block != CHUNK:
                self._pieces[each.label.key, each.label.group, each.label.block] = each
                boundaries[each.label.parent] = None
                continue
            if run and each.label.parent != run[-1].label.key:
                yield from self._take_run(run)
                run = []
            run.append(each)
        yield from self._take_run(run)
        for boundary in boundaries:
            yield from self._take_checkpoint(boundary)

    def clear(self) -> None:
        """Forget what is not taken in yet."""
        self._pieces.clear()

    def _take_run(self, run: Sequence[Found]) -> Iterator[tuple[int, int]]:
        """Takes in a run. Nodes that are here already, from another slot, are left out: the rest hangs below them."""
        new = [each for each in run if self._pool.find(each.label.key) is None]  # its end: above what is here, all is
        if not new:
            return
        above = new[0].label.parent
        parent = self._pool.find(above) if above else self._pool.root
        if parent is None:
            return
        try:
            nodes = self._pool.claim([each.slots for each in new])
        except MisuseError:  # a slot is in use: what it held is written over
            if len(new) > 1:
                for each in new:
                    yield from self._take_run([each])
            return
        self._pool.commit(nodes, [each.label.key for each in new], parent, self._pool.touch(None))
        self.chunks += len(new)
        yield from ((slot, each.label.generation) for each in new for slot in each.slots)

    def _take_checkpoint(self, boundary: bytes) -> Iterator[tuple[int, int]]:
        found = self._coordinator.take_in(boundary, self._pieces)
        yield from ((slot, each.label.generation) for each in found for slot in each.slots)
