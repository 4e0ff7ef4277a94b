"""A planner's groups, bound to their tensors and to the host region; and the checks of a copy.

Every copier is built on a Binding and checks with it before it moves anything: copies that pass address only blocks
that exist, write none twice, and write no null block (rules 7 and 14).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cpu_prefix_cache.copier.ids import check_ends, check_range, numbers_of
from cpu_prefix_cache.memory.parts import block_bytes, check_apart, piece_offsets, side_by_side
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.model.codec import NONE
from cpu_prefix_cache.model.planner import Piece

Tensors = Sequence[Sequence[torch.Tensor]]  # parts of each group
FEW_IDS = 64  # up to here Python finds the least and the largest sooner than torch, which takes 7 us


class Shapes(Protocol):
    """A planner as a copier needs it: the piece of each group, and the size of a host block."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def host_block_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class BoundGroup:
    """One group's parts, uint8 [device blocks, bytes] each, in canonical order, and their `parts.piece_offsets` on the
    host."""

    piece: Piece
    parts: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]

    @property
    def is_coded(self) -> bool:
        return self.piece.group.form is not NONE

    def run(self, first: int, last: int) -> "BoundGroup":
        """Its parts [first, last), with their offsets in the whole piece."""
        return replace(self, parts=self.parts[first:last], offsets=self.offsets[first : last + 1])

    def joined(self) -> "BoundGroup":
        """The same with parts joined that are neighbours in every block, and so on the host: but not in a piece of
        several blocks, which has each part of all of them in turn there, nor where parts are coded one by one.
        """
        if self.is_coded or self.piece.device_blocks > 1:
            return self
        parts = tuple(side_by_side(self.parts))
        offsets = piece_offsets((part.shape[1] for part in parts), self.piece.device_blocks, self.offsets[0])
        return replace(self, parts=parts, offsets=offsets)


class Binding:
    """`tensors[group]` lists the parts of a group, layer by layer, each `[device blocks, ...]`, as `parts.canonical`
    orders them. `host` is the region, uint8 [host blocks, host_block_bytes]. `null_block` is the device block that
    stands for "no block" in every group, if the engine has one.

    Raises ConfigurationError when the tensors of a group have other bytes than in the planner, differ in blocks
    or share memory, when tensors are on several devices, or when the host region has other blocks.
    """

    def __init__(self, shapes: Shapes, tensors: Tensors, host: torch.Tensor, null_block: int | None = None) -> None:
        fits = host.dtype == torch.uint8 and host.ndim == 2 and host.shape[1] == shapes.host_block_bytes
        if not fits or len(tensors) != len(shapes.pieces):
            raise ConfigurationError(
                f"the planner has {len(shapes.pieces)} groups and host blocks of {shapes.host_block_bytes} bytes; "
                f"got tensors of {len(tensors)} groups and a host region of {host.dtype} {tuple(host.shape)}"
            )
        self.host = host
        self.groups = tuple(
            _bind(piece, parts, shapes.host_block_bytes) for piece, parts in zip(shapes.pieces, tensors, strict=True)
        )
        self._null_block = null_block
        devices = {part.device for group in self.groups for part in group.parts}
        if len(devices) != 1:
            raise ConfigurationError(
                f"one copier serves one device, but the tensors are on {sorted(map(str, devices))}"
            )
        (self.device,) = devices

    def check(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        """Raise MisuseError unless every id of a transfer may be copied."""
        for copy in copies:
            self._check_whole_pieces(copy)
        if direction is Direction.STORE:
            _check_distinct("host", [copy.host_blocks for copy in copies])
        else:
            for index in {copy.group for copy in copies}:
                _check_distinct("device", [copy.device_blocks for copy in copies if copy.group == index])

    def num_pieces(self, direction: Direction, copy: GroupCopy) -> int:
        """How many pieces a copy has, once it is checked."""
        self.check(direction, [copy])
        return len(copy.device_blocks) // self.groups[copy.group].piece.device_blocks

    def _check_whole_pieces(self, copy: GroupCopy) -> None:
        if not 0 <= copy.group < len(self.groups):
            raise MisuseError(f"there are {len(self.groups)} groups, numbered from 0; got group {copy.group}")
        piece = self.groups[copy.group].piece
        pieces, rest = divmod(len(copy.host_blocks), piece.host_blocks)
        if rest or len(copy.device_blocks) != pieces * piece.device_blocks:
            raise MisuseError(
                f"{len(copy.host_blocks)} host blocks and {len(copy.device_blocks)} device blocks are not whole pieces "
                f"of {piece.host_blocks} and {piece.device_blocks}"
            )
        _check_range("host blocks", copy.host_blocks, self.host.shape[0])
        _check_range("device blocks", copy.device_blocks, self.groups[copy.group].parts[0].shape[0])
        if self._null_block is not None and self._null_block in copy.device_blocks:
            raise MisuseError(f"block {self._null_block} of group {piece.group.name!r} is the null block")


def _check_range(what: str, ids: Sequence[int], limit: int) -> None:
    """Raise MisuseError unless all `ids` are in [0, limit)."""
    if len(ids) <= FEW_IDS:
        check_range(what, ids, limit)
        return
    least, most = torch.aminmax(torch.frombuffer(numbers_of(what, ids, limit), dtype=torch.int64))
    check_ends(what, int(least), int(most), limit)


def _check_distinct(what: str, ids: Sequence[Sequence[int]]) -> None:
    """Raise MisuseError when an id comes twice."""
    if len(set().union(*ids)) != sum(map(len, ids)):
        raise MisuseError(f"a {what} block is written twice in one copy")


def _bind(piece: Piece, tensors: Sequence[torch.Tensor], host_block_bytes: int) -> BoundGroup:
    name = piece.group.name
    parts = tuple(block_bytes(tensor) for tensor in tensors)
    offsets = piece_offsets((piece.group.form.kept_bytes(part.shape[1]) for part in parts), piece.device_blocks)
    if offsets[-1] != piece.num_bytes:
        raise ConfigurationError(
            f"a piece of group {name!r} weighs {offsets[-1]} bytes in the tensors given, "
            f"but the planner was told {piece.num_bytes}"
        )
    if piece.num_bytes > piece.host_blocks * host_block_bytes:
        raise ConfigurationError(
            f"a piece of group {name!r} weighs {piece.num_bytes} bytes, more than its {piece.host_blocks} host blocks"
        )
    if len({part.shape[0] for part in parts}) != 1:
        raise ConfigurationError(f"the tensors of group {name!r} differ in the number of blocks")
    check_apart(parts, [f"part {at} of group {name!r}" for at in range(len(parts))])
    return BoundGroup(piece, parts, offsets)
