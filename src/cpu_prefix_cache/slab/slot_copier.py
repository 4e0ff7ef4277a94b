"""Copies between host blocks and slots, which are numbered: a slice of a transfer has adjacent ones."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.below import Slots
from cpu_prefix_cache.slab.tier_copier import Entry, TierCopier, check_range


class SlotCopier(TierCopier):
    """TierCopier to and from `slots`, each as large as a host block."""

    def __init__(self, slots: Slots, region: torch.Tensor, pieces: Sequence[Piece]) -> None:
        super().__init__(slots, slots.slot_bytes, region, pieces)
        self._slots = slots

    def check(self, direction: Direction, copies: Iterable[GroupCopy]) -> list[Entry]:
        """Host blocks of a transfer, by slot."""
        entries = super().check(direction, copies)
        slots = [entry.slot for entry in entries]
        if slots:
            check_range("slots", slots, self._slots.slots)
        if direction is Direction.STORE and len(set(slots)) != len(slots):
            raise MisuseError("a store writes a slot twice")
        return sorted(entries, key=attrgetter("slot"))

    def _write(self, entries: Sequence[Entry], views: Sequence[memoryview]) -> None:
        self._slots.write([entry.slot for entry in entries], views, [entry.label for entry in entries])

    def _read(self, entries: Sequence[Entry], views: Sequence[memoryview]) -> Sequence[bool]:
        slots = [entry.slot for entry in entries]
        refused = set(self._slots.read(slots, views, [entry.label for entry in entries]))
        return [slot not in refused for slot in slots]

    def _forget(self, entries: Sequence[Entry]) -> None:
        self._slots.forget([entry.slot for entry in entries])
