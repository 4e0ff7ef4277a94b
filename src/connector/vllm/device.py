"""vLLM's block pool as a `Device`.

A block waits to be evicted in the pool's free queue, hashed or not, and is handed out from its front:

    front                                                                     back
    [ no hash ][ deepest of the oldest ] ... [ its first chunk ] ... [ freed last ]
               `-- soonest_evicted walks from here, or from any block it is told, along the queue's own links

A block in use has `ref_cnt > 0` and is out of the queue. A hold is one more reference, which is all that vLLM needs to
leave a block and its hash alone.

vLLM's key of a block is its hash and the number of its group, ours the hash alone, as it stands in
`Request.block_hashes`. A chunk has a block in each prefix group, and is known by the one in the first of them.

A checkpoint has its blocks in other groups, and they do not wait together: what a window has passed is freed while the
request goes on. So a checkpoint is known by each of its blocks, from the moment it was found whole: the first of them
that is about to leave brings all of it to the host.

In a model without prefix groups chunks have no blocks. Which of them there were, nobody can ask vLLM: the latest are
remembered, a few times as many as there are blocks.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

from cpu_prefix_cache import HybridChunkPlanner
from cpu_prefix_cache.hashing import checkpoint_key
from cpu_prefix_cache.request import CheckpointAt

SEEN_PER_BLOCK = 64  # one state hangs below the chunks of a whole prompt; 32 MB for 5,000 blocks


class VllmDevice:
    """The blocks of all groups; `group_ids[i]` is vLLM's number of the planner's group i.

    vLLM hashes a block when it allocates it, before the step that computes it. While such a step is decided, `awaited`
    tells the keys whose bytes are still to come: blocks in use are not found under them.
    """

    def __init__(
        self,
        pool: BlockPool,
        planner: HybridChunkPlanner,
        group_ids: Sequence[int],
        awaited: Callable[[], Container[bytes]] = tuple,
    ) -> None:
        self._pool = pool
        self._planner = planner
        self._group_ids = group_ids
        self._prefix_ids = [id for id, piece in zip(group_ids, planner.pieces, strict=True) if piece.in_chunk]
        self.num_chunks: int = pool.num_gpu_blocks - 1
        self.null_block: int = pool.null_block.block_id
        self._suffix = make_block_hash_with_group_id(BlockHash(b""), self._prefix_ids[0]) if self._prefix_ids else b""
        self._awaited = awaited
        self._given: Container[int] = ()
        self._checkpoints = _Checkpoints()
        self._seen: dict[bytes, None] = {}  # without prefix groups: the latest chunks, the last seen at the end

    def saw(self, keys: Sequence[bytes], start: int = 0) -> None:
        """A request has these chunks, from number `start` on."""
        if self._prefix_ids:
            return
        for key in keys[start:]:
            self._seen.pop(key, None)
            self._seen[key] = None
        for key in list(islice(self._seen, max(0, len(self._seen) - SEEN_PER_BLOCK * self.num_chunks))):
            del self._seen[key]

    def find(self, key: bytes) -> Sequence[int] | None:
        return self.find_all((key,))[0]

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        if not self._prefix_ids:
            return [() if key in self._seen else None for key in keys]
        suffix, get_one_block = self._suffix, self._pool.cached_block_hash_to_block.get_one_block
        names = [key + suffix for key in keys]
        found = [get_one_block(name) for name in names]
        if len(self._prefix_ids) > 1:
            return [None if block is None else self._chunk(block) for block in found]
        awaited, given = self._awaited(), self._given
        return [
            None
            if block is None or (block.ref_cnt and (key in awaited or block.block_id in given))
            else (block.block_id,)
            for key, block in zip(keys, found, strict=True)
        ]

    def _chunk(self, first: KVCacheBlock) -> Sequence[int] | None:
        """The blocks of a chunk, by the one in the first prefix group."""
        key = get_block_hash(_name(first))
        others = self._pool.get_cached_block(key, self._prefix_ids[1:])
        if others is None or any(self._is_hidden(block, key) for block in (first, *others)):
            return None
        return [block.block_id for block in (first, *others)]

    @contextmanager
    def given(self, blocks: Container[int]) -> Iterator[None]:
        """In this context, blocks that a request has just been given are not taken for somebody else's."""
        self._given = blocks
        try:
            yield
        finally:
            self._given = ()

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        found = self._pieces(checkpoint)
        if found is None:
            self._checkpoints.forget(checkpoint)
            return None
        names = [_name(block) for block in found]
        if self._prefix_ids:  # its chunk may leave first, and it could not be stored without
            names.append(make_block_hash_with_group_id(BlockHash(checkpoint.tail[-1]), self._prefix_ids[0]))
        if self._checkpoints.remember(checkpoint, names):
            self._checkpoints.sweep(lambda oldest: self._pieces(oldest) is not None)
        if any(self._is_hidden(block, get_block_hash(_name(block))) for block in found):
            return None
        return [(block.block_id,) for block in found]

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes | None]]:
        start = None if after is None else self._pool.blocks[after]
        suffix, needed_by = self._suffix, self._checkpoints.needed_by
        for block in self._pool.free_block_queue.iter_blocks_after(start):  # many of them: no call more than needed
            name = block.block_hash
            if name is None:
                yield block.block_id, None
                continue
            if is_chunk := bool(suffix) and name.endswith(suffix):
                yield block.block_id, name[: -len(suffix)]
            if name in needed_by:
                for key in needed_by[name]:
                    yield block.block_id, key
            elif not is_chunk:
                yield block.block_id, None

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        here = self._pool.blocks[block]
        return not here.ref_cnt and (key in self._keys(here) if key is not None else not self._keys(here))

    def are_waiting(self, blocks: Sequence[int]) -> list[bool]:
        everywhere = self._pool.blocks
        return [everywhere[block].ref_cnt == 0 for block in blocks]

    def hold(self, blocks: Sequence[int]) -> list[KVCacheBlock]:
        held = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(held)
        return held

    def release(self, hold: list[KVCacheBlock]) -> None:
        # Deepest first, as vLLM frees a request: a chunk must not outlive its parent.
        self._pool.free_blocks(reversed(hold))

    def release_in_place(self, hold: list[KVCacheBlock], behind: int | None) -> None:
        # Not `free_blocks`: that puts hashed blocks at the back of the queue. The queue has no verb for its middle, so
        # the blocks are linked in by hand.
        queue = self._pool.free_block_queue
        place = queue.fake_free_list_head if behind is None else self._pool.blocks[behind]
        while place.next_free_block is not queue.fake_free_list_tail and place.next_free_block.block_hash is None:
            place = place.next_free_block  # blocks without a hash are handed out first
        for block in reversed(hold):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                block.prev_free_block, block.next_free_block = place, place.next_free_block
                place.next_free_block.prev_free_block = block
                place.next_free_block = place = block
                queue.num_free_blocks += 1

    def _pieces(self, checkpoint: CheckpointAt) -> list[KVCacheBlock] | None:
        first = checkpoint.depth - len(checkpoint.tail)
        pieces = []
        for at in self._planner.checkpoint(checkpoint.depth):
            key = checkpoint.tail[at.chunk - first]
            found = self._pool.get_cached_block(BlockHash(key), [self._group_ids[at.group]])
            if found is None:
                return None
            pieces.append(found[0])
        return pieces

    def _is_hidden(self, block: KVCacheBlock, key: bytes) -> bool:
        if block.block_id in self._given:
            return True
        return block.ref_cnt > 0 and key in self._awaited()

    def _keys(self, block: KVCacheBlock) -> Sequence[bytes]:
        """Our keys of a block: that of its chunk, or those of the checkpoints that need it."""
        name = block.block_hash
        if name is None:
            return ()
        if self._suffix and name.endswith(self._suffix):
            return (name[: -len(self._suffix)], *self._checkpoints.that_need(name))
        return self._checkpoints.that_need(name)


class _Checkpoints:
    """Which checkpoints need a block, by vLLM's key of it. What has left the device is forgotten in time: with each new
    checkpoint two of the oldest are asked for."""

    def __init__(self) -> None:
        self.needed_by: dict[BlockHashWithGroupId, list[bytes]] = {}
        self._names: dict[bytes, Sequence[BlockHashWithGroupId]] = {}
        self._oldest: dict[bytes, CheckpointAt] = {}  # by when they were asked for last

    def __len__(self) -> int:
        return len(self._names)

    def that_need(self, name: BlockHashWithGroupId) -> Sequence[bytes]:
        return self.needed_by.get(name, ())

    def remember(self, checkpoint: CheckpointAt, names: Sequence[BlockHashWithGroupId]) -> bool:
        """Whether it is new."""
        key = checkpoint_key(checkpoint.tail[-1])
        if key in self._names:
            return False
        self._names[key] = names
        for name in names:
            self.needed_by.setdefault(name, []).append(key)
        self._oldest[key] = checkpoint
        return True

    def forget(self, checkpoint: CheckpointAt) -> None:
        key = checkpoint_key(checkpoint.tail[-1])
        for name in self._names.pop(key, ()):
            self.needed_by[name].remove(key)
            if not self.needed_by[name]:
                del self.needed_by[name]

    def sweep(self, is_here: Callable[[CheckpointAt], bool]) -> None:
        for key, checkpoint in list(islice(self._oldest.items(), 2)):
            del self._oldest[key]
            if is_here(checkpoint):
                self._oldest[key] = checkpoint
            else:
                self.forget(checkpoint)


def _name(block: KVCacheBlock) -> BlockHashWithGroupId:
    name: BlockHashWithGroupId = block.block_hash
    return name
