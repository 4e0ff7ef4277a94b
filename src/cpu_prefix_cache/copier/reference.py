"""Copies in plain torch. Every other copier must match it byte for byte.

A store writes the bytes of a piece, part after part and within a part device block after device block, into its host
blocks. What is left of the last one stays as it was. A load is the inverse.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding, BoundGroup, Shapes, Tensors
from cpu_prefix_cache.copier.streams import Event, Passed, compute_event
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ReferenceCopier(Copier):
    """Copies on any device, and has ended when `submit` returns. Arguments and errors are those of Binding."""

    def __init__(self, shapes: Shapes, tensors: Tensors, host: torch.Tensor, *, null_block: int | None = None) -> None:
        self._binding = Binding(shapes, tensors, host, null_block)

    def here(self) -> Event:
        return compute_event(self._binding.device)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        self._binding.check(direction, copies)
        after.until_passed()
        try:
            for copy in copies:
                if copy.host_blocks:
                    group = self._binding.groups[copy.group]
                    (self._store if direction is Direction.STORE else self._load)(group, copy)
        finally:
            self.here().until_passed()
        return Passed()

    def _store(self, group: BoundGroup, copy: GroupCopy) -> None:
        host, device_ids, columns = self._binding.host, *self._ids(group, copy)
        taken = [part.index_select(0, device_ids).view(columns.shape[1], -1) for part in group.parts]
        packed = torch.cat(taken, dim=1).to(host.device)
        for ids, content in zip(columns, packed.split(host.shape[1], dim=1), strict=True):
            _write(host[:, : content.shape[1]], ids, content)

    def _load(self, group: BoundGroup, copy: GroupCopy) -> None:
        host, device_ids, columns = self._binding.host, *self._ids(group, copy)
        lefts = range(group.piece.num_bytes, 0, -host.shape[1])  # bytes of a piece from each of its host blocks on
        taken = [host.index_select(0, ids)[:, :left] for ids, left in zip(columns, lefts, strict=True)]
        packed = (taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)).to(self._binding.device)
        for part, (begin, end) in zip(group.parts, pairwise(group.offsets), strict=True):
            _write(part, device_ids, packed[:, begin:end].reshape(len(device_ids), -1))

    def _ids(self, group: BoundGroup, copy: GroupCopy) -> tuple[torch.Tensor, torch.Tensor]:
        """The device blocks, on the device, and the host blocks [host blocks of a piece, pieces]."""
        device_ids = torch.tensor(copy.device_blocks, dtype=torch.int64, device=self._binding.device)
        return device_ids, torch.tensor(copy.host_blocks, dtype=torch.int64).view(-1, group.piece.host_blocks).t()


def _write(rows: torch.Tensor, ids: torch.Tensor, content: torch.Tensor) -> None:
    """`rows[ids] = content`, in the widest words that fit both: torch indexes single bytes four times as slowly."""
    places = [at for each in (rows, content) for at in (each.data_ptr(), each.storage_offset(), each.stride(0))]
    word = next(word for word in WORDS if not any(at % word.itemsize for at in (*places, content.shape[1])))
    rows.view(word)[ids] = content.view(word)
