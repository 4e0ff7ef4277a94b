"""vLLM's block pool as a `Device`.

    front of vLLM's free queue                                                back
    [ no hash ][ deepest of the oldest ] ... [ its first chunk ] ... [ freed last ]
               `-- soonest_evicted walks from here, in the order of eviction

Blocks have numbers and *names* (`pool_view.py`). The name is a hash and the suffix of a group. Our *key* is the hash
alone, as in `Request.block_hashes`. A chunk has one block in each prefix group, or several where blocks are shorter
than the chunk, and is on the device while all of them are. It is represented by its last block in each group, whose
hash is the chunk's key: vLLM frees a request group by group, in either order of the groups, and each group from its
last block to its first. So the first block of a chunk to be evicted is one of these. (There is an exception: inner
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

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice

from connector.vllm.keys import HashesOnDevice, block_ends
from connector.vllm.pool_view import SUFFIX_BYTES, Hold, PoolView, suffix_of
from cpu_prefix_cache import Device
from cpu_prefix_cache.deciding import CheckpointAt, HybridChunkPlanner, Notes, checkpoint_key

RECENT_PER_BLOCK = 64  # one state block stands for the chunks of a whole prompt; 32 MB for 5,000 blocks


class VllmDevice(Device):
    """The blocks of all groups. `group_ids[i]` is vLLM's id of the planner's group i, `hashes_per_chunk` the number of
    block hashes of a request that make a chunk.

    vLLM gives a block its hash when it allocates it, before the step that computes it. `unwritten` returns the hashes
    of blocks that the step being scheduled will compute: a block in use is not found by such a hash. Where one step
    `overlaps` the next, vLLM frees blocks when the steps that use them have ended (`defer_block_free`); but not those
    that a window has passed.
    """

    def __init__(
        self,
        pool: PoolView,
        planner: HybridChunkPlanner,
        group_ids: Sequence[int],
        unwritten: Callable[[], Container[bytes]] = tuple,
        hashes_per_chunk: int = 1,
        is_alone: bool = False,
        overlaps: bool = False,
    ) -> None:
        self._pool = pool
        self._planner = planner
        self._hashes_per_chunk = hashes_per_chunk
        self._suffixes = [suffix_of(id) for id in group_ids]
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
        self._alone = [(id,) for id in range(pool.num_blocks)]  # made once: a step asks for thousands of them
        self._unwritten = unwritten
        self._hidden: Container[int] = ()
        self._checkpoints = _Checkpoints()
        self._recent: dict[bytes, Sequence[bytes]] = {}  # used without prefix groups; the most recent last
        self._notes = Notes(pool.num_blocks)
        self._overlaps = overlaps
        # Whether the ranks have a plan before anybody uses what its step hands out. Else somebody writes blocks before:
        # vLLM zeros and states, and blocks that were hit in part; another connector what it loads. Or a chunk is handed
        # out in part, and a step uses what is left.
        is_one_block = hashes_per_chunk == 1 and len(in_chunk) == 1
        self.plan_comes_first = is_alone and is_one_block and not planner.has_checkpoints

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks - 1

    @property
    def null_block(self) -> int:
        return self._pool.null_block

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

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
        found, any_used = self._pool.find_all(keys, suffix)
        if not any(found):
            return [None] * len(found)
        unwritten = self._unwritten() if any_used else ()
        is_used, hidden, alone = self._pool.is_used, self._hidden, self._alone
        return [
            None if block is None or ((key in unwritten or block in hidden) and is_used(block)) else alone[block]
            for key, block in zip(keys, found, strict=True)
        ]

    def _chunk(self, key: bytes) -> Sequence[int] | None:
        """The blocks of a chunk that has several: group by group, in token order.

        Two chunks that differ only after their first blocks have inner blocks of the same name, each a copy of its own.
        A store of one chunk must hold that chunk's copies, since `release` puts what was held back in the queue.
        """
        hashes = self._picked_hashes(key) if self._has_inner else (key,)
        if hashes is None:
            return None
        blocks: list[int] = []
        for suffix, ends in self._chunk_groups:
            found: list[int] = []
            behind = None
            for at in ends:
                behind = self._pool.find(hashes[at] + suffix, behind)
                if behind is None or self._is_hidden(behind, hashes[at]):
                    return None
                found.append(behind)
            blocks += reversed(found)
        return blocks

    def _picked_hashes(self, key: bytes) -> Sequence[bytes] | None:
        """The hashes of all blocks of the chunk with this key; None if they are not known."""
        if len(self._picked) == 1:
            return (key,)
        return (self._recent if self._hashes is None else self._hashes.by_key).get(key)

    def _has_last_block(self, key: bytes) -> bool:
        """Whether some group has the last block of this chunk. Inner blocks may belong to other chunks."""
        return any(self._pool.find(key + suffix) is not None for suffix in self._suffixes)

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
        names += [checkpoint.tail[-1] + suffix for suffix in self._prefix_suffixes]
        if self._checkpoints.remember(checkpoint, names):
            self._checkpoints.sweep(lambda oldest: self._pieces(oldest) is not None)
        if any(self._is_hidden(block, name[:-SUFFIX_BYTES]) for name, block in pieces):
            return None
        return [self._alone[block] for _, block in pieces]

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        return self._evicted_after(None)

    def evicted_after(self, block: int) -> Iterator[tuple[int, bytes | None]]:
        return chain(((block, key) for key in self._keys(block)), self._evicted_after(block))

    def _evicted_after(self, before: int | None) -> Iterator[tuple[int, bytes | None]]:
        suffixes, needed_by = self._prefix_suffixes, self._checkpoints.needed_by
        # The keys of chunks, if prefix groups have inner blocks. None: every block is the last one of a chunk.
        chunks = self._hashes.by_key if self._hashes is not None and self._has_inner else None
        for block, name in self._pool.in_eviction_order(before):  # for thousands of blocks
            if name is None:
                yield block, None
                continue
            if is_chunk := name.endswith(suffixes) and (chunks is None or name[:-SUFFIX_BYTES] in chunks):
                yield block, name[:-SUFFIX_BYTES]
            if needed_by and name in needed_by:
                for key in needed_by[name]:
                    yield block, key
            elif not is_chunk:
                yield block, None

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        if self._pool.is_used(block):
            return False
        keys = self._keys(block)
        return key in keys if key is not None else not keys

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        if not self.plan_comes_first:
            return None
        if not self._notes.are_taken:
            self._note_from_now_on()
        return self._notes.take(self.find_all)

    @property
    def frees_after_use(self) -> bool:
        return self._overlaps and self.plan_comes_first

    def _note_from_now_on(self) -> None:
        self._pool.on_reuse(lambda leaving: self._notes.update(self._chunks_in(leaving)))

    def _chunks_in(self, leaving: Mapping[bytes, int]) -> dict[bytes, Sequence[int]]:
        """The chunks in these blocks, each with all its blocks. Without checkpoints each block with a name is one."""
        named: dict[bytes, Sequence[int]] = {
            name[:-SUFFIX_BYTES]: self._alone[block] for name, block in leaving.items()
        }
        if len(self._chunk_groups) == 1:
            return named
        keys = list(named)
        return {key: here for key, here in zip(keys, self.find_all(keys), strict=True) if here is not None}

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Hold:
        return self._pool.hold(blocks, parent)

    def release(self, hold: Hold) -> None:
        self._pool.release(hold)

    def _pieces(self, checkpoint: CheckpointAt) -> list[tuple[bytes, int]] | None:
        """The blocks of a checkpoint with their names; None unless all of them are on the device."""
        first = checkpoint.depth - len(checkpoint.tail)
        pieces = []
        for at in self._planner.checkpoint(checkpoint.depth):
            hashes = self._picked_hashes(checkpoint.tail[at.chunk - first])
            if hashes is None:
                return None
            name = hashes[self._at[at.group, at.block]] + self._suffixes[at.group]
            block = self._pool.find(name)
            if block is None:
                return None
            pieces.append((name, block))
        return pieces

    def _is_hidden(self, block: int, hash: bytes) -> bool:
        if block in self._hidden:
            return True
        return self._pool.is_used(block) and hash in self._unwritten()

    def _keys(self, block: int) -> Sequence[bytes]:
        """The keys that a block represents: of its chunk, and of the checkpoints that need it."""
        name = self._pool.name(block)
        if name is None:
            return ()
        key = name[:-SUFFIX_BYTES]
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
        self.needed_by: dict[bytes, list[bytes]] = {}
        self._names: dict[bytes, Sequence[bytes]] = {}
        self._oldest: dict[bytes, CheckpointAt] = {}  # by the time of their last check

    def __len__(self) -> int:
        return len(self._names)

    def that_need(self, name: bytes) -> Sequence[bytes]:
        return self.needed_by.get(name, ())

    def remember(self, checkpoint: CheckpointAt, names: Sequence[bytes]) -> bool:
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
