"""vLLM's block pool, and the one file that names what vLLM's pool and its queue are made of.

Blocks that wait are in the pool's free queue, with or without a hash. They are handed out from the front:

    front                                                                     back
    [ no hash ][ deepest of the oldest ] ... [ its first chunk ] ... [ freed last ]

A block in use has `ref_cnt > 0` and is not in the queue. A hold adds one reference: vLLM then changes neither the
block nor its hash. What was held comes back to where it waited.

The *name* of a block is what vLLM finds it by (`BlockHashWithGroupId`): a hash, and behind it the suffix of a group.

`hold_run`, `release_run` and `on_reuse` are what vLLM's own pool lacks (tests/vllm/upstream.py proposes them).
vLLM promises nothing of what they do by hand. `check_pool` refuses a release that has changed it: later the engine
would hand out blocks that are in use, or never find anything.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_block_hash, make_block_hash_with_group_id

from connector.vllm.touched import check_names, misfit
from cpu_prefix_cache.deciding import FRONT, Places

POOL = (
    "blocks",
    "cached_block_hash_to_block",
    "free_block_queue",
    "null_block",
    "num_gpu_blocks",
    "free_blocks",
    "get_new_blocks",
    "get_num_free_blocks",
    "reset_prefix_cache",
    "touch",
)
QUEUE = ("fake_free_list_head", "fake_free_list_tail", "iter_blocks_after", "num_free_blocks")
BLOCK = ("block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")
BY_HASH = ("get_one_block",)


class Place(NamedTuple):
    """Where a block waits. The name tells it from a later wait of the same block with other contents."""

    block: int
    name: bytes | None


class WaitingRun(NamedTuple):
    """Blocks that were neighbours in the free queue, front to back, and the place of the last of them."""

    place: Place
    blocks: Sequence[KVCacheBlock]


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Blocks with one added reference: those that were in use, the deepest first, and runs of those that waited.

    `parent` are the blocks of the chunk that the first held chunk hangs below.
    """

    in_use: list[KVCacheBlock]
    runs: list[WaitingRun]
    parent: list[Place]

    def blocks(self) -> Iterator[KVCacheBlock]:
        return chain(self.in_use, *(run.blocks for run in self.runs))


class PoolView:
    """Blocks by their numbers and names; those that wait in the order of eviction; and holds on blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._places = Places(self._is_at)
        self._holds: set[Hold] = set()  # that have not ended

    @property
    def num_blocks(self) -> int:
        """All of them, the null block included."""
        return int(self._pool.num_gpu_blocks)

    @property
    def null_block(self) -> int:
        return int(self._pool.null_block.block_id)

    @property
    def num_waiting(self) -> int:
        return int(self._pool.get_num_free_blocks())

    # One block

    def name(self, block: int) -> bytes | None:
        name: bytes | None = self._pool.blocks[block].block_hash
        return name

    def is_used(self, block: int) -> bool:
        return bool(self._pool.blocks[block].ref_cnt > 0)

    # All blocks

    def find(self, name: bytes, behind: int | None = None) -> int | None:
        """A block with this name. If several have it, the one that waits right behind a given block, if it does."""
        near = None if behind is None else self._pool.blocks[behind].next_free_block
        if near is None or near.block_hash != name:
            near = self._pool.cached_block_hash_to_block.get_one_block(name)
        return None if near is None else int(near.block_id)

    def find_all(self, keys: Iterable[bytes], suffix: bytes) -> tuple[list[int | None], bool]:
        """Blocks of one group, and whether any of them is in use."""
        get = self._pool.cached_block_hash_to_block.get_one_block
        found = [get(key + suffix) for key in keys]
        if not any(found):
            return found, False
        is_used = any(block is not None and block.ref_cnt for block in found)
        return [None if block is None else block.block_id for block in found], is_used

    def in_eviction_order(self, after: int | None = None) -> Iterator[tuple[int, bytes | None]]:
        """The blocks that wait, with their names: all of them, or those behind one of them."""
        queue = self._pool.free_block_queue
        block, end = queue.fake_free_list_head if after is None else self._pool.blocks[after], queue.fake_free_list_tail
        while (block := block.next_free_block) is not end:  # for thousands of blocks
            yield block.block_id, block.block_hash

    def on_reuse(self, call: Callable[[Mapping[bytes, int]], None]) -> None:
        """Have blocks passed by their names, those that have one, right before they are handed out."""
        on_reuse(
            self._pool,
            lambda blocks: call({name: block.block_id for block in blocks if (name := block.block_hash) is not None}),
        )

    # Holds

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Hold:
        everywhere = self._pool.blocks
        held = [everywhere[block] for block in reversed(blocks)]
        in_use = [block for block in held if block.ref_cnt]
        waiting = [block for block in held if not block.ref_cnt] if len(in_use) < len(held) else ()
        self._pool.touch(in_use)
        hold = Hold(in_use, self._take_runs(waiting), [_place(everywhere[block]) for block in parent])
        self._holds.add(hold)
        return hold

    def _take_runs(self, waiting: Sequence[KVCacheBlock]) -> list[WaitingRun]:
        """Take blocks out of the queue, in runs of neighbours: of a prompt, about one run for each group.

        `waiting` is ordered by chunk and the queue by group, so runs are found by the queue's links. A run ends where
        held blocks will return right behind it.
        """
        runs: list[WaitingRun] = []
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
            hold_run(self._pool, run)
            runs.append(WaitingRun(place, run))
        return runs

    def release(self, hold: Hold) -> None:
        """Blocks that were in use go to the end, the deepest first, as vLLM frees a request: a chunk must be evicted
        before its parent.
        """
        self._holds.remove(hold)
        last = list(hold.in_use)
        for run in hold.runs:
            back = [block for block in run.blocks if block.ref_cnt == 1 and block.block_hash is not None]
            place = run.place
            if len(back) < len(run.blocks):
                last += [block for block in run.blocks if block.ref_cnt > 1 or block.block_hash is None]
                if not back:
                    self._places.forget(place)
                    continue
                place = _place(back[-1])
                self._places.rename(run.place, place)
            release_run(self._pool, back, self._predecessor(self._places.back(place)))
        parent = next((place for place in hold.parent if self._is_at(place)), None) if last else None
        if parent is None:
            self._pool.free_blocks(last)
            return
        for block in last:
            if block.ref_cnt == 1:
                release_run(self._pool, (block,), self._pool.blocks[parent.block].prev_free_block)
            else:
                block.ref_cnt -= 1

    def _predecessor(self, place: Hashable) -> KVCacheBlock | None:
        """The block to release a run behind. At the front it is the last one without a hash, as those stay first."""
        if isinstance(place, Place):
            block: KVCacheBlock = self._pool.blocks[place.block]
            return block
        before: KVCacheBlock | None = None
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if block.block_hash is not None:
                break
            before = block
        return before

    def _is_at(self, place: Hashable) -> bool:
        """Whether the block of a place still waits, with the same name."""
        if not isinstance(place, Place):
            return False
        block = self._pool.blocks[place.block]
        return not block.ref_cnt and block.block_hash == place.name

    # Resets

    @property
    def contents(self) -> object:
        """Another object after each reset of the device."""
        return self._pool.cached_block_hash_to_block

    def reset_around_holds(self) -> None:
        """From now on vLLM resets the device although blocks are held. It does not while a request has blocks."""
        reset: Callable[[], bool] = self._pool.reset_prefix_cache

        def reset_without_holds() -> bool:
            with self.without_holds():
                return reset()

        self._pool.reset_prefix_cache = reset_without_holds

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


# Names


def suffix_of(group_id: int) -> bytes:
    """Bytes behind the hash in the names of this group's blocks."""
    return bytes(make_block_hash_with_group_id(BlockHash(b""), group_id))


SUFFIX_BYTES = len(suffix_of(0))


def _place(block: KVCacheBlock) -> Place:
    return Place(block.block_id, block.block_hash)


# What vLLM's pool lacks


def hold_run(pool: BlockPool, run: Sequence[KVCacheBlock]) -> None:
    """Give neighbours in the queue a reference, which takes them out. vLLM has a method that does it block by block."""
    before, after = run[0].prev_free_block, run[-1].next_free_block
    before.next_free_block, after.prev_free_block = after, before
    for block in run:
        block.ref_cnt += 1
        block.prev_free_block = block.next_free_block = None
    pool.free_block_queue.num_free_blocks -= len(run)


def release_run(pool: BlockPool, run: Sequence[KVCacheBlock], before: KVCacheBlock | None) -> None:
    """End the last reference to blocks, which then wait right behind `before`; None: before all others."""
    before = pool.free_block_queue.fake_free_list_head if before is None else before
    after = before.next_free_block
    for block in run:
        block.ref_cnt -= 1
        before.next_free_block, block.prev_free_block = block, before
        before = block
    before.next_free_block, after.prev_free_block = after, before
    pool.free_block_queue.num_free_blocks += len(run)


def on_reuse(pool: BlockPool, call: Callable[[Sequence[KVCacheBlock]], None]) -> None:
    """Have `get_new_blocks` pass the blocks that it hands out, while they have their hashes."""
    hand_out: Callable[[int], list[KVCacheBlock]] = pool.get_new_blocks

    def calling(num_blocks: int) -> list[KVCacheBlock]:
        call(list(islice(pool.free_block_queue.iter_blocks_after(None), num_blocks)))
        return hand_out(num_blocks)

    pool.get_new_blocks = calling


# The check at start


def check_pool(pool: BlockPool) -> None:
    """Raises ConfigurationError for a pool that lacks a name of those above, or is not linked as we take it to be."""
    check_names(pool, POOL)
    check_names(pool.free_block_queue, QUEUE)
    check_names(pool.null_block, BLOCK)
    check_names(pool.cached_block_hash_to_block, BY_HASH)
    name, empty = make_block_hash_with_group_id(BlockHash(b"hash"), 1), make_block_hash_with_group_id(BlockHash(b""), 1)
    if name != b"hash" + empty or get_block_hash(name) != b"hash":
        raise misfit("the name of a block is not its hash and its group, one behind the other")
    if not _can_be_put_back(pool):
        raise misfit("FreeKVCacheBlockQueue is no list in which a block can be put back to its place")


def _can_be_put_back(pool: BlockPool) -> bool:
    """Take the two blocks out that are handed out first, by hand as vLLM does, and put them back by hand."""
    queue = pool.free_block_queue
    count, before = pool.get_num_free_blocks(), list(islice(queue.iter_blocks_after(None), 3))
    run, left = before[:2], []
    for take in (pool.touch, partial(hold_run, pool)):
        take(run)
        is_out = not any(each.prev_free_block or each.next_free_block for each in run)
        left.append((list(islice(queue.iter_blocks_after(None), 1)), pool.get_num_free_blocks(), is_out))
        release_run(pool, run, None)
    is_back = list(islice(queue.iter_blocks_after(None), 3)) == before and pool.get_num_free_blocks() == count
    return is_back and left == 2 * [(before[2:], count - len(run), True)] and not any(each.ref_cnt for each in run)
