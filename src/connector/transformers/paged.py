"""Device blocks through which a model's past passes: its groups, their pool, and the checkpoints in it.

    region            uint8 [blocks, block bytes], allocated once: one pool of equal blocks, as on the host
    full attention    a block of tokens is a row of it
    windows, states   a piece takes as many rows as it needs

The tokens of one head lie together, as in transformers' cache: a block is copied head by head.
"""

from collections.abc import Sequence

import torch

from connector.transformers.held import Past
from connector.transformers.past import KEYS, Kept, ModelPast
from cpu_prefix_cache import KVGroup
from cpu_prefix_cache.copying import Role, blocks_first, check_fits
from cpu_prefix_cache.deciding import (
    HybridChunkPlanner,
    KVCacheCoordinator,
    Placement,
    TakenCheckpoints,
    new_pool,
)

CHECKPOINTS = 4  # of windows and states that device blocks have room for beside a prompt
SHARE_OF_HOST = 4  # device blocks take at most one part in so many of host memory, where nothing else is given


class PagedPast(TakenCheckpoints):
    """Device blocks for a model's past: `device_bytes` of them, or those of the longest prompt, in bounds."""

    @torch.inference_mode(False)  # blocks are written in any mode
    def __init__(self, past: ModelPast, max_model_len: int, device_bytes: int | None, host_bytes: int) -> None:
        self.planner, self.block_bytes = HybridChunkPlanner(past.groups, max_model_len=max_model_len), past.block_bytes
        usual = _usual_blocks(self.planner, max_model_len, host_bytes // self.block_bytes)
        self.num_blocks = usual if device_bytes is None else device_bytes // self.block_bytes
        if past.device.type == "cpu":
            check_fits(self.num_blocks * self.block_bytes)
        self.region = torch.zeros(self.num_blocks, self.block_bytes, dtype=torch.uint8, device=past.device)
        self.pool = new_pool(self.planner, self.num_blocks, on_device=True)
        super().__init__(KVCacheCoordinator(self.planner, self.pool, on_device=True))
        self._past, self._block_tokens = past, past.block_tokens

    def layout(self) -> list[KVGroup]:
        """Every group with its parts: of full attention K and V of each layer; of the others rows of plain bytes."""
        full = [
            blocks_first(part.layer, Role.KEY if part.key == KEYS else Role.VALUE, blocks)
            for part, blocks in self._past.full.views(self.region)
        ]
        rows = [blocks_first(0, Role.STATE, self.region)]
        return [KVGroup(group, full if group.is_prefix else rows) for group in self.planner.groups]

    def place(self, keys: Sequence[bytes], tokens: int) -> Placement:
        return Placement(self.pool, self._coordinator, keys, tokens)

    def restore(self, past: Past, place: Placement, room: int) -> None:
        """Begin a past where a placement ends. `room` is for the tokens of full attention to come."""
        blocks: list[list[int]] = [list(place.blocks()) if kept is self._past.full else [] for kept in self._past.kept]
        if self.are_needed(place.length):
            places = self.planner.checkpoint(place.length // self._block_tokens)
            for at, piece in zip(places, self.pool.checkpoints.pieces(place.resume_node()), strict=True):
                blocks[at.group] += piece
        for kept, held in zip(self._past.kept, blocks, strict=True):
            past.fill(kept, self._read(held, kept), place.length, room)

    def keep(self, past: Past, row: int, place: Placement) -> None:
        """Write the tokens of full attention of a row into the blocks that were allocated for them."""
        new, first = place.allocated()
        if new and (full := self._past.full).parts:
            self._write(new, full, past, first, row)

    def write(self, state: Past, depth: int, node: int) -> None:
        to_write = self.pool.checkpoints.to_write(node)
        for at, blocks in zip(self.planner.checkpoint(depth), to_write, strict=True):
            if blocks is not None:
                self._write(blocks, self._past.kept[at.group], state, at.chunk * self._block_tokens)

    def _write(self, blocks: Sequence[int], kept: Kept, past: Past, first: int, row: int = 0) -> None:
        """Copy what a past has from token `first` on to these blocks. The rest of the last of a piece is zeroed."""
        places = self._places(blocks)
        is_view = isinstance(places, slice)
        rows = self.region[places] if is_view else self.region.new_empty(len(blocks), self.block_bytes)
        pieces = self._as_pieces(rows, kept)
        past.take(kept, pieces[:, : kept.row_bytes], first, row)
        pieces[:, kept.row_bytes :] = 0
        if not is_view:  # torch writes single bytes four times as slowly
            self.region.view(torch.int64)[places] = rows.view(torch.int64)

    def _read(self, blocks: Sequence[int], kept: Kept) -> torch.Tensor:
        """The pieces in these blocks, uint8 [pieces, bytes]. It may be a view of the blocks."""
        places = self._places(blocks)
        rows = self.region[places] if isinstance(places, slice) else self.region.index_select(0, places)
        return self._as_pieces(rows, kept)[:, : kept.row_bytes]

    def _as_pieces(self, rows: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Blocks as pieces, each of which takes whole ones."""
        blocks = -(-kept.row_bytes // self.block_bytes)
        return rows.view(len(rows) // blocks, blocks * self.block_bytes)

    def _places(self, blocks: Sequence[int]) -> slice | torch.Tensor:
        """Neighbours as a slice, which takes three quarters of the time."""
        first = blocks[0] if blocks else 0
        if list(blocks) == list(range(first, first + len(blocks))):
            return slice(first, first + len(blocks))
        return torch.tensor(blocks, device=self.region.device)


def _usual_blocks(planner: HybridChunkPlanner, max_model_len: int, host_blocks: int) -> int:
    """Device blocks of the longest prompt, in bounds."""
    chunks = -(-max_model_len // planner.grid_tokens)
    checkpoints = CHECKPOINTS * sum(planner.pieces[at.group].device_blocks for at in planner.checkpoint(chunks))
    least, most = (each * planner.device_blocks_per_chunk + checkpoints for each in (1, chunks))
    return max(least, min(most, host_blocks // SHARE_OF_HOST))
