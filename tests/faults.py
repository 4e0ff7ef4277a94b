"""Copiers that stand around another one: the negative control of every test that compares outputs.

A comparison that passes while a CorruptingCopier is in place compares nothing. `damaging` puts one where an engine's
connector chooses its copier.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.choose import ChosenCopier
from cpu_prefix_cache.copier.streams import Event, Passed
from cpu_prefix_cache.memory.parts import block_bytes
from cpu_prefix_cache.messages.plan import Direction, GroupCopy


class MeddlingCopier(Copier):
    """Base of copiers with faults: `copy` decides the result of a transfer, which has ended when `submit` returns."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.knows_pieces = copier.knows_pieces

    def here(self) -> Event:
        return self.copier.here()

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        after.until_passed()
        self.copy(direction, copies)
        return Passed()

    def num_pieces(self, direction: Direction, copy: GroupCopy) -> int:
        return self.copier.num_pieces(direction, copy)

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        self.copier.copy(direction, copies)


class CorruptingCopier(MeddlingCopier):
    """Copies like `copier`, then zeroes device blocks of one group, in the first `loads` loads (None: all).

    `blocks` selects from those that a load fills for the group, by default the first one. Where a piece takes d device
    blocks, `slice(-d, None)` damages all of the last one, and `slice(d)` all of the first: of a window, the oldest
    tokens.
    """

    def __init__(
        self,
        copier: Copier,
        tensors: Sequence[Sequence[torch.Tensor]],
        group: int,
        loads: int | None = 1,
        blocks: slice = slice(1),
    ) -> None:
        super().__init__(copier)
        self._parts = [block_bytes(tensor) for tensor in tensors[group]]
        self._group = group
        self._loads = loads
        self._blocks = blocks
        self.corrupted = 0  # loads

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        super().copy(direction, copies)
        if direction is not Direction.LOAD or self.corrupted == self._loads:
            return
        for copy in copies:
            if copy.group == self._group and copy.device_blocks:
                for part in self._parts:
                    part[list(copy.device_blocks[self._blocks])] = 0
                self.corrupted += 1
        self.here().until_passed()


def damaging(choose_copier: Callable[..., ChosenCopier], name: str) -> Callable[..., ChosenCopier]:
    """In place of `choose_copier`: one block of the group of that name is damaged by every load.

    It raises ValueError where no group has that name.
    """

    def choose_and_damage(shapes, tensors, *arguments, **options):
        choice = choose_copier(shapes, tensors, *arguments, **options)
        group = [piece.group.name for piece in shapes.pieces].index(name)
        return replace(choice, copier=CorruptingCopier(choice.copier, tensors, group, loads=None))

    return choose_and_damage
