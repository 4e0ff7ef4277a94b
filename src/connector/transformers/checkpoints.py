"""Checkpoints in device blocks: windows and states of a past as plain bytes, written and restored."""

from collections.abc import Sequence
from functools import partial

from connector.transformers.held import Past
from connector.transformers.paged import PagedKV
from connector.transformers.past import ModelPast
from cpu_prefix_cache.deciding import KVCacheCoordinator, TakenCheckpoints

# So few tokens take hardly longer in one forward pass than in each of two: a checkpoint between them is taken later.
# With two, after 2,048 known tokens and 32 new ones, small models of Gemma 3, Qwen3.5 and Falcon-H1 took 1.8 to 1.9
# times as long to the first token.
PUT_OFF_TOKENS = 32


class PastCheckpoints(TakenCheckpoints):
    """Takes and restores the checkpoints of one model in one device pool."""

    def __init__(self, past: ModelPast, kv: PagedKV, coordinator: KVCacheCoordinator) -> None:
        super().__init__(coordinator)
        self._past, self._kv, self._grid = past, kv, coordinator.planner.grid_tokens

    def restore(self, past: Past, chunks: Sequence[int], node: int, boundary: int, room: int) -> None:
        """Begin a past at `boundary`, out of the blocks of its `chunks` and of `node`: a checkpoint, or a chunk if none
        is needed there. `room` is for the tokens of full attention to come.
        """
        blocks: list[list[int]] = [list(chunks) if kept is self._past.full else [] for kept in self._past.kept]
        if self.are_needed(boundary):
            places = self._planner.checkpoint(boundary // self._grid)
            for at, piece in zip(places, self._pool.checkpoints.pieces(node), strict=True):
                blocks[at.group] += piece
        for kept, held in zip(self._past.kept, blocks, strict=True):
            past.fill(kept, self._kv.read(held, kept.row_bytes(self._grid)), boundary, room)

    def write(self, state: Past, depth: int, node: int) -> None:
        to_write = self._pool.checkpoints.to_write(node)
        for at, blocks in zip(self._planner.checkpoint(depth), to_write, strict=True):
            if blocks is not None:
                kept = self._past.kept[at.group]
                take = partial(state.take, kept, first=at.chunk * self._grid)
                self._kv.write(blocks, kept.row_bytes(self._grid), take)
