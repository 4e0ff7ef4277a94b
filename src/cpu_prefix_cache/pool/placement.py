"""The beginning of a prompt in an engine's own pool, while it is copied.

    found        chunks that the pool has under the prompt's keys, up to a boundary to resume from; pinned
    allocated    the chunks behind them, which a load fills, or what has been computed
    committed    found by other prompts, too

What is still allocated at the end is given back.
"""

from collections.abc import Sequence
from typing import Any, Self

from cpu_prefix_cache.messages.errors import InternalError, PoolExhausted
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator
from cpu_prefix_cache.pool.taken import TakenCheckpoints


class Placement:
    """The longest beginning of a prompt of `num_tokens` tokens that the device pool has: `length` tokens.

    `now` and `next_use` are for a pool whose policy learns from them, as in `BlockPool.touch`.
    """

    def __init__(
        self,
        pool: BlockPool,
        coordinator: KVCacheCoordinator,
        keys: Sequence[bytes],
        num_tokens: int,
        now: float | None = None,
        next_use: float | None = None,
    ) -> None:
        self._pool, self._coordinator, self._keys = pool, coordinator, keys
        self._grid = coordinator.planner.grid_tokens
        self.length = coordinator.longest_boundary(keys, 0, num_tokens)
        self._committed = self.length // self._grid
        self._touch = pool.touch(self.resume_node() if self.length else None, keys, now, num_tokens, next_use)
        self._pin: Pin | None = None
        self._chunks = pool.path(self._deepest(self._committed), self._committed) if self._committed else []
        self._filling: int | None = None  # the checkpoint that a load fills

    def __enter__(self) -> Self:
        if self.length:
            self._repin(self.resume_node())
        return self

    def __exit__(self, *error: object) -> None:
        self._drop_allocated()
        self._pool.unpin(self._pin)

    def resume_node(self) -> int:
        """The node to resume from at `length`: a checkpoint, or the last chunk."""
        node = self._coordinator.resume_node(self._keys, self.length // self._grid)
        if node is None:
            raise InternalError("a prompt is to resume where the device has nothing to resume from")
        return node

    def blocks(self) -> Sequence[int]:
        """The device blocks of full attention of the first `length` tokens."""
        return self._pool.blocks_of(self._chunks[: self.length // self._grid])

    def begin_behind(self, tokens: int) -> None:
        """Resume behind so many tokens, or from the beginning."""
        if self.length < tokens:
            self.length = 0

    # A load

    def room(self, checkpoints: TakenCheckpoints, n0: int, boundary: int) -> Sequence[Sequence[int]] | None:
        """Allocate what a load of [n0, boundary) fills, in the order of the groups; None if there is no room."""
        start, stop = n0 // self._grid, boundary // self._grid
        try:
            self._chunks += self._pool.allocate(stop - start, self._keys[start:stop])
        except PoolExhausted:
            return None
        if checkpoints.are_needed(boundary):
            self._filling = checkpoints.make_room(self._keys, n0, boundary)
            if self._filling is None:
                self._drop_allocated()
                return None
        return self._coordinator.destinations(self._chunks[start:stop], start, stop, self._filling)

    def loaded(self, length: int, boundary: int, checkpoints: TakenCheckpoints) -> None:
        """The load of tokens up to `boundary` has ended, and there are `length`: fewer if it has failed."""
        if length == boundary:
            self.commit(boundary)
            filling, self._filling = self._filling, None
            if filling is not None:
                checkpoints.commit(filling, self._keys[self._committed - 1], self._chunks[-1], self._touch)
            self.length = length
        self._drop_allocated()

    # What has been computed

    def grow(self, tokens: int) -> None:
        """Find or allocate the chunks of the first `tokens` tokens. Raises PoolExhausted."""
        stop = tokens // self._grid
        self._share(stop)
        if (have := len(self._chunks)) < stop:
            self._chunks += self._pool.allocate(stop - have, self._keys[have:stop])

    def allocated(self) -> tuple[Sequence[int], int]:
        """The device blocks of full attention that are to be written, and the first token of them."""
        return self._pool.blocks_of(self._chunks[self._committed :]), self._committed * self._grid

    def commit(self, tokens: int) -> None:
        """Commit the chunks of the first `tokens` tokens, which have been written.

        Of those that the pool has already it keeps its own: where only their checkpoint was missing, all were loaded.
        """
        stop = tokens // self._grid
        self._share(stop)
        begin = self._committed
        if begin < stop:
            parent = self._chunks[begin - 1] if begin else self._pool.root
            self._pool.commit(self._chunks[begin:stop], self._keys[begin:stop], parent, self._touch)
            self._committed = stop
        if stop:
            self._repin(self._chunks[stop - 1])

    def take_checkpoint(self, checkpoints: TakenCheckpoints, state: Any, tokens: int) -> None:
        """Keep the windows and states of a request that has so many tokens, all committed."""
        node = checkpoints.take(state, self._keys, tokens)
        if node is not None:
            chunk = tokens // self._grid - 1
            checkpoints.commit(node, self._keys[chunk], self._chunks[chunk], self._touch)

    # Details

    def _share(self, stop: int) -> None:
        """Use the chunks before `stop` that the pool has by now, in place of those that were allocated for them."""
        found = self._pool.resident_run(self._keys, self._committed, stop)
        if found > self._committed:
            self._repin(self._deepest(found))
            self._pool.abort(self._chunks[self._committed : found])
            self._chunks[:found] = self._pool.path(self._deepest(found), found)
            self._committed = found

    def _deepest(self, depth: int) -> int:
        node = self._pool.find(self._keys[depth - 1])
        if node is None:
            raise InternalError(f"the device pool has chunk {depth} of a prompt, and does not find it")
        return node

    def _repin(self, node: int) -> None:
        before, self._pin = self._pin, self._pool.pin(node)
        self._pool.unpin(before)

    def _drop_allocated(self) -> None:
        self._pool.abort(self._chunks[self._committed :])
        del self._chunks[self._committed :]
        if self._filling is not None:
            self._pool.abort([self._filling])
            self._filling = None
