"""The lines proposed to vLLM in upstream.py do what `pool_view.py` does by hand."""

from functools import partial
from itertools import islice

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, init_none_hash, make_block_hash_with_group_id

from connector.vllm import pool_view
from tests.vllm import upstream

CALLS = ("hold_run", "release_run", "on_reuse")


@pytest.fixture(params=["proposed", "by hand"])
def pool(monkeypatch, request):
    """A pool of ten blocks, the first eight of which have names, with the three calls: in a vLLM to which the lines
    were added, or as the connector has them.
    """
    init_none_hash(sha256)
    pool = pool_with_the_lines(monkeypatch) if request.param == "proposed" else a_pool()
    for at, block in enumerate(order(pool)[:8]):
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"%032d" % at), 0), 16)
        pool.cached_block_hash_to_block.insert(block.block_hash, block)
    if request.param == "by hand":
        vars(pool).update({name: partial(getattr(pool_view, name), pool) for name in CALLS})
    return pool


def a_pool():
    return block_pool.BlockPool(11, enable_caching=True, hash_block_size=16)


def pool_with_the_lines(monkeypatch):
    """Its own methods make the calls where the proposal wants them."""
    for owner, name in ((kv_cache_utils, "FreeKVCacheBlockQueue"), (block_pool, "BlockPool")):
        for method, function in vars(getattr(upstream, name)).items():
            if not method.startswith("__"):
                monkeypatch.setattr(getattr(owner, name), method, function, raising=False)
    pool = a_pool()
    pool.reuse_calls = []
    take = pool.free_block_queue.popleft_n

    def popleft_n(number):  # `get_new_blocks` has taken them, and not cleared them
        blocks = take(number)
        for call in pool.reuse_calls:
            call(blocks)
        return blocks

    pool.free_block_queue.popleft_n = popleft_n
    return pool


def order(pool):
    return list(pool.free_block_queue.iter_blocks_after(None))


@pytest.mark.parametrize(("first", "count"), [(0, 3), (3, 4), (9, 1), (0, 10)])
def test_a_run_that_was_held_comes_back_to_its_place(pool, first, count):
    before = order(pool)
    run = before[first : first + count]
    pool.hold_run(run)
    assert order(pool) == before[:first] + before[first + count :]
    assert pool.get_num_free_blocks() == 10 - count and all(block.ref_cnt == 1 for block in run)
    pool.release_run(run, before[first - 1] if first else None)
    assert order(pool) == before and pool.get_num_free_blocks() == 10
    assert order(pool)[::-1] == backwards(pool)


def backwards(pool):
    found, block = [], pool.free_block_queue.fake_free_list_tail
    while (block := block.prev_free_block) is not pool.free_block_queue.fake_free_list_head:
        found.append(block)
    return found


def test_a_hold_of_today_makes_a_block_young(pool):
    """The control: it comes back to the end."""
    first, *others = order(pool)
    pool.touch([first])
    pool.free_blocks([first])
    assert order(pool) == [*others, first]


def test_a_watcher_of_reuse_gets_blocks_that_still_have_their_hashes(pool):
    shown = []
    pool.on_reuse(lambda blocks: shown.extend(block.block_hash for block in blocks))
    named = [block.block_hash for block in islice(order(pool), 3)]
    new = pool.get_new_blocks(3)
    assert shown == named and None not in shown and all(block.block_hash is None for block in new)


def test_the_proposal_has_the_three_calls(pool):
    assert {name for name in vars(upstream.BlockPool) if not name.startswith("__")} == set(CALLS)
