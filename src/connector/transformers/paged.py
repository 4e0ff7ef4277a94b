"""Device blocks through which a model's past passes, and the groups of that past.

    region            uint8 [blocks, block bytes], allocated once: one pool of equal blocks, as on the host
    full attention    a block of tokens is a row of it
    windows, states   a piece takes as many rows as it needs

The tokens of one head lie together, as in transformers' cache: a block is copied head by head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from connector.transformers.past import KEYS, Kept, ModelPast
from cpu_prefix_cache import KVGroup
from cpu_prefix_cache.copying import Role, blocks_first, check_fits
from cpu_prefix_cache.deciding import Group, PrefixGroup, StateGroup

ALIGNMENT = 16  # bytes: a row can be viewed as any type, and copied in wide words


class PagedKV:
    """`num_blocks` device blocks for a model's past.

    A block holds `block_tokens` tokens of full attention; in a model without any, the largest other piece.
    """

    @torch.inference_mode(False)  # blocks are written in any mode
    def __init__(self, past: ModelPast, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        self._past, self._block_tokens, self.block_bytes = past, block_tokens, block_bytes(past, block_tokens)
        if device.type == "cpu":
            check_fits(num_blocks * self.block_bytes)
        self.region = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def layout(self, groups: Sequence[Group]) -> list[KVGroup]:
        """Every group with its parts: of full attention K and V of each layer; of the others rows of plain bytes."""
        full = [
            blocks_first(part.layer, Role.KEY if part.key == KEYS else Role.VALUE, blocks)
            for part, blocks in self._past.full.views(self.region, self._block_tokens)
        ]
        rows = [blocks_first(0, Role.STATE, self.region)]
        return [KVGroup(group, full if group.is_prefix else rows) for group in groups]

    def release(self) -> None:
        """Give the memory of the pool back. Nothing can be read or written any more."""
        self.region = self.region.new_empty(0)

    def write(self, blocks: Sequence[int], num_bytes: int, fill: Callable[[torch.Tensor], object]) -> None:
        """Have `fill` write pieces, uint8 [pieces, num_bytes], to these blocks, equally many each. The rest of the last
        is zeroed.
        """
        places, width = self._rows(blocks), self._width(num_bytes)
        if isinstance(places, slice) and num_bytes == width:
            fill(self.region[places].view(-1, width))
            return
        rows = self.region.new_zeros(len(blocks) * self.block_bytes // width, width)
        fill(rows[:, :num_bytes])
        # torch writes single bytes four times as slowly
        self.region.view(torch.int64)[places] = rows.view(len(blocks), -1).view(torch.int64)

    def read(self, blocks: Sequence[int], num_bytes: int) -> torch.Tensor:
        """The pieces in these blocks, uint8 [pieces, num_bytes]. It may be a view of the blocks."""
        if not blocks:
            return self.region.new_empty(0, num_bytes)
        places = self._rows(blocks)
        rows = self.region[places] if isinstance(places, slice) else self.region.index_select(0, places)
        return rows.view(-1, self._width(num_bytes))[:, :num_bytes]

    def _width(self, num_bytes: int) -> int:
        """The bytes of the blocks of a piece."""
        return -(-num_bytes // self.block_bytes) * self.block_bytes

    def _rows(self, blocks: Sequence[int]) -> slice | torch.Tensor:
        """Neighbours as a slice, which takes three quarters of the time."""
        first, end = blocks[0], blocks[0] + len(blocks)
        if list(blocks) == list(range(first, end)):
            return slice(first, end)
        return torch.tensor(blocks, device=self.region.device)


def block_bytes(past: ModelPast, block_tokens: int) -> int:
    content = past.full.row_bytes(block_tokens) or max(kept.row_bytes(block_tokens) for kept in past.kept)
    return -(-content // ALIGNMENT) * ALIGNMENT


def groups_of(past: ModelPast, block_tokens: int) -> tuple[Group, ...]:
    """A group for each of what is kept."""
    row_bytes = block_bytes(past, block_tokens)

    def group(kept: Kept) -> Group:
        piece = kept.row_bytes(block_tokens)
        if kept is past.full:
            return PrefixGroup(name="attention", block_tokens=block_tokens, block_bytes=piece)
        of_kind = kept.local or StateGroup(name="state", block_tokens=block_tokens, block_bytes=row_bytes)
        rows = -(-piece // row_bytes)
        return replace(of_kind, block_tokens=block_tokens, block_bytes=row_bytes, device_blocks=rows)

    return tuple(map(group, past.kept))
