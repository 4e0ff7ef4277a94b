"""Assumptions that the connector makes of vLLM beyond the interface of connectors, checked once, when it starts.

    connector              vLLM calls what we override
    block pool, queue      blocks of the free queue are linked by hand; a block's name is its hash and its group
    messages, metrics      fields that are read

vLLM promises none of it. A release that has changed it is refused: later the engine would stop in the middle of a
request, hand out blocks that are in use, or never find anything. What only some releases have is in `versions.py`.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from traceback import walk_stack
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from cpu_prefix_cache import ConfigurationError

POOL = (
    *("blocks", "cached_block_hash_to_block", "free_block_queue", "null_block", "num_gpu_blocks"),
    *("free_blocks", "get_new_blocks", "get_num_free_blocks", "reset_prefix_cache", "touch"),
)
QUEUE = ("fake_free_list_head", "fake_free_list_tail", "iter_blocks_after", "num_free_blocks")
BLOCK = ("block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")
BY_HASH = ("get_one_block",)
STEP = ("num_scheduled_tokens", "preempted_req_ids", "total_num_scheduled_tokens")
STEP_OUTPUT = ("finished_recving", "invalid_block_ids", "kv_connector_worker_meta")
PROMETHEUS = ("_counter_cls", "_gauge_cls", "_histogram_cls", "_labelnames")


def link_in(queue: FreeKVCacheBlockQueue, run: Sequence[KVCacheBlock], before: KVCacheBlock) -> None:
    """End the last reference to blocks, and insert them behind `before`. vLLM's queue has no method for that."""
    after = before.next_free_block
    for block in run:
        block.ref_cnt -= 1
        before.next_free_block, block.prev_free_block = block, before
        before = block
    before.next_free_block, after.prev_free_block = after, before
    queue.num_free_blocks += len(run)


def take_out(queue: FreeKVCacheBlockQueue, run: Sequence[KVCacheBlock]) -> None:
    """Give neighbours in the queue a reference, which takes them out. vLLM has a method that does it block by block."""
    before, after = run[0].prev_free_block, run[-1].next_free_block
    before.next_free_block, after.prev_free_block = after, before
    for block in run:
        block.ref_cnt += 1
        block.prev_free_block = block.next_free_block = None
    queue.num_free_blocks -= len(run)


def is_made_by_vllm(connector: KVConnectorBase_V1) -> bool:
    """Whether vLLM's factory constructs this connector for vLLM itself, and not for a connector that has others beside
    it. Called by its constructor.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    callers = [frame for frame in frames if frame.f_locals.get("self") is not connector]
    if not callers or callers[0].f_code is not KVConnectorFactory.create_connector.__code__:
        return False
    return not any(isinstance(each.f_locals.get("self"), KVConnectorBase_V1) for each in callers)


def check_overrides(connector: type) -> None:
    """Raises ConfigurationError if the connector's class has a public name that vLLM does not know: nobody calls it."""
    ours = {name for name in vars(connector) if not name.startswith("_")}
    if unknown := sorted(ours.difference(dir(KVConnectorBase_V1), dir(SupportsHMA))):
        raise _unfit(f"a connector has no {unknown[0]}")


def check_pool(pool: BlockPool) -> None:
    """Raises ConfigurationError for a pool that lacks a name of those above, or is not linked as we take it to be."""
    check_names(pool, POOL)
    check_names(pool.free_block_queue, QUEUE)
    check_names(pool.null_block, BLOCK)
    check_names(pool.cached_block_hash_to_block, BY_HASH)
    for message, names in ((SchedulerOutput, STEP), (KVConnectorOutput, STEP_OUTPUT)):
        if missing := sorted(set(names).difference(field.name for field in fields(message))):
            raise _unfit(f"{message.__name__} has no {missing[0]}")
    name, empty = make_block_hash_with_group_id(BlockHash(b"hash"), 1), make_block_hash_with_group_id(BlockHash(b""), 1)
    if name != b"hash" + empty or get_block_hash(name) != b"hash":
        raise _unfit("the name of a block is not its hash and its group, one behind the other")
    if not _can_be_put_back(pool):
        raise _unfit("FreeKVCacheBlockQueue is no list in which a block can be put back to its place")


def check_names(thing: Any, names: Iterable[str]) -> None:
    """Raises ConfigurationError if this lacks one of these attributes."""
    if missing := sorted(set(names).difference(dir(thing))):
        raise _unfit(f"{type(thing).__name__} has no {missing[0]}")


def _can_be_put_back(pool: BlockPool) -> bool:
    """Take the two blocks out that are handed out first, by hand as vLLM does, and put them back by hand."""
    queue = pool.free_block_queue
    count, before = pool.get_num_free_blocks(), list(islice(queue.iter_blocks_after(None), 3))
    run, left = before[:2], []
    for take in (pool.touch, partial(take_out, queue)):
        take(run)
        is_out = not any(each.prev_free_block or each.next_free_block for each in run)
        left.append((list(islice(queue.iter_blocks_after(None), 1)), pool.get_num_free_blocks(), is_out))
        link_in(queue, run, queue.fake_free_list_head)
    is_back = list(islice(queue.iter_blocks_after(None), 3)) == before and pool.get_num_free_blocks() == count
    return is_back and left == 2 * [(before[2:], count - len(run), True)] and not any(each.ref_cnt for each in run)


def _unfit(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"CPUPrefixCacheConnector does not fit vLLM {vllm.__version__}: {what}; use a release that it is tested with"
    )
