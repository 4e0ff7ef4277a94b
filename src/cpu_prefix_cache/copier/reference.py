"""Copies in plain torch. Every other copier must match it byte for byte.

A store writes the bytes of a piece, as its codec keeps them, part after part and within a part device block after
device block, into its host blocks. What is left of the last one stays as it was. A load is the inverse.

The pieces of a copy are taken in portions:

    a stretch    pieces whose blocks lie one after another on both sides, as slices: no ids, and no copy between
    the rest     all others together, by the ids of their blocks

Both pools hand out neighbours where they can.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import eq

import torch

from cpu_prefix_cache.copier import coded_form
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding, BoundGroup, Shapes, Tensors
from cpu_prefix_cache.copier.events import Event, Passed, Stored
from cpu_prefix_cache.copier.sections import in_sections, numbers_of
from cpu_prefix_cache.copier.streams import compute_event
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.model.planner import Piece

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
# The least pieces of a stretch. 128 pieces of 8 parts took, with parts of 8 KB, 3.1 ms by ids, 1.8 in stretches of 16
# and 1.3 in one; with parts of 1 KB, .6 to 1.2, .7 and .3 (shorter stretches: up to ten times as long as ids).
STRETCH = 16

Rows = slice | torch.Tensor  # of a memory: neighbours, or rows with these ids


class ReferenceCopier(Copier):
    """Copies on any device, and has ended when `submit` returns. Arguments and errors are those of Binding."""

    knows_pieces = True

    def __init__(self, shapes: Shapes, tensors: Tensors, host: torch.Tensor, *, null_block: int | None = None) -> None:
        self._binding = Binding(shapes, tensors, host, null_block)
        self._groups = [group.joined() for group in self._binding.groups]  # 8 parts of 8 KB in 450 us, not 590
        cut = list(map(in_sections, self._binding.groups))
        self._section_of = list(map(numbers_of, cut))
        self._sections = [[section.joined() for section in each] for each in cut]

    def here(self) -> Event:
        return compute_event(self._binding.device)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        self._binding.check(direction, copies)
        after.until_passed()
        try:
            unfit = [block for copy in copies for block in self._copy(direction, self._groups[copy.group], copy)]
        finally:
            self.here().until_passed()
        return Stored(Passed(), Passed(), lambda: unfit)

    @torch.inference_mode()  # memory may have been made in it
    def _copy(self, direction: Direction, group: BoundGroup, copy: GroupCopy) -> list[int]:
        """Copy some parts of the pieces. The first host blocks of the pieces that do not fit."""
        unfit: list[int] = []
        filled = -(-group.piece.num_bytes // self._binding.host.shape[1])  # the others hold nothing
        for device_blocks, host_blocks in _portions(copy, group.piece):
            device_rows = _rows(device_blocks, self._binding.device)
            columns = (host_blocks[at :: group.piece.host_blocks] for at in range(filled))
            host_rows = [_rows(column, self._binding.host.device) for column in columns]
            if direction is Direction.LOAD:
                self._load(group, device_rows, host_rows)
                continue
            pieces = self._store(group, device_rows, host_rows)
            unfit += [host_blocks[at * group.piece.host_blocks] for at in sorted(pieces)]
        return unfit

    def num_pieces(self, direction: Direction, copy: GroupCopy) -> int:
        return self._binding.num_pieces(direction, copy)

    def sections(self, group: int) -> Sequence[int]:
        return self._section_of[group]

    def submit_sections(self, copies: Sequence[GroupCopy], after: Event, submitted: Callable[[Event], object]) -> None:
        self._binding.check(Direction.LOAD, copies)
        after.until_passed()
        try:
            for at in range(max(map(len, self._sections))):
                for copy in copies:
                    for section in self._sections[copy.group][at : at + 1]:
                        self._copy(Direction.LOAD, section, copy)
                self.here().until_passed()
                submitted(Passed())
        finally:
            self.here().until_passed()

    def _store(self, group: BoundGroup, device_rows: Rows, host_rows: Sequence[Rows]) -> set[int]:
        """`host_rows`: the first host blocks of all pieces, the second ones, and so on. Which pieces do not fit."""
        host, blocks = self._binding.host, group.piece.device_blocks
        taken, unfit = [], set[int]()
        for part in group.parts:
            content = _read(part, device_rows)
            if group.is_coded:
                content, fits = coded_form.encode(content)
                unfit.update((~fits.view(-1, blocks).all(1)).nonzero().flatten().tolist())
            taken.append(content.reshape(-1, blocks * content.shape[1]))
        packed = torch.cat(taken, dim=1).to(host.device)
        for rows, content in zip(host_rows, packed.split(host.shape[1], dim=1), strict=True):
            _write(host[:, : content.shape[1]], rows, content)
        return unfit

    def _load(self, group: BoundGroup, device_rows: Rows, host_rows: Sequence[Rows]) -> None:
        host, first, last = self._binding.host, group.offsets[0], group.offsets[-1]
        blocks = zip(range(0, group.piece.num_bytes, host.shape[1]), host_rows, strict=True)  # each from which byte on
        taken = [
            _read(host[:, max(0, first - at) : last - at], rows)
            for at, rows in blocks
            if at < last and first < at + host.shape[1]
        ]
        packed = (taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)).to(self._binding.device)
        for part, (begin, end) in zip(group.parts, pairwise(at - first for at in group.offsets), strict=True):
            content = packed[:, begin:end].reshape(len(packed) * group.piece.device_blocks, -1)
            _write(part, device_rows, coded_form.decode(content, part.shape[1]) if group.is_coded else content)


def _portions(copy: GroupCopy, piece: Piece) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The device blocks and the host blocks of each stretch, and of the rest."""
    if copy.host_blocks and _ascend(copy.device_blocks) and _ascend(copy.host_blocks):
        yield copy.device_blocks, copy.host_blocks
        return
    device, host, of_device, of_host = copy.device_blocks, copy.host_blocks, piece.device_blocks, piece.host_blocks
    rest: tuple[list[int], list[int]] = [], []
    begin, num_pieces = 0, len(host) // of_host
    breaks = [
        at
        for at in range(1, num_pieces)
        if host[at * of_host] != host[at * of_host - 1] + 1 or device[at * of_device] != device[at * of_device - 1] + 1
    ]
    for end in (*breaks, num_pieces):
        device_blocks, host_blocks = device[begin * of_device : end * of_device], host[begin * of_host : end * of_host]
        if end - begin < STRETCH:
            rest[0].extend(device_blocks)
            rest[1].extend(host_blocks)
        else:
            yield device_blocks, host_blocks
        begin = end
    if rest[1]:
        yield rest


def _rows(ids: Sequence[int], device: torch.device) -> Rows:
    """A slice if the ids ascend in equal steps."""
    step = max(1, ids[1] - ids[0]) if len(ids) > 1 else 1
    if _ascend(ids, step):
        return slice(ids[0], ids[-1] + 1, step)
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _ascend(ids: Sequence[int], step: int = 1) -> bool:
    """Whether the ids ascend by this step. Found without a loop of Python's, which takes 70 us for 128 of them."""
    return all(map(eq, ids, range(ids[0], ids[0] + step * len(ids), step)))


def _read(memory: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A view of a slice, else a copy."""
    return memory[rows] if isinstance(rows, slice) else memory.index_select(0, rows)


def _write(memory: torch.Tensor, rows: Rows, content: torch.Tensor) -> None:
    if isinstance(rows, slice):
        memory[rows] = content
    else:
        _write_by_ids(memory, rows, content)


def _write_by_ids(memory: torch.Tensor, ids: torch.Tensor, content: torch.Tensor) -> None:
    """In the widest words that fit both: torch indexes single bytes four times as slowly."""
    places = [at for each in (memory, content) for at in (each.data_ptr(), each.storage_offset(), each.stride(0))]
    word = next(word for word in WORDS if not any(at % word.itemsize for at in (*places, content.shape[1])))
    memory.view(word)[ids] = content.view(word)
