"""ATOM's BlockPool as a `Device` where some of its blocks are units of states (states.py).

A state waits where the block that ends at its boundary does: ATOM evicts the two together. Its units wait nowhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from connector.atom.device import AtomDevice
from connector.atom.pool_view import Place
from connector.atom.states import States
from cpu_prefix_cache.deciding import CheckpointAt, checkpoint_key


class _Hold(NamedTuple):
    blocks: Any  # the hold on those that are no units
    units: list[int]
    pinned: list[int]  # the numbers of their states


class StateDevice(AtomDevice):
    """The blocks of one BlockPool. One block is one chunk, and a checkpoint is one state."""

    def __init__(self, pool: Any, states: States) -> None:
        super().__init__(pool)
        self._states = states

    def is_settled(self, seq: Any, block: int) -> bool:
        return not self._states.is_intended(seq, block)

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        block = self.block(checkpoint.tail[-1])
        units = None if block is None else self._states.at(block)
        return None if units is None else [(unit,) for unit in units]

    def soonest_evicted(self) -> Iterator[Place]:
        return self._with_states(super().soonest_evicted())

    def evicted_after(self, block: int) -> Iterator[Place]:
        return self._with_states(chain([(block, self.key(block))], super().evicted_after(block)))

    def _with_states(self, places: Iterable[Place]) -> Iterator[Place]:
        for block, key in places:
            yield block, key
            if key is not None and self._states.at(block) is not None:
                yield block, checkpoint_key(key)

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        if super().is_waiting(block, key):
            return True
        chunk = self.key(block)
        is_of_state = key is not None and chunk is not None and key == checkpoint_key(chunk)
        return is_of_state and super().is_waiting(block, chunk) and self._states.at(block) is not None

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Any:
        units = [block for block in blocks if self._states.is_unit(block)]
        others = [block for block in blocks if not self._states.is_unit(block)] if units else blocks
        return _Hold(super().hold(others, parent), units, self._states.hold(units))

    def release(self, hold: Any) -> None:
        super().release(hold.blocks)
        self._states.release(hold.units, hold.pinned)
