"""Checkpoints in device blocks: windows and states of a past as plain bytes, written and restored."""

from collections.abc import Sequence

import torch

from connector.transformers.held import Past
from connector.transformers.paged import PagedKV
from connector.transformers.past import LocalGroup, ModelPast
from cpu_prefix_cache.deciding import KVCacheCoordinator, TakenCheckpoints

# So few tokens take hardly longer in one forward pass than in each of two: a checkpoint between them is taken later.
# With two, after 2,048 known tokens and 32 new ones, small models of Gemma 3, Qwen3.5 and Falcon-H1 took 1.8 to 1.9
# times as long to the first token.
PUT_OFF_TOKENS = 32


class PastCheckpoints(TakenCheckpoints):
    """Takes and restores the checkpoints of one model in one device pool."""

    def __init__(self, past: ModelPast, kv: PagedKV, coordinator: KVCacheCoordinator) -> None:
        super().__init__(coordinator)
        self._past, self._kv, locals_ = past, kv, iter(past.locals)
        self._locals: list[LocalGroup | None] = [
            None if group.is_prefix or group.is_state else next(locals_) for group in kv.groups
        ]

    def restore(self, past: Past, node: int, boundary: int) -> None:
        """Restore a fresh past at `boundary` from `node`: a checkpoint, or a chunk if none is needed there."""
        pieces: dict[int, list[Sequence[int]]] = {}
        if self.are_needed(boundary):
            places = self._planner.checkpoint(boundary // self._planner.grid_tokens)
            for at, blocks in zip(places, self._pool.checkpoints.pieces(node), strict=True):
                pieces.setdefault(at.group, []).append(blocks)
        for group, local in enumerate(self._locals):
            found = self._kv.read(pieces.get(group, []), self._num_bytes(group))
            if local is not None:
                past.restore_window(local, boundary - len(found) * self._kv.groups[group].block_tokens, boundary, found)
            elif self._kv.groups[group].is_state:
                past.restore_states(found[0])
        past.count(boundary)

    def write(self, state: Past, depth: int, node: int) -> None:
        to_write = self._pool.checkpoints.to_write(node)
        for at, blocks in zip(self._planner.checkpoint(depth), to_write, strict=True):
            if blocks is not None:
                tokens = self._kv.groups[at.group].block_tokens
                first = at.chunk * self._planner.grid_tokens + at.block * tokens
                self._kv.write(blocks, self._snapshot(state, at.group, first, first + tokens))

    def _snapshot(self, past: Past, group: int, first: int, end: int) -> torch.Tensor:
        piece = torch.empty(self._num_bytes(group), dtype=torch.uint8, device=self._kv.region.device)
        local = self._locals[group]
        if local is None:
            past.snapshot_states(piece)
        else:
            past.snapshot_window(local, first, end, piece)
        return piece

    def _num_bytes(self, group: int) -> int:
        local = self._locals[group]
        return self._past.states.num_bytes if local is None else local.token_bytes * self._kv.groups[group].block_tokens
