"""Copies in plain torch. Every other copier must match it byte for byte.

A store writes the bytes of a piece, part after part and within a part device block after device block, into its host
blocks. What is left of the last one stays as it was. A load is the inverse.
"""

from collections.abc import Iterator, Sequence

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding, BoundGroup, Shapes, Tensors
from cpu_prefix_cache.copier.streams import Event, Passed, compute_event
from cpu_prefix_cache.messages.plan import Direction, GroupCopy


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
        device_ids = torch.tensor(copy.device_blocks, dtype=torch.int64, device=self._binding.device)
        pieces = len(copy.device_blocks) // group.piece.device_blocks
        packed = torch.cat([part[device_ids].view(pieces, -1) for part in group.parts], dim=1)
        packed = packed.to(self._binding.host.device)
        for host_ids, begin, end in self._columns(group, copy):
            self._binding.host[host_ids, : end - begin] = packed[:, begin:end]

    def _load(self, group: BoundGroup, copy: GroupCopy) -> None:
        device_ids = torch.tensor(copy.device_blocks, dtype=torch.int64, device=self._binding.device)
        rows = [self._binding.host[host_ids, : end - begin] for host_ids, begin, end in self._columns(group, copy)]
        packed = torch.cat(rows, dim=1).to(self._binding.device)
        for part, begin in zip(group.parts, group.layout.offsets, strict=True):
            end = begin + part.shape[1] * group.piece.device_blocks
            part[device_ids] = packed[:, begin:end].reshape(len(device_ids), -1)

    def _columns(self, group: BoundGroup, copy: GroupCopy) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The first host block of every piece, then the second, and so on, each with its byte range of a piece."""
        width = self._binding.host.shape[1]
        columns = torch.tensor(copy.host_blocks, dtype=torch.int64).view(-1, group.piece.host_blocks).t()
        for column, ids in enumerate(columns):
            begin = column * width
            yield ids, begin, min(begin + width, group.layout.num_bytes)
