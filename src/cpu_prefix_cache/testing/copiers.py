"""Copiers with faults, around the one of an engine: late, failing, or damaging what they load.

Each class is what `HostOptions(wrap_copier=...)` takes; an engine of several processes puts one around the copier that
`choose_copier` chose. A comparison that passes while a CorruptingCopier is in place compares nothing.

    MeddlingCopier      their base: `copy` decides the result of a transfer
    CorruptingCopier    zeroes device blocks that a load has filled
    FailingCopier       raises, before or after bytes have moved
    LateCopier          begins a copy only when its end has been queried several times, or is waited for
"""

import random
from collections.abc import Sequence

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.memory.parts import block_bytes
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

Tensors = Sequence[Sequence[torch.Tensor]]


class MeddlingCopier(Copier):
    """Base of copiers with faults: `copy` decides the result of a transfer, which has ended when `submit` returns."""

    def __init__(self, copier: Copier, tensors: Tensors = ()) -> None:
        self.copier = copier
        self.knows_pieces = copier.knows_pieces

    def here(self) -> Event:
        return self.copier.here()

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        after.until_passed()
        return self.copy(direction, copies)

    def num_pieces(self, direction: Direction, copy: GroupCopy) -> int:
        return self.copier.num_pieces(direction, copy)

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> Event:
        return self.copier.copy(direction, copies)


class CorruptingCopier(MeddlingCopier):
    """Copies like `copier`, then zeroes device blocks of one group, in the first `loads` loads (None: all).

    `blocks` selects from those that a load fills for the group, by default the first one. Where a piece takes d device
    blocks, `slice(-d, None)` damages all of the last one, and `slice(d)` all of the first: of a window, the oldest
    tokens.
    """

    def __init__(
        self,
        copier: Copier,
        tensors: Tensors,
        group: int = 0,
        loads: int | None = 1,
        blocks: slice = slice(1),
    ) -> None:
        super().__init__(copier, tensors)
        self._parts = [block_bytes(tensor) for tensor in tensors[group]]
        self._group = group
        self._loads = loads
        self._blocks = blocks
        self.corrupted = 0  # loads

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> Event:
        event = super().copy(direction, copies)
        if direction is not Direction.LOAD or self.corrupted == self._loads:
            return event
        for copy in copies:
            if copy.group == self._group and copy.device_blocks:
                for part in self._parts:
                    part[list(copy.device_blocks[self._blocks])] = 0
                self.corrupted += 1
        self.here().until_passed()
        return event


class FailingCopier(MeddlingCopier):
    """Raises in this share of all copies, half of them after their bytes have moved. The same ones for a `seed`."""

    def __init__(self, copier: Copier, tensors: Tensors = (), share: float = 0.2, seed: int = 5) -> None:
        super().__init__(copier, tensors)
        self._share = share
        self._draw = random.Random(seed)
        self.failed = 0  # copies

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> Event:
        fails, first = self._draw.random() < self._share, self._draw.random() < 0.5
        self.failed += fails
        if fails and first:
            raise RuntimeError("this copy fails before it begins")
        event = super().copy(direction, copies)
        if fails:
            raise RuntimeError("this copy fails when it has ended")
        return event


class LateCopier(MeddlingCopier):
    """A copy begins when its end is queried after `queries` queries, or when somebody waits for it.

    Copies begin in the order in which they were submitted.
    """

    def __init__(self, copier: Copier, tensors: Tensors = (), queries: int = 3) -> None:
        super().__init__(copier, tensors)
        self.queries = queries
        self.waiting: list[_Late] = []

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        late = _Late(self, direction, copies)
        self.waiting.append(late)
        return late

    def run_until(self, last: "_Late") -> None:
        while last in self.waiting:
            self.waiting.pop(0).run()


class _Late(Event):
    """The end of a late copy. Its failure is its own, also where another one's end had it run."""

    def __init__(self, copier: LateCopier, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        self.copier = copier
        self.direction = direction
        self.copies = copies
        self._queries = 0
        self.end: Event = Passed()  # of the copy, once it has begun
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.end = self.copier.copy(self.direction, self.copies)
        except Exception as error:
            self.error = error

    def unfit(self) -> Sequence[int]:
        return self.end.unfit()

    def passed(self) -> bool:
        self._queries += 1
        if self._queries > self.copier.queries:
            self.copier.run_until(self)
        if self.error is not None:
            raise self.error
        return self not in self.copier.waiting

    def until_passed(self) -> None:
        self.copier.run_until(self)
        self.passed()
