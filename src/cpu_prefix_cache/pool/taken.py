"""Checkpoints of running requests in an engine's own pool: taken where a forward pass has ended, filled by a load.

    running request    windows and states, which change with every token
    checkpoint         those at one boundary, as pieces in blocks of the pool

Each block of a window is a piece, shared by the checkpoints that need it; all states together are one piece.
A checkpoint is taken when a forward pass has ended at its boundary: the state there is not known later (rule 8).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.messages.errors import InternalError, PoolExhausted
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import PieceAt
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


class TakenCheckpoints(ABC):
    """Takes the checkpoints of one model. A subclass writes their bytes."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        self._coordinator = coordinator
        self._planner = coordinator.planner
        self._pool = coordinator.pool

    @abstractmethod
    def write(self, state: Any, depth: int, node: int) -> None:
        """Write the pieces of `node` that are new, out of what the engine gave to `take`, after `depth` chunks.

        They are those of `pool.checkpoints.to_write(node)`, in the order of `planner.checkpoint(depth)`.
        """

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

    def take(self, state: Any, keys: Sequence[bytes], boundary: int) -> int | None:
        """Write the checkpoint at `boundary`, where a forward pass has just ended. Returns its node, for `commit`.

        Returns None if the checkpoint is cached already, or the pool has no room for it, or a load that may fail is to
        write a piece of it.
        """
        depth = boundary // self._planner.grid_tokens
        needs = self._needs(keys, depth)
        is_here = self._pool.find(checkpoint_key(keys[depth - 1])) is not None
        if is_here or not self._pool.checkpoints.are_written(needs):
            return None
        node = self._allocate(needs)
        if node is None:
            return None
        try:
            self.write(state, depth, node)
        except BaseException:  # also after an interrupt no block may stay allocated
            self._pool.abort([node])
            raise
        return node

    def commit(self, node: int, key: bytes, chunk: int, touch: Any) -> None:
        """Cache a checkpoint below its chunk, which has this key. If there is one already, free this one."""
        if self._pool.find(checkpoint_key(key)) is None:
            self._pool.commit([node], [checkpoint_key(key)], chunk, touch)
        else:
            self._pool.abort([node])

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
