"""Copies between host blocks and values in a store, which are named by their labels: no slot is of any use there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.tier_copier import Entry, TierCopier
from cpu_prefix_cache.stores.keyed_values import KeyedValues

if TYPE_CHECKING:
    import torch


class ValueCopier(TierCopier):
    """TierCopier to and from `values`. What a store that failed has put is right, and stays."""

    def __init__(self, values: KeyedValues, region: "torch.Tensor", pieces: Sequence[Piece]) -> None:
        super().__init__(values, values.block_bytes, region, pieces)
        self._values = values

    def _write(self, entries: Sequence[Entry], views: Sequence[memoryview]) -> None:
        self._values.put([entry.label for entry in entries], views)

    def _read(self, entries: Sequence[Entry], views: Sequence[memoryview]) -> Sequence[bool]:
        return self._values.get([entry.label for entry in entries], views)
