"""vLLM's block pool as a `Device`.

A block that waits is in the pool's free queue, with or without a hash. Blocks are handed out from the front:

    front                                                                     back
    [ no hash ][ deepest of the oldest ] ... [ its first chunk ] ... [ freed last ]
               `-- soonest_evicted walks from here along the queue's own links

A block in use has `ref_cnt > 0` and is not in the queue. A hold adds one reference: vLLM then changes neither the
block nor its hash.

The *name* of a block is what vLLM finds it by (`BlockHashWithGroupId`): its hash and the id of its group. Our *key* is
the hash alone, as in `Request.block_hashes`. A chunk has one block in each prefix group, or several where blocks are
shorter than the chunk, and is on the device while all of them are. It is represented by its last block in each group,
whose hash is the chunk's key: vLLM frees a request group by group, in either order of the groups, and each group from
its last block to its first. So the first block of a chunk to be evicted is one of these. (There is an exception: inner
blocks of several chunks may have the same name, and vLLM gives a later prompt the first of them, which may belong to
another chunk. The chunk's own inner block then keeps its place, and may be evicted before the chunk is looked at.)

    full attention of 32 tokens, full attention of 16, chunks a and b freed at once     (^ represents its chunk)

    front  [ b ][ a ] [ b, second ][ b, first ][ a, second ][ a, first ]  back          or the groups swapped
             ^    ^       ^                        ^

A checkpoint has its blocks in the other groups, and they are not freed together: blocks that a window has passed are
freed while the request runs. So each block of a checkpoint represents it, once the checkpoint was found complete: when
the first of them is about to be evicted, the whole checkpoint is stored.

In a model without prefix groups chunks have no blocks, and vLLM does not know which chunks were computed. The most
recent ones are remembered here, RECENT_PER_BLOCK for each device block.
"""

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
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
from connector.vllm.touched import link_in, take_out
from cpu_prefix_cache import Device, HybridChunkPlanner
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.places import FRONT, Places
from cpu_prefix_cache.pool.notes import Notes

GROUP_ID_BYTES = len(make_block_hash_with_group_id(BlockHash(b""), 0))
RECENT_PER_BLOCK = 64  # one state block stands for the chunks of a whole prompt; 32 MB for 5,000 blocks


class Place(NamedTuple):
    """Where a block waits. The hash tells it from a later wait of the same block with other contents."""

    block: int
    hash: bytes | None


class Run(NamedTuple):
    """Blocks that were neighbours in the free queue, front to back, and the place of the last of them."""

    place: Place
    blocks: Sequence[KVCacheBlock]


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Blocks with one added reference: those that were in use, the deepest first, and runs of those that waited.

    `parent` are the blocks of the chunk that the first held chunk hangs below.
    """

    in_use: list[KVCacheBlock]
    runs: list[Run]
    parent: list[Place]

    def blocks(self) -> Iterator[KVCacheBlock]:
        return chain(self.in_use, *(run.blocks for run in self.runs))


def _place(block: KVCacheBlock) -> Place:
    return Place(block.block_id, block.block_hash)


class VllmDevice(Device):
    """The blocks of all groups. `group_ids[i]` is vLLM's id of the planner's group i, `hashes_per_chunk` the number of
    block hashes of a request that make a chunk.

    vLLM gives a block its hash when it allocates it, before the step that computes it. `unwritten` returns the hashes
    of blocks that the step being scheduled will compute: a block in use is not found by such a hash.
    """

    def __init__(
        self,
        pool: BlockPool,
        planner: HybridChunkPlanner,
        group_ids: Sequence[int],
        unwritten: Callable[[], Container[bytes]] = tuple,
        hashes_per_chunk: int = 1,
        is_alone: bool = False,
    ) -> None:
        self._pool = pool
        self._planner = planner
        self._hashes_per_chunk = hashes_per_chunk
        self._suffixes = [make_block_hash_with_group_id(BlockHash(b""), id) for id in group_ids]
        in_chunk = [at for at, piece in enumerate(planner.pieces) if piece.in_chunk]
        self._prefix_suffixes = tuple(self._suffixes[at] for at in in_chunk)
        ends = block_ends(planner, hashes_per_chunk)
        self._picked = sorted({*ends.values(), hashes_per_chunk - 1})
        self._at = {block: self._picked.index(end) for block, end in ends.items()}  # index into the picked hashes
        # For each prefix group: the end of its names, and this index for each of its blocks of a chunk, the last first.
        self._chunk_groups = [
            (self._suffixes[at], [-1, *[self._at[block] for block in reversed(ends) if block[0] == at][1:]])
            for at in in_chunk
        ]
        self._has_inner = any(len(blocks) > 1 for _, blocks in self._chunk_groups)
        self._hashes: HashesOnDevice | None = None
        if in_chunk and len(self._picked) > 1:
            self._hashes = HashesOnDevice(self._picked, hashes_per_chunk, self._has_last_block)
        self._alone = [(id,) for id in range(pool.num_gpu_blocks)]  # made once: a step asks for thousands of them
        self._unwritten = unwritten
        self._hidden: Container[int] = ()
        self._checkpoints = _Checkpoints()
        self._recent: dict[bytes, Sequence[bytes]] = {}  # used without prefix groups; the most recent last
        self._places = Places(self._is_at)
        self._notes = Notes(pool.num_gpu_blocks)
        self._freed = set[int]()  # since the last plan
        # Else somebody writes blocks before the ranks are told of the step: vLLM zeros and states, and blocks that were
        # hit in part; another connector what it loads.
        self._is_written_last = is_alone and hashes_per_chunk == 1 and not planner.has_checkpoints
        self._holds: set[Hold] = set()  # that have not ended

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def null_block(self) -> int:
        return int(self._pool.null_block.block_id)

    @property
    def num_waiting(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def remember(self, hashes: Sequence[bytes], start: int, stop: int) -> None:
        """The device has chunks [start, stop) of a request with these block hashes."""
        if self._hashes is not None:
            self._hashes.add(hashes, start, stop)
        elif not self._prefix_suffixes:
            self._remember_recent(hashes, start, stop)

    def _remember_recent(self, hashes: Sequence[bytes], start: int, stop: int) -> None:
        for first in range(start * self._hashes_per_chunk, stop * self._hashes_per_chunk, self._hashes_per_chunk):
            key = hashes[first + self._picked[-1]]
            self._recent.pop(key, None)
            self._recent[key] = tuple(hashes[first + at] for at in self._picked) if len(self._picked) > 1 else ()
        for key in list(islice(self._recent, max(0, len(self._recent) - RECENT_PER_BLOCK * self.num_blocks))):
            del self._recent[key]

    def find(self, key: bytes) -> Sequence[int] | None:
        return self.find_all((key,))[0]

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        if not self._prefix_suffixes:
            return [() if key in self._recent else None for key in keys]
        if self._has_inner or len(self._chunk_groups) > 1:
            return [self._chunk(key) for key in keys]
        (suffix,) = self._prefix_suffixes
        get_one_block = self._pool.cached_block_hash_to_block.get_one_block
        found = [get_one_block(key + suffix) for key in keys]
        is_used = any(block is not None and block.ref_cnt for block in found)
        unwritten, hidden, alone = self._unwritten() if is_used else (), self._hidden, self._alone
        return [
            None
            if block is None or (block.ref_cnt and (key in unwritten or block.block_id in hidden))
            else alone[block.block_id]
            for key, block in zip(keys, found, strict=True)
        ]

    def _chunk(self, key: bytes) -> Sequence[int] | None:
        """The blocks of a chunk that has several: group by group, in token order."""
        hashes = self._picked_hashes(key) if self._has_inner else (key,)
        if hashes is None:
            return None
        blocks: list[int] = []
        for suffix, ends in self._chunk_groups:
            found: list[int] = []
            behind = None
            for at in ends:
                behind = self._find_after(hashes[at] + suffix, behind)
                if behind is None or self._is_hidden(behind, hashes[at]):
                    return None
                found.append(behind.block_id)
            blocks += reversed(found)
        return blocks

    def _find_after(self, name: bytes, behind: KVCacheBlock | None) -> KVCacheBlock | None:
        """A block with this name. If several have it, the one that follows `behind` in the free queue, if it does.

        Two chunks that differ only after their first blocks have inner blocks of the same name, each a copy of its own.
        A store of one chunk must hold that chunk's copies, since `release` puts what was held back in the queue.
        """
        if behind is not None:
            near: KVCacheBlock | None = behind.next_free_block
            if near is not None and near.block_hash == name:
                return near
        found: KVCacheBlock | None = self._pool.cached_block_hash_to_block.get_one_block(name)
        return found

    def _picked_hashes(self, key: bytes) -> Sequence[bytes] | None:
        """The hashes of all blocks of the chunk with this key; None if they are not known."""
        if len(self._picked) == 1:
            return (key,)
        return (self._recent if self._hashes is None else self._hashes.by_key).get(key)

    def _has_last_block(self, key: bytes) -> bool:
        """Whether some group has the last block of this chunk. Inner blocks may belong to other chunks."""
        get_one_block = self._pool.cached_block_hash_to_block.get_one_block
        return any(get_one_block(key + suffix) for suffix in self._suffixes)

    @contextmanager
    def hiding(self, blocks: Container[int]) -> Iterator[None]:
        """In this context `blocks` are not found: a request was just given them, and they hold no KV yet."""
        self._hidden = blocks
        try:
            yield
        finally:
            self._hidden = ()

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        pieces = self._pieces(checkpoint)
        if pieces is None:
            self._checkpoints.forget(checkpoint)
            return None
        names = [name for name, _ in pieces]
        # The blocks of its chunk represent it too: without the chunk the checkpoint cannot be stored.
        names += [BlockHashWithGroupId(checkpoint.tail[-1] + suffix) for suffix in self._prefix_suffixes]
        if self._checkpoints.remember(checkpoint, names):
            self._checkpoints.sweep(lambda oldest: self._pieces(oldest) is not None)
        if any(self._is_hidden(block, get_block_hash(name)) for name, block in pieces):
            return None
        return [(block.block_id,) for _, block in pieces]

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        return self._evicted_after(None)

    def evicted_after(self, block: int) -> Iterator[tuple[int, bytes | None]]:
        here = self._pool.blocks[block]
        return chain(((block, key) for key in self._keys(here)), self._evicted_after(here))

    def _evicted_after(self, before: KVCacheBlock | None) -> Iterator[tuple[int, bytes | None]]:
        suffixes, needed_by = self._prefix_suffixes, self._checkpoints.needed_by
        # The keys of chunks, if prefix groups have inner blocks. None: every block is the last one of a chunk.
        chunks = self._hashes.by_key if self._hashes is not None and self._has_inner else None
        queue = self._pool.free_block_queue
        block, end = (queue.fake_free_list_head if before is None else before), queue.fake_free_list_tail
        while (block := block.next_free_block) is not end:  # for thousands of blocks
            name = block.block_hash
            if name is None:
                yield block.block_id, None
                continue
            if is_chunk := name.endswith(suffixes) and (chunks is None or name[:-GROUP_ID_BYTES] in chunks):
                yield block.block_id, name[:-GROUP_ID_BYTES]
            if needed_by and name in needed_by:
                for key in needed_by[name]:
                    yield block.block_id, key
            elif not is_chunk:
                yield block.block_id, None

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        here = self._pool.blocks[block]
        return not here.ref_cnt and (key in self._keys(here) if key is not None else not self._keys(here))

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        if not self._is_written_last:
            return None
        if not self._notes.are_taken:
            self._note_from_now_on()
        return self._notes.take(self.find_all)

    def were_used(self, blocks: Collection[int]) -> bool:
        return not self._freed.isdisjoint(blocks)

    def step_planned(self) -> None:
        """A step was planned: it may use what is freed from now on."""
        self._freed.clear()

    def _note_from_now_on(self) -> None:
        hand_out, free = self._pool.get_new_blocks, self._pool.free_blocks

        def noting(num_blocks: int) -> list[KVCacheBlock]:
            leaving = self._next_chunks(num_blocks)
            new: list[KVCacheBlock] = hand_out(num_blocks)
            self._notes.update(leaving)
            return new

        def noting_freed(blocks: Iterable[KVCacheBlock]) -> None:
            freed = list(blocks)
            self._freed.update([block.block_id for block in freed])
            free(freed)

        self._pool.get_new_blocks, self._pool.free_blocks = noting, noting_freed

    def _next_chunks(self, num_blocks: int) -> dict[bytes, Sequence[int]]:
        """The chunks in the blocks that are handed out next, each with all its blocks."""
        order = islice(self._evicted_after(None), num_blocks)  # without checkpoints each block comes once
        if len(self._chunk_groups) == 1:
            alone = self._alone
            return {key: alone[block] for block, key in order if key is not None}
        keys = [key for _, key in order if key is not None]
        return {key: here for key, here in zip(keys, self.find_all(keys), strict=True) if here is not None}

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Hold:
        everywhere = self._pool.blocks
        held = [everywhere[block] for block in reversed(blocks)]
        in_use = [block for block in held if block.ref_cnt]
        waiting = [block for block in held if not block.ref_cnt] if len(in_use) < len(held) else ()
        self._pool.touch(in_use)
        hold = Hold(in_use, self._take_runs(waiting), [_place(everywhere[block]) for block in parent])
        self._holds.add(hold)
        return hold

    def _take_runs(self, waiting: Sequence[KVCacheBlock]) -> list[Run]:
        """Take blocks out of the queue, in runs of neighbours: of a prompt, about one run for each group.

        `waiting` is ordered by chunk and the queue by group, so runs are found by the queue's links. A run ends where
        held blocks will return right behind it.
        """
        runs: list[Run] = []
        left = {block.block_id for block in waiting}
        ends = {place.block for place in self._places.with_held_behind() if isinstance(place, Place)}
        for first in waiting:
            if first.block_id not in left:
                continue
            while (before := first.prev_free_block).block_id in left and before.block_id not in ends:
                first = before
            run, last = [first], first
            while last.block_id not in ends and (last := last.next_free_block).block_id in left:
                run.append(last)
            left.difference_update([block.block_id for block in run])
            place = _place(run[-1])
            is_first = before is self._pool.free_block_queue.fake_free_list_head
            self._places.leave(place, FRONT if is_first else _place(before))
            take_out(self._pool.free_block_queue, run)
            runs.append(Run(place, run))
        return runs

    def release(self, hold: Hold) -> None:
        """Blocks that were in use go to the end, the deepest first, as vLLM frees a request: a chunk must be evicted
        before its parent.
        """
        self._holds.remove(hold)
        last = list(hold.in_use)
        for run in hold.runs:
            back = [block for block in run.blocks if block.ref_cnt == 1 and block.block_hash is not None]
            if len(back) < len(run.blocks):
                last += [block for block in run.blocks if block.ref_cnt > 1 or block.block_hash is None]
            if not back:
                self._places.forget(run.place)
                continue
            link_in(self._pool.free_block_queue, back, self._predecessor(self._places.back(run.place)))
        parent = next((place for place in hold.parent if self._is_at(place)), None) if last else None
        if parent is None:
            self._pool.free_blocks(last)
            return
        for block in last:
            if block.ref_cnt == 1:
                link_in(self._pool.free_block_queue, (block,), self._pool.blocks[parent.block].prev_free_block)
            else:
                block.ref_cnt -= 1

    @property
    def holds_any(self) -> bool:
        """Whether any block is held."""
        return any(True for hold in self._holds for _ in hold.blocks())

    @contextmanager
    def without_holds(self) -> Iterator[None]:
        """In this context vLLM counts a block that is only held as one that waits. It is not to hand out any."""
        queue = self._pool.free_block_queue
        held = [block for hold in self._holds for block in hold.blocks()]
        for block in held:
            block.ref_cnt -= 1
            queue.num_free_blocks += not block.ref_cnt
        try:
            yield
        finally:
            for block in held:
                queue.num_free_blocks -= not block.ref_cnt
                block.ref_cnt += 1

    def _predecessor(self, place: Hashable) -> KVCacheBlock:
        """The block to link a run behind. At the front it is the last block without a hash, as those stay first."""
        if isinstance(place, Place):
            block: KVCacheBlock = self._pool.blocks[place.block]
            return block
        queue = self._pool.free_block_queue
        before: KVCacheBlock = queue.fake_free_list_head
        while before.next_free_block is not queue.fake_free_list_tail and before.next_free_block.block_hash is None:
            before = before.next_free_block
        return before

    def _is_at(self, place: Hashable) -> bool:
        """Whether the block of a place still waits, with the same hash."""
        if not isinstance(place, Place):
            return False
        block = self._pool.blocks[place.block]
        return not block.ref_cnt and block.block_hash == place.hash

    def _pieces(self, checkpoint: CheckpointAt) -> list[tuple[BlockHashWithGroupId, KVCacheBlock]] | None:
        """The blocks of a checkpoint with their names; None unless all of them are on the device."""
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
        if block.block_id in self._hidden:
            return True
        return block.ref_cnt > 0 and hash in self._unwritten()

    def _keys(self, block: KVCacheBlock) -> Sequence[bytes]:
        """The keys that a block represents: of its chunk, and of the checkpoints that need it."""
        name = block.block_hash
        if name is None:
            return ()
        key = name[:-GROUP_ID_BYTES]
        known = self._hashes is None or not self._has_inner or key in self._hashes.by_key
        if known and name.endswith(self._prefix_suffixes):
            return (key, *self._checkpoints.that_need(name))
        return self._checkpoints.that_need(name)


class _Checkpoints:
    """Which checkpoints need a block, by its name.

    With each new checkpoint the two that were checked longest ago are checked again, and forgotten if they have left
    the device.
    """

    def __init__(self) -> None:
        self.needed_by: dict[BlockHashWithGroupId, list[bytes]] = {}
        self._names: dict[bytes, Sequence[BlockHashWithGroupId]] = {}
        self._oldest: dict[bytes, CheckpointAt] = {}  # by the time of their last check

    def __len__(self) -> int:
        return len(self._names)

    def that_need(self, name: BlockHashWithGroupId) -> Sequence[bytes]:
        return self.needed_by.get(name, ())

    def remember(self, checkpoint: CheckpointAt, names: Sequence[BlockHashWithGroupId]) -> bool:
        """Returns whether the checkpoint is new."""
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
