"""What copying means, in plain torch. Every other copier must match it byte for byte; without a GPU it is the one used.

For the pieces of one group, with d device blocks and h host blocks each:

    store   host[h ids]  =  the parts' bytes at the d ids, side by side, padded to whole host blocks
    load    the same, read the other way
"""

from collections.abc import Sequence

import torch

from cpu_prefix_cache.copier.base import check_ids
from cpu_prefix_cache.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.memory.layout import PieceLayout
from cpu_prefix_cache.plan import Direction, GroupCopy
from cpu_prefix_cache.planner import HybridChunkPlanner, Piece


def block_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A `[blocks, ...]` tensor as uint8 [blocks, bytes]: the same memory. Blocks may lie apart, not be torn.

    Raises ConfigurationError when the bytes of a block are not contiguous.
    """
    if not tensor[0].is_contiguous():
        raise ConfigurationError(
            f"the bytes of one block must be contiguous, but blocks of shape {tuple(tensor.shape[1:])} "
            f"have strides {tensor.stride()[1:]}"
        )
    size = tensor[0].numel() * tensor.element_size()
    flat = tensor.as_strided((tensor.shape[0], tensor[0].numel()), (tensor.stride(0), 1), tensor.storage_offset())
    return flat.view(torch.uint8).view(tensor.shape[0], size)


class ReferenceCopier:
    """Copies synchronously with torch indexing.

    `tensors[group]` lists the parts of a group, layer by layer, each `[device blocks, ...]`; `host` is the region,
    uint8 [host blocks, host_block_bytes].

    Raises ConfigurationError when the tensors do not weigh what the planner was told, or differ in blocks, or the host
    region has other blocks.
    """

    def __init__(
        self, planner: HybridChunkPlanner, tensors: Sequence[Sequence[torch.Tensor]], host: torch.Tensor
    ) -> None:
        if (
            host.dtype != torch.uint8
            or host.shape[1] != planner.host_block_bytes
            or len(tensors) != len(planner.pieces)
        ):
            raise ConfigurationError(
                f"the planner has {len(planner.pieces)} groups and host blocks of {planner.host_block_bytes} bytes; "
                f"got tensors of {len(tensors)} groups and a host region of {host.dtype} {tuple(host.shape)}"
            )
        self._host = host
        self._groups = [
            _BoundGroup(piece, [block_bytes(tensor) for tensor in parts], host)
            for piece, parts in zip(planner.pieces, tensors, strict=True)
        ]

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        for copy in copies:
            self._groups[copy.group].check(direction, copy)
        for copy in copies:
            if direction is Direction.STORE:
                self._groups[copy.group].store(copy)
            else:
                self._groups[copy.group].load(copy)


class _BoundGroup:
    """One group's parts on the device, and where their bytes go in the host region."""

    def __init__(self, piece: Piece, parts: Sequence[torch.Tensor], host: torch.Tensor) -> None:
        self._piece = piece
        self._parts = parts
        self._host = host
        self._layout = PieceLayout([part.shape[1] for part in parts], piece.device_blocks)
        if self._layout.num_bytes != piece.num_bytes:
            raise ConfigurationError(
                f"a piece of group {piece.group.name!r} weighs {self._layout.num_bytes} bytes in the tensors given, "
                f"but the planner was told {piece.num_bytes}"
            )
        if len({part.shape[0] for part in parts}) != 1:
            raise ConfigurationError(f"the tensors of group {piece.group.name!r} differ in the number of blocks")

    def check(self, direction: Direction, copy: GroupCopy) -> None:
        loads = direction is Direction.LOAD
        check_ids("device", copy.device_blocks, self._parts[0].shape[0], distinct=loads)
        check_ids("host", copy.host_blocks, self._host.shape[0], distinct=not loads)
        pieces, rest = divmod(len(copy.host_blocks), self._piece.host_blocks)
        if rest or len(copy.device_blocks) != pieces * self._piece.device_blocks:
            raise MisuseError(
                f"{len(copy.host_blocks)} host blocks and {len(copy.device_blocks)} device blocks are not whole pieces "
                f"of {self._piece.host_blocks} and {self._piece.device_blocks}"
            )

    def store(self, copy: GroupCopy) -> None:
        pieces = len(copy.host_blocks) // self._piece.host_blocks
        device_ids = torch.tensor(copy.device_blocks, device=self._parts[0].device)
        packed = torch.cat([part[device_ids].view(pieces, -1) for part in self._parts], dim=1)
        padding = self._piece.host_blocks * self._host.shape[1] - self._layout.num_bytes
        packed = torch.nn.functional.pad(packed, (0, padding)).view(len(copy.host_blocks), -1)
        self._host[torch.tensor(copy.host_blocks)] = packed.to(self._host.device)

    def load(self, copy: GroupCopy) -> None:
        pieces = len(copy.host_blocks) // self._piece.host_blocks
        packed = self._host[torch.tensor(copy.host_blocks)].view(pieces, -1).to(self._parts[0].device)
        device_ids = torch.tensor(copy.device_blocks, device=self._parts[0].device)
        for part, begin in zip(self._parts, self._layout.offsets, strict=True):
            end = begin + part.shape[1] * self._piece.device_blocks
            part[device_ids] = packed[:, begin:end].reshape(len(copy.device_blocks), -1)
