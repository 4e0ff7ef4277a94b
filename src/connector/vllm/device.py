"""vLLM's block pool as a `Device`.

A block waits to be evicted in the pool's free queue, hashed or not, and is handed out from its front:

    front                                                                     back
    [ no hash ][ deepest of the oldest ] ... [ its first chunk ] ... [ freed last ]
               `-- soonest_evicted walks from here along the queue's own links

A block in use has `ref_cnt > 0` and is out of the queue. A hold is one more reference, which is all that vLLM needs to
leave a block and its hash alone.

vLLM's key of a block is its hash and the number of its group, ours the hash alone, as it stands in
`Request.block_hashes`. A chunk has blocks in each prefix group, one or, where they are shorter than it, several, and is
on the device while all of them are. It is known by those it ends with, one in each group, whose hash is its key: vLLM
frees a request group by group, from either end of the list, and each from its last block to its first. So of a chunk
one of these is the first to leave. (Not always: of blocks within chunks that have one name vLLM gives a later prompt
the first, which may be another chunk's. Its own then waits where it was, and may be gone when its chunk is looked at.)

    full attention of 32 tokens, full attention of 16, chunks a and b freed at once     (^ brings its chunk)

    front  [ b ][ a ] [ b, second ][ b, first ][ a, second ][ a, first ]  back          or the groups the other way
             ^    ^       ^                        ^

A checkpoint has its blocks in other groups, and they do not wait together: what a window has passed is freed while the
request goes on. So a checkpoint is known by each of its blocks, from the moment it was found whole: the first of them
that is about to leave brings all of it to the host.

In a model without prefix groups chunks have no blocks. Which of them there were, nobody can ask vLLM: the latest are
remembered, a few times as many as there are blocks.
"""

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

from connector.vllm.keys import HashesOnDevice, block_ends
from cpu_prefix_cache import HybridChunkPlanner
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.places import FRONT, Places

GROUP_ID_BYTES = len(make_block_hash_with_group_id(BlockHash(b""), 0))
SEEN_PER_BLOCK = 64  # one state hangs below the chunks of a whole prompt; 32 MB for 5,000 blocks


class Place(NamedTuple):
    """Where a block waits: a block that waits later under another hash is elsewhere."""

    block: int
    hash: bytes | None


class Run(NamedTuple):
    """Blocks that stood one behind the other, front to back, and the place of the last of them."""

    place: Place
    blocks: Sequence[KVCacheBlock]


class Hold(NamedTuple):
    """Blocks with a reference of ours: those that were in use, the deepest first, and those that waited, by runs; and
    the chunk that the first of them hangs below."""

    in_use: list[KVCacheBlock]
    runs: list[Run]
    parent: list[Place]


def _place(block: KVCacheBlock) -> Place:
    return Place(block.block_id, block.block_hash)


class VllmDevice:
    """The blocks of all groups; `group_ids[i]` is vLLM's number of the planner's group i, `hashes_per_chunk` how many
    block hashes of a request make a chunk.

    vLLM hashes a block when it allocates it, before the step that computes it. While such a step is decided, `awaited`
    tells the hashes whose bytes are still to come: blocks in use are not found under them.
    """

    def __init__(
        self,
        pool: BlockPool,
        planner: HybridChunkPlanner,
        group_ids: Sequence[int],
        awaited: Callable[[], Container[bytes]] = tuple,
        hashes_per_chunk: int = 1,
    ) -> None:
        self._pool = pool
        self._planner = planner
        self.num_blocks: int = pool.num_gpu_blocks - 1
        self.null_block: int = pool.null_block.block_id
        self._hashes_per_chunk = hashes_per_chunk
        self._suffixes = [make_block_hash_with_group_id(BlockHash(b""), id) for id in group_ids]
        in_chunk = [at for at, piece in enumerate(planner.pieces) if piece.in_chunk]
        self._prefix_suffixes = tuple(self._suffixes[at] for at in in_chunk)
        ends = block_ends(planner, hashes_per_chunk)
        self._picked = sorted({*ends.values(), hashes_per_chunk - 1})
        self._at = {block: self._picked.index(end) for block, end in ends.items()}  # among the picked hashes
        # Of each prefix group: what its names end with, and the hashes of its blocks of a chunk. The last comes first.
        self._chunk_groups = [
            (self._suffixes[at], [-1, *[self._at[block] for block in reversed(ends) if block[0] == at][1:]])
            for at in in_chunk
        ]
        self._has_inner = any(len(blocks) > 1 for _, blocks in self._chunk_groups)
        self._hashes: HashesOnDevice | None = None
        if in_chunk and len(self._picked) > 1:
            self._hashes = HashesOnDevice(self._picked, hashes_per_chunk, self._has_an_end)
        self._awaited = awaited
        self._given: Container[int] = ()
        self._checkpoints = _Checkpoints()
        self._seen: dict[bytes, Sequence[bytes]] = {}  # without prefix groups: the latest, the last seen last
        self._places = Places(self._is_at)

    @property
    def num_waiting(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def saw(self, hashes: Sequence[bytes], start: int, stop: int) -> None:
        """The device has chunks [start, stop) of a request with these block hashes."""
        if self._hashes is not None:
            self._hashes.add(hashes, start, stop)
        elif not self._prefix_suffixes:
            self._see(hashes, start, stop)

    def _see(self, hashes: Sequence[bytes], start: int, stop: int) -> None:
        for first in range(start * self._hashes_per_chunk, stop * self._hashes_per_chunk, self._hashes_per_chunk):
            key = hashes[first + self._picked[-1]]
            self._seen.pop(key, None)
            self._seen[key] = tuple(hashes[first + at] for at in self._picked) if len(self._picked) > 1 else ()
        for key in list(islice(self._seen, max(0, len(self._seen) - SEEN_PER_BLOCK * self.num_blocks))):
            del self._seen[key]

    def find(self, key: bytes) -> Sequence[int] | None:
        return self.find_all((key,))[0]

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        if not self._prefix_suffixes:
            return [() if key in self._seen else None for key in keys]
        if self._has_inner or len(self._chunk_groups) > 1:
            return [self._chunk(key) for key in keys]
        (suffix,) = self._prefix_suffixes
        get_one_block = self._pool.cached_block_hash_to_block.get_one_block
        found = map(get_one_block, [key + suffix for key in keys])
        awaited, given = self._awaited(), self._given
        return [
            None
            if block is None or (block.ref_cnt and (key in awaited or block.block_id in given))
            else (block.block_id,)
            for key, block in zip(keys, found, strict=True)
        ]

    def _chunk(self, key: bytes) -> Sequence[int] | None:
        """The blocks of a chunk of several: group by group, in token order."""
        hashes = self._picked_hashes(key) if self._has_inner else (key,)
        if hashes is None:
            return None
        blocks: list[int] = []
        for suffix, ends in self._chunk_groups:
            found: list[int] = []
            behind = None
            for at in ends:
                behind = self._copy(hashes[at] + suffix, behind)
                if behind is None or self._is_hidden(behind, hashes[at]):
                    return None
                found.append(behind.block_id)
            blocks += reversed(found)
        return blocks

    def _copy(self, name: bytes, behind: KVCacheBlock | None) -> KVCacheBlock | None:
        """A block with this name: of several the one that waits right behind that block, if it does.

        Chunks that part within have the blocks before in common, by name, and each has copies of its own. To store one
        chunk, and put its blocks back in front, must not take the others' along.
        """
        if behind is not None:
            near: KVCacheBlock | None = behind.next_free_block
            if near is not None and near.block_hash == name:
                return near
        found: KVCacheBlock | None = self._pool.cached_block_hash_to_block.get_one_block(name)
        return found

    def _picked_hashes(self, key: bytes) -> Sequence[bytes] | None:
        """Those that blocks of the chunk with this key end with; None if they are not known."""
        if len(self._picked) == 1:
            return (key,)
        return (self._seen if self._hashes is None else self._hashes.by_key).get(key)

    def _has_an_end(self, key: bytes) -> bool:
        """Whether some group has a block that ends with this chunk. Blocks within may be other chunks'."""
        get_one_block = self._pool.cached_block_hash_to_block.get_one_block
        return any(get_one_block(key + suffix) for suffix in self._suffixes)

    @contextmanager
    def given(self, blocks: Container[int]) -> Iterator[None]:
        """In this context, blocks that a request has just been given are not taken for somebody else's."""
        self._given = blocks
        try:
            yield
        finally:
            self._given = ()

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        pieces = self._pieces(checkpoint)
        if pieces is None:
            self._checkpoints.forget(checkpoint)
            return None
        names = [name for name, _ in pieces]
        # Its chunk may leave first, and it could not be stored without.
        names += [BlockHashWithGroupId(checkpoint.tail[-1] + suffix) for suffix in self._prefix_suffixes]
        if self._checkpoints.remember(checkpoint, names):
            self._checkpoints.sweep(lambda oldest: self._pieces(oldest) is not None)
        if any(self._is_hidden(block, get_block_hash(name)) for name, block in pieces):
            return None
        return [(block.block_id,) for _, block in pieces]

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        suffixes, needed_by = self._prefix_suffixes, self._checkpoints.needed_by
        # Where blocks of prefix groups are within chunks: those that are not. None: all of them end one.
        chunks = self._hashes.by_key if self._hashes is not None and self._has_inner else None
        for block in self._pool.free_block_queue.iter_blocks_after(None):  # many of them: no call more than needed
            name = block.block_hash
            if name is None:
                yield block.block_id, None
                continue
            if is_chunk := name.endswith(suffixes) and (chunks is None or name[:-GROUP_ID_BYTES] in chunks):
                yield block.block_id, name[:-GROUP_ID_BYTES]
            if name in needed_by:
                for key in needed_by[name]:
                    yield block.block_id, key
            elif not is_chunk:
                yield block.block_id, None

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        here = self._pool.blocks[block]
        return not here.ref_cnt and (key in self._keys(here) if key is not None else not self._keys(here))

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Hold:
        everywhere = self._pool.blocks
        held = [everywhere[block] for block in reversed(blocks)]
        in_use = [block for block in held if block.ref_cnt]
        waiting = [block for block in held if not block.ref_cnt] if len(in_use) < len(held) else ()
        self._pool.touch(in_use)
        return Hold(in_use, self._take_runs(waiting), [_place(everywhere[block]) for block in parent])

    def _take_runs(self, waiting: Sequence[KVCacheBlock]) -> list[Run]:
        """Blocks out of the queue, by runs of those that stand one behind the other: of a prompt, one for each group.

        They come chunk by chunk and stand group by group, so runs are found by the queue's links.
        """
        runs: list[Run] = []
        left = {block.block_id for block in waiting}
        for first in waiting:
            if first.block_id not in left:
                continue
            while first.prev_free_block.block_id in left and not self._ends_run(first.prev_free_block):
                first = first.prev_free_block
            run, before = [first], first.prev_free_block
            while not self._ends_run(run[-1]) and run[-1].next_free_block.block_id in left:
                run.append(run[-1].next_free_block)
            left.difference_update(block.block_id for block in run)
            place = _place(run[-1])
            is_first = before is self._pool.free_block_queue.fake_free_list_head
            self._places.leave(place, FRONT if is_first else _place(before))
            self._pool.touch(run)
            runs.append(Run(place, run))
        return runs

    def _ends_run(self, block: KVCacheBlock) -> bool:
        """Whether something is held that stood right behind it, and comes back to this very place."""
        return len(self._places) > 0 and self._places.is_before(_place(block))

    def release(self, hold: Hold) -> None:
        """What was in use goes to the end deepest first, as vLLM frees a request: no chunk must outlive its parent."""
        last = list(hold.in_use)
        for run in hold.runs:
            back = [block for block in run.blocks if block.ref_cnt == 1 and block.block_hash is not None]
            if len(back) < len(run.blocks):
                last += [block for block in run.blocks if block.ref_cnt > 1 or block.block_hash is None]
            if not back:
                self._places.forget(run.place)
                continue
            before = self._waiting_behind(self._places.back(run.place))
            for block in back:
                self._link_in(block, before)
                before = block
        parent = next((place for place in hold.parent if self._is_at(place)), None) if last else None
        if parent is None:
            self._pool.free_blocks(last)
            return
        for block in last:
            if block.ref_cnt == 1:
                self._link_in(block, self._pool.blocks[parent.block].prev_free_block)
            else:
                block.ref_cnt -= 1

    def _waiting_behind(self, place: Hashable) -> KVCacheBlock:
        """The block of a place; at the front, the last of those without a hash, which stay first."""
        if isinstance(place, Place):
            block: KVCacheBlock = self._pool.blocks[place.block]
            return block
        queue = self._pool.free_block_queue
        before: KVCacheBlock = queue.fake_free_list_head
        while before.next_free_block is not queue.fake_free_list_tail and before.next_free_block.block_hash is None:
            before = before.next_free_block
        return before

    def _link_in(self, block: KVCacheBlock, before: KVCacheBlock) -> None:
        """The last reference ends, and the block waits behind that one: by hand, as the queue has no verb for its
        middle.
        """
        block.ref_cnt -= 1
        block.prev_free_block, block.next_free_block = before, before.next_free_block
        before.next_free_block.prev_free_block = block
        before.next_free_block = block
        self._pool.free_block_queue.num_free_blocks += 1

    def _is_at(self, place: Hashable) -> bool:
        """Whether the block of a place still waits, under the same hash."""
        if not isinstance(place, Place):
            return False
        block = self._pool.blocks[place.block]
        return not block.ref_cnt and block.block_hash == place.hash

    def _pieces(self, checkpoint: CheckpointAt) -> list[tuple[BlockHashWithGroupId, KVCacheBlock]] | None:
        """The blocks of a checkpoint, each with vLLM's key of it; None unless all of them are there."""
        first = checkpoint.depth - len(checkpoint.tail)
        pieces = []
        for at in self._planner.checkpoint(checkpoint.depth):
            hashes = self._picked_hashes(checkpoint.tail[at.chunk - first])
            if hashes is None:
                return None
            name = BlockHashWithGroupId(hashes[self._at[at.group, at.block]] + self._suffixes[at.group])
            block = self._pool.cached_block_hash_to_block.get_one_block(name)
            if block is None:
                return None
            pieces.append((name, block))
        return pieces

    def _is_hidden(self, block: KVCacheBlock, hash: bytes) -> bool:
        if block.block_id in self._given:
            return True
        return block.ref_cnt > 0 and hash in self._awaited()

    def _keys(self, block: KVCacheBlock) -> Sequence[bytes]:
        """Our keys of a block: that of its chunk, or those of the checkpoints that need it."""
        name = block.block_hash
        if name is None:
            return ()
        key = name[:-GROUP_ID_BYTES]
        known = self._hashes is None or not self._has_inner or key in self._hashes.by_key
        if known and name.endswith(self._prefix_suffixes):
            return (key, *self._checkpoints.that_need(name))
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
