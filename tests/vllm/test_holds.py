"""Blocks that the cache holds come back to where they stood in vLLM's queue."""

import random
from hashlib import sha256

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from connector.vllm.device import VllmDevice
from connector.vllm.pool_view import PoolView
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup


class Queue:
    """vLLM's pool, all of whose blocks wait under names of their own, and a device over so many groups of it."""

    def __init__(self, blocks: int, groups: int = 1) -> None:
        kinds = [PrefixGroup(name=f"full-{at}", block_tokens=16, block_bytes=64) for at in range(groups)]
        planner = HybridChunkPlanner(kinds, max_model_len=16 * blocks)
        self.pool = BlockPool(blocks + 1, True, 16)
        self.view = PoolView(self.pool)
        self.device = VllmDevice(self.view, planner, range(groups))

    def name(self, block: object, key: bytes, group: int = 0) -> None:
        block._block_hash = make_block_hash_with_group_id(BlockHash(key), group)
        self.pool.cached_block_hash_to_block.insert(block._block_hash, block)

    @property
    def order(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]


@pytest.mark.parametrize("scattered", [False, True])
def test_they_come_back_in_order_whichever_hold_ends_first(scattered):
    for seed in range(400):
        some = random.Random(seed)
        queue = Queue(some.choice([6, 12, 24]))
        blocks = queue.pool.get_new_blocks(queue.device.num_blocks)
        for block in blocks:
            queue.name(block, sha256(b"%d" % block.block_id).digest())
        some.shuffle(blocks)
        queue.pool.free_blocks(blocks)
        before, holds = queue.order, []
        for _ in range(some.randrange(5, 40)):
            here = queue.order
            if here and some.random() < 0.6:
                first = some.randrange(len(here))
                few = some.randrange(1, min(5, len(here)) + 1)
                held = sorted(some.sample(here, few), key=here.index) if scattered else here[first : first + few]
                holds.append((queue.device.hold(held[::-1]), held))
            elif holds:
                queue.device.release(holds.pop(some.randrange(len(holds)))[0])
            gone = {block for _, held in holds for block in held}
            assert queue.order == [block for block in before if block not in gone], f"seed {seed}"
        for hold, _ in holds:
            queue.device.release(hold)
        assert queue.order == before and not len(queue.view._places)


@pytest.mark.parametrize("is_used_meanwhile", [False, True])
def test_a_prompt_is_taken_in_one_run_for_each_group(is_used_meanwhile):
    """Given chunk by chunk, it stands group by group: taken block by block, 8,192 chunks took seconds to give back."""
    queue, keys = Queue(400, groups=2), [sha256(b"%d" % at).digest() for at in range(100)]
    tables = [queue.pool.get_new_blocks(len(keys)) for _ in range(2)]
    for group, table in enumerate(tables):
        for block, key in zip(table, keys, strict=True):
            queue.name(block, key, group)
    for table in tables:
        queue.pool.free_blocks(reversed(table))
    before = queue.order
    hold = queue.device.hold([block for blocks in queue.device.find_all(keys) for block in blocks])
    assert len(hold.runs) <= 2 and sum(len(run.blocks) for run in hold.runs) == 200
    if is_used_meanwhile:
        for table in tables:
            queue.pool.touch(table)
    queue.device.release(hold)
    if is_used_meanwhile:
        for table in tables:
            queue.pool.free_blocks(reversed(table))
    assert queue.order == before and not len(queue.view._places)


@pytest.mark.parametrize("runs", [[[1, 2, 3], [4]], [[1, 2, 3], [4, 5], [6]]])
@pytest.mark.parametrize("used", [[3], [2, 3], [2]])
def test_blocks_come_back_behind_a_run_of_which_a_request_uses_the_last(runs, used):
    queue = Queue(8)
    blocks = queue.pool.get_new_blocks(queue.device.num_blocks)
    for block in blocks:
        queue.name(block, sha256(b"%d" % block.block_id).digest())
    queue.pool.free_blocks(blocks)
    front, *behind = queue.order
    blocks = dict(enumerate(behind, start=1))  # by their places, from 1
    holds = [queue.device.hold([blocks[at] for at in reversed(run)]) for run in runs]
    queue.pool.touch([queue.pool.blocks[blocks[at]] for at in used])
    for hold in holds:
        queue.device.release(hold)
    assert queue.order == [front, *(block for at, block in blocks.items() if at not in used)]
    assert not len(queue.view._places)


def test_blocks_that_several_connectors_hold_do_not_count_while_none_of_them_does():
    """A block in use by others counts, too, and each has its references again."""
    queue = Queue(6)
    view, other = queue.view, PoolView(queue.pool)
    (used,) = queue.pool.get_new_blocks(1)
    holds = [view.hold([2, 3, used.block_id]), view.hold([3]), other.hold([3, 4])]
    counts = [block.ref_cnt for block in queue.pool.blocks[1:]]
    with view.without_holds():
        assert queue.pool.get_num_free_blocks() == 3
        with other.without_holds():
            assert queue.pool.get_num_free_blocks() == 5
    assert [block.ref_cnt for block in queue.pool.blocks[1:]] == counts and queue.pool.get_num_free_blocks() == 2
    for each, hold in zip([view, view, other], holds, strict=True):
        assert each.holds_any
        each.release(hold)
    assert not view.holds_any and not other.holds_any
