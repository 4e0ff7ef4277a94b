"""Checkpoints in the engine's device pool: taken from a running request, restored into a later one.

    running request    a past, which changes with every token
    checkpoint         its windows and states at one boundary, as pieces in blocks of the device pool

Each block of a window is a piece, shared by the checkpoints that need it; all states together are one piece.
A checkpoint is taken when a forward pass has ended at its boundary: the state there is not known later (rule 8).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from connector.transformers.paged import PagedKV
from connector.transformers.past import LocalGroup, ModelPast
from cpu_prefix_cache.deciding import (
    InternalError,
    KVCacheCoordinator,
    PieceAt,
    PieceNeed,
    PoolExhausted,
    checkpoint_key,
)

# So few tokens take hardly longer in one forward pass than in each of two: a checkpoint between them is taken later.
# With two, after 2,048 known tokens and 32 new ones, small models of Gemma 3, Qwen3.5 and Falcon-H1 took 1.8 to 1.9
# times as long to the first token.
PUT_OFF_TOKENS = 32


class Snapshots(Protocol):
    """The past of running requests, of which a row's windows and states are copied out, or in where it is fresh."""

    def snapshot_window(self, group: LocalGroup, first: int, end: int, out: torch.Tensor, row: int = 0) -> None: ...

    def restore_window(self, group: LocalGroup, first: int, length: int, blocks: torch.Tensor) -> None: ...

    def snapshot_states(self, out: torch.Tensor, row: int = 0) -> None: ...

    def restore_states(self, page: torch.Tensor) -> None: ...

    def count(self, tokens: int) -> None: ...


class PastCheckpoints:
    """Takes and restores the checkpoints of one model in one device pool."""

    def __init__(self, past: ModelPast, kv: PagedKV, coordinator: KVCacheCoordinator) -> None:
        self._past = past
        self._kv = kv
        self._coordinator = coordinator
        self._planner = coordinator.planner
        self._pool = coordinator.pool
        locals_ = iter(past.locals)
        self._locals: list[LocalGroup | None] = [
            None if group.is_prefix or group.is_state else next(locals_) for group in kv.groups
        ]

    def are_needed(self, boundary: int) -> bool:
        """Whether resuming at `boundary` takes a checkpoint."""
        depth = boundary // self._planner.grid_tokens
        return boundary % self._planner.grid_tokens == 0 and depth > 0 and self._planner.needs_checkpoint(depth)

    def make_room(self, keys: Sequence[bytes], n0: int, boundary: int) -> int | None:
        """Allocate a node for the checkpoint at `boundary`, the destination of a load; None if there is no room.

        Pieces before `n0` are shared with the checkpoint there. All others get blocks of their own, even if another
        checkpoint has the same piece: a load that fails must not have written into blocks that are in use.
        """
        start, depth = n0 // self._planner.grid_tokens, boundary // self._planner.grid_tokens
        shared = self._pieces(keys, start) if self.are_needed(n0) else {}
        needs = self._needs(keys, depth)
        missing, mine = self._pool.checkpoints.missing(needs), object()
        wanted = []
        for at, need in zip(self._planner.checkpoint(depth), needs, strict=True):
            if at.chunk < start:
                wanted.append(shared[at])
            else:
                wanted.append(need if need in missing else PieceNeed((mine, need.key), need.num_blocks))
        return self._allocate(wanted)

    def take(self, state: Snapshots, row: int, keys: Sequence[bytes], boundary: int) -> int | None:
        """Write a row's checkpoint at `boundary`, where a forward pass has just ended. Returns its node, for `commit`.

        Returns None if the checkpoint is cached already, or the pool has no room for it.
        """
        depth = boundary // self._planner.grid_tokens
        if self._pool.find(checkpoint_key(keys[depth - 1])) is not None:
            return None
        node = self._allocate(self._needs(keys, depth))
        if node is None:
            return None
        try:
            self._write(state, row, depth, node)
        except BaseException:  # also after an interrupt no block may stay allocated
            self._pool.abort([node])
            raise
        return node

    def commit(self, node: int, key: bytes, chunk: int, touch: Any) -> bool:
        """Cache a checkpoint below its chunk, which has this key. If there is one already, free this one: False."""
        if self._pool.find(checkpoint_key(key)) is None:
            self._pool.commit([node], [checkpoint_key(key)], chunk, touch)
            return True
        self._pool.abort([node])
        return False

    def restore(self, state: Snapshots, node: int, boundary: int) -> None:
        """Restore a fresh `state` at `boundary` from `node`: a checkpoint, or a chunk if none is needed there."""
        pieces: dict[int, list[torch.Tensor]] = {}
        if self.are_needed(boundary):
            places = self._planner.checkpoint(boundary // self._planner.grid_tokens)
            for at, blocks in zip(places, self._pool.checkpoints.pieces(node), strict=True):
                pieces.setdefault(at.group, []).append(self._kv.read(blocks, self._num_bytes(at.group)))
        self._restore(state, boundary, pieces)
        state.count(boundary)

    def _pieces(self, keys: Sequence[bytes], depth: int) -> dict[PieceAt, PieceNeed]:
        """The pieces of the checkpoint after `depth` chunks, each with the need by which another can share it."""
        node = self._coordinator.resume_node(keys, depth)
        if node is None:
            raise InternalError(f"the device has no checkpoint after {depth} chunks, where a request is to resume")
        return dict(zip(self._planner.checkpoint(depth), self._pool.checkpoints.needs(node), strict=True))

    def _needs(self, keys: Sequence[bytes], depth: int) -> list[PieceNeed]:
        return self._coordinator.needs(self._coordinator.checkpoint_at(keys, depth))

    def _allocate(self, needs: Sequence[PieceNeed]) -> int | None:
        try:
            [node] = self._pool.allocate(0, needs=needs)
            return node
        except PoolExhausted:
            return None

    def _restore(self, state: Snapshots, boundary: int, pieces: dict[int, list[torch.Tensor]]) -> None:
        for group, local in enumerate(self._locals):
            found = pieces.get(group, [])
            if local is not None:
                blocks = torch.stack(found) if found else self._kv.region[:0]
                first = boundary - len(found) * self._kv.groups[group].block_tokens
                state.restore_window(local, first, boundary, blocks)
            elif self._kv.groups[group].is_state:
                state.restore_states(found[0])

    def _write(self, state: Snapshots, row: int, depth: int, node: int) -> None:
        to_write = self._pool.checkpoints.to_write(node)
        for at, blocks in zip(self._planner.checkpoint(depth), to_write, strict=True):
            if blocks is not None:
                tokens = self._kv.groups[at.group].block_tokens
                first = at.chunk * self._planner.grid_tokens + at.block * tokens
                self._kv.write(blocks, self._snapshot(state, row, at.group, first, first + tokens))

    def _snapshot(self, state: Snapshots, row: int, group: int, first: int, end: int) -> torch.Tensor:
        piece = torch.empty(self._num_bytes(group), dtype=torch.uint8, device=self._kv.region.device)
        local = self._locals[group]
        if local is None:
            state.snapshot_states(piece, row)
        else:
            state.snapshot_window(local, first, end, piece, row)
        return piece

    def _num_bytes(self, group: int) -> int:
        local = self._locals[group]
        return self._past.states.num_bytes if local is None else local.token_bytes * self._kv.groups[group].block_tokens
