"""A copier that damages what it loads, on purpose: the negative control of every test that compares outputs.

A comparison that passes while this is in place compares nothing.
"""

from collections.abc import Sequence

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.memory.parts import block_bytes
from cpu_prefix_cache.plan import Direction, GroupCopy


class CorruptingCopier:
    """Copies like `copier`, then zeroes device blocks of one group, in the first `loads` loads (None: all).

    `blocks` says which of those that a load fills for the group: the first one, as it is. Of a piece that takes d
    device blocks, `slice(-d, None)` damages all of the last one, and `slice(d)` all of the first: of a window, the
    oldest tokens.
    """

    def __init__(
        self,
        copier: Copier,
        tensors: Sequence[Sequence[torch.Tensor]],
        group: int,
        loads: int | None = 1,
        blocks: slice = slice(1),
    ) -> None:
        self._copier = copier
        self._parts = [block_bytes(tensor) for tensor in tensors[group]]
        self._group = group
        self._loads = loads
        self._blocks = blocks
        self.corrupted = 0  # loads

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        self._copier.copy(direction, copies)
        if direction is not Direction.LOAD or self.corrupted == self._loads:
            return
        for copy in copies:
            if copy.group == self._group and copy.device_blocks:
                for part in self._parts:
                    part[list(copy.device_blocks[self._blocks])] = 0
                self.corrupted += 1
