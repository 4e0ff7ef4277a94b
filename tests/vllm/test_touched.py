"""vLLM's internals that the connector uses are checked when it starts; a release that has changed them is refused."""

import pytest
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from connector.vllm import CPUPrefixCacheConnector, pool_view, touched, versions
from connector.vllm.metrics import CachePromMetrics
from cpu_prefix_cache import ConfigurationError
from tests.vllm.engine import BLOCK, one_group, vllm_config
from tests.vllm.test_contract import OURS, RELEASES, has


@pytest.fixture
def connector(tmp_path):
    config = vllm_config(tmp_path, cpu_bytes_to_use=2**20)
    return CPUPrefixCacheConnector(config, KVConnectorRole.SCHEDULER, one_group(80))


def a_pool(num_blocks=80):
    return BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK)


def order(pool):
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


@pytest.mark.parametrize("num_blocks", [2, 3, 80])
def test_a_pool_is_as_before_when_it_was_looked_at(num_blocks):
    pool, untouched = a_pool(num_blocks), a_pool(num_blocks)
    pool_view.check_pool(pool)
    assert order(pool) == order(untouched) and len(order(pool)) == num_blocks - 1
    assert pool.get_num_free_blocks() == num_blocks - 1 and not any(block.ref_cnt for block in pool.blocks[1:])


OWNERS = {
    (pool_view, "POOL"): "BlockPool",
    (pool_view, "QUEUE"): "FreeKVCacheBlockQueue",
    (pool_view, "BLOCK"): "KVCacheBlock",
    (pool_view, "BY_HASH"): "BlockHashToBlockMap",
    (touched, "STEP"): "SchedulerOutput",
    (touched, "STEP_OUTPUT"): "KVConnectorOutput",
    (touched, "PROMETHEUS"): "KVConnectorPromMetrics",
}


@pytest.mark.parametrize("number", RELEASES)
def test_no_release_that_we_run_with_is_refused(number):
    for (where, names), owner in OWNERS.items():
        assert set(getattr(where, names)) <= has(number, owner), owner
    added_later = {each.name for each in versions.ADDED if versions.release_of(number) < each.since}
    assert {*has(number, "KVConnectorBase_V1"), *has(number, "SupportsHMA")} | added_later >= OURS


@pytest.mark.parametrize(("where", "names"), [each for each in OWNERS if "PROMETHEUS" not in each])
def test_a_name_that_is_gone_is_refused_by_name(connector, monkeypatch, where, names):
    monkeypatch.setattr(where, names, (*getattr(where, names), "gone"))
    with pytest.raises(ConfigurationError, match=r"does not fit vLLM .*: \w+ has no gone; use a release that"):
        connector.bind_gpu_block_pool(a_pool())


class Stack(FreeKVCacheBlockQueue):
    """Hands out its links in the other direction."""

    def iter_blocks_after(self, block):
        return reversed(self.get_all_free_blocks())


class Counted(FreeKVCacheBlockQueue):
    """Has a list beside its links, which are only there for old times' sake."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self._ids = [block.block_id for block in blocks]
        self._blocks = {block.block_id: block for block in blocks}

    def remove(self, block):
        super().remove(block)
        self._ids.remove(block.block_id)

    def iter_blocks_after(self, block):
        return iter([self._blocks[id] for id in self._ids])


@pytest.mark.parametrize("kind", [Stack, Counted])
def test_a_queue_that_links_do_not_change_is_refused(connector, kind):
    pool = a_pool()
    pool.free_block_queue = kind(pool.free_block_queue.get_all_free_blocks())
    with pytest.raises(ConfigurationError, match="no list in which a block can be put back"):
        connector.bind_gpu_block_pool(pool)


OTHER_NAMES = {
    "the group in front": lambda hash, group: bytes([group]) + hash,
    "its length behind the hash": lambda hash, group: hash + bytes([len(hash), 0, 0, group]),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_another_name_of_blocks_is_refused(connector, monkeypatch, name):
    monkeypatch.setattr(pool_view, "make_block_hash_with_group_id", OTHER_NAMES[name])
    with pytest.raises(ConfigurationError, match="the name of a block is not its hash and its group"):
        connector.bind_gpu_block_pool(a_pool())


def test_a_method_that_vllm_would_not_call_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(CPUPrefixCacheConnector, "bind_block_pool", lambda self, pool: None, raising=False)
    with pytest.raises(ConfigurationError, match="a connector has no bind_block_pool"):
        CPUPrefixCacheConnector(vllm_config(tmp_path), KVConnectorRole.SCHEDULER, one_group(80))


def test_other_classes_of_metrics_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("connector.vllm.metrics.PROMETHEUS", (*touched.PROMETHEUS, "gone"))
    with pytest.raises(ConfigurationError, match="CachePromMetrics has no gone"):
        CachePromMetrics(vllm_config(tmp_path), {each: each for each in (Counter, Gauge, Histogram)}, [], {})
