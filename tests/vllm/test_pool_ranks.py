"""Engines of several ranks on the pool of a keeper: a slot has the rows of all of them, each in a lane of its own.

Ranks are simulated, under vLLM's own scheduler; or they are processes, and the keeper is one, too.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.vllm import ranks
from connector.vllm.metrics import UNKNOWN_IN_POOL, CacheCounts, CachePromMetrics
from connector.vllm.rank_pool import PoolHere
from connector.vllm.settings import Settings
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import JoinedPool
from cpu_prefix_cache.deciding import GroupCopy
from tests.stores.servers import starting
from tests.vllm.byte_ranks import BlockMemory, carried
from tests.vllm.engine import AT_ONCE, NEVER, TORN, Engine, full, head, latent, one_group, state, vllm_config, window
from tests.vllm.keeper_line import KeeperHere
from tests.vllm.servers import NodeKeeper
from tests.vllm.test_ranks import meet
from tests.vllm.test_stress import Users
from tests.vllm.two_processes import said_by

BLOCKS = 48
PROMPT = list(range(50))
LAST = 48  # the last boundary of the prompt
POOL_BYTES = 2**22
PATIENCE = 60
ADDRESS = "unix:/run/kv/kv.sock"
TYPES = {each: each for each in (Counter, Gauge, Histogram)}  # as vLLM gives them
SIZES = {  # ranks, whether they are one tensor-parallel group or stages, and their model
    "one rank": (1, True, [full()]),
    "two ranks": (2, True, [full()]),
    "three stages": (3, False, [full()]),
    "a latent on two ranks": (2, True, [latent()]),
    "two heads on four ranks": (4, True, [head()]),
    "a window": (1, True, [full(), window(12)]),
    "a window on two ranks": (2, True, [full(), window(12)]),
    "a state": (1, True, [full(), state()]),
}
every_size = pytest.mark.parametrize("size", SIZES)


@pytest.fixture
def node(tmp_path):
    """Makes engines of so many ranks on one keeper."""
    keeper = KeeperHere(120)

    def engine(size, **options):
        ranks, tensor_parallel, groups = SIZES[size]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        said = dict(ranks=ranks, tensor_parallel=tensor_parallel, groups=groups, retention=None, **options)
        made = keeper.engine(lambda **more: Engine(folder, **said | more))
        engine.keeper = keeper.keeper
        return made

    engine.region = keeper.region
    return engine


# Simulated ranks


@every_size
def test_the_next_engine_loads_what_one_has_computed(node, size):
    """Every rank compares what it loads with what that rank of the other engine computed."""
    one, other = node(size), node(size)
    answer = one.run(PROMPT)
    assert other.run(PROMPT) == answer
    assert (one.admitted, other.admitted) == ([(0, 0)], [(0, LAST)])
    for engine in one, other:
        engine.check_nothing_leaked()
        assert not engine.cache._messenger.uses


@pytest.mark.parametrize("size", ["two ranks", "three stages"])
def test_a_lane_that_has_lost_its_bytes_is_noticed(node, size):
    one, other = node(size), node(size)
    one.run(PROMPT)
    for row in node.region.values():
        row[1] = TORN, 0
    with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
        other.run(PROMPT)


@every_size
def test_nobody_reads_wrong_kv_where_everything_goes_wrong(node, size):
    """Late ranks, failed copies, lost reports, aborts, preemption, and a reset of one of two engines."""
    engines = [node(size, failure_rate=0.05, seed=seed, device_blocks=60) for seed in (1, 2)]
    users = [Users(engine) for engine in engines]
    users[1].prompts = users[0].prompts
    for step in range(1200):
        for each in users:
            while len(each.engine.requests) < 8:
                each.speak()
            if each.random.random() < 0.04:
                each.hang_up()
            if each.random.random() < 0.02:
                each.engine.restart_running()
            each.engine.step()
        if step == 900:
            engines[1].reset()
        if step % 100 == 0:
            node.keeper.check_valid()
    for engine in engines:
        engine.drain()
        engine.check_nothing_leaked()
        assert not engine.cache._messenger.uses
        wanted = ("loads done", "loads failed", "stores planned", "preemptions")
        assert all(engine.counts[each] for each in wanted), engine.counts
        engine.cache.close()
    node.keeper.check_valid()
    found = node.keeper.statistics()
    assert (found.writing, found.pinned) == (0, 0) and found.cached > 0


@pytest.mark.parametrize("late", [0, 1])
def test_a_chunk_is_found_when_the_last_rank_has_written_it(node, late):
    one = node("two ranks")
    for rank in one.ranks:
        rank.pace = NEVER if rank.rank == late else AT_ONCE
    one.submit(PROMPT)
    for _ in range(200):
        one.step()
    assert node.keeper.statistics().cached == 0 and node.keeper.statistics().writing > 0
    one.ranks[late].pace = AT_ONCE
    one.drain()
    assert node.keeper.statistics().cached == LAST // 4


def test_a_chunk_that_one_rank_could_not_write_is_found_by_nobody(node):
    one, other = node("two ranks"), node("two ranks")
    one.ranks[1].failure_rate = 1.0
    answer = one.run(PROMPT)
    assert node.keeper.statistics().cached == 0
    assert other.run(PROMPT) == answer and other.admitted == [(0, 0)]


def test_an_engine_that_ends_while_a_rank_writes_leaves_no_slot_behind(node):
    one = node("two ranks")
    one.ranks[1].pace = NEVER
    one.submit(PROMPT)
    for _ in range(200):
        one.step()
    one.cache.close()
    node.keeper.check_valid()
    assert node.keeper.statistics().writing == 0


def test_metrics_are_those_of_the_pool_and_leave_out_what_nobody_counts_there(node):
    one, other = (node("two ranks", device_blocks=80) for _ in range(2))
    for number, each in enumerate((one, other)):
        each.run(PROMPT)
        each.run(list(range(number, number + 100)), max_tokens=110)  # for more than a second
    shown = [CacheCounts(each.cache, {}).take().data for each in (one, other)]
    now = node.keeper.statistics()
    assert now.cached > shown[1]["resident_blocks"] > shown[0]["resident_blocks"] > 0  # the last ones a second ago
    assert shown[1]["capacity_blocks"] == now.capacity
    assert not [key for each in shown for key in each if key.startswith(UNKNOWN_IN_POOL)]
    config = one.scheduler.vllm_config
    series = [metric.name for metric in CachePromMetrics(config, TYPES, [], {0: []})._metrics]
    assert "resident_blocks" in series and not set(series) & set(UNKNOWN_IN_POOL)


# What engines must have in common


def config_of(folder, ranks=1, stages=1, pool=ADDRESS, rank=0):
    config = vllm_config(folder, pool={"address": pool, "revision": "1", "connect_seconds": 60})
    parallel = config.parallel_config
    parallel.world_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size = ranks, ranks // stages, stages
    parallel.rank, config.cache_config.num_gpu_blocks = rank, BLOCKS
    parallel.distributed_executor_backend = "mp"
    config.instance_id = f"test-{os.path.basename(folder)}-{stages}"
    config.kv_transfer_config.engine_id = str(folder)
    return config


def settings_of(folder, groups=None, **options):
    caches = one_group(BLOCKS) if groups is None else KVCacheConfig(BLOCKS, [], groups)
    return Settings.of(config_of(folder, **options), caches)


def test_engines_of_other_ranks_have_other_names(tmp_path):
    sizes = [dict(ranks=1), dict(ranks=2), dict(ranks=2, stages=2), dict(ranks=4), dict(ranks=4, stages=2)]
    names = [settings_of(tmp_path, **size).pool.namespace.digest for size in sizes]
    assert len(set(names)) == len(names)
    assert names == [settings_of(tmp_path, **size).pool.namespace.digest for size in sizes]


@pytest.mark.parametrize(
    ("groups", "options", "lanes"),
    [
        ([full()], dict(ranks=4), 4),
        ([full()], dict(ranks=4, stages=2), 4),
        ([latent()], dict(ranks=4), 1),
        ([latent()], dict(ranks=4, stages=2), 2),
        ([head()], dict(ranks=4), 2),
        ([head()], dict(ranks=8, stages=2), 4),
    ],
)
def test_a_slot_has_a_lane_for_each_rank_with_bytes_of_its_own(tmp_path, groups, options, lanes):
    settings = settings_of(tmp_path, groups, **options)
    alone = settings_of(tmp_path, groups)
    assert (settings.sharers, settings.regions) == (options["ranks"], 1)
    assert settings.planner.ranks == settings.planner.pieces[0].lanes == lanes
    assert settings.planner.host_block_bytes == lanes * alone.planner.host_block_bytes


# Two processes


def layers_of(memory):
    """KV of `one_group` in this memory."""
    return memory.layers(one_group(BLOCKS).kv_cache_groups)


def carries(rank, folder, address, stages, axis, file, told):
    """In a process of its own."""
    meet(rank, file, axis)
    config = config_of(folder, ranks=2, stages=stages, pool=address, rank=rank)
    half = WorkerHalf(Settings.of(config, one_group(BLOCKS)), config, one_group(BLOCKS))
    memory = BlockMemory(rank, BLOCKS, one_group(BLOCKS).kv_cache_groups, parts={})
    half.register_kv_caches(layers_of(memory))
    slots, blocks = range(5, 13), range(1, 9)
    told.put((rank, carried(half, rank, memory, (GroupCopy(0, tuple(slots), tuple(blocks)),), {0: blocks})))
    torch.distributed.barrier()
    half.close()


@pytest.mark.parametrize(("stages", "axis"), [(1, "get_tp_group"), (2, "get_pp_group")])
def test_two_processes_load_what_both_have_stored(tmp_path, stages, axis):
    """The control is in it: rows of the second are not there before it has stored."""
    with starting(tmp_path) as begin:
        keeper = begin(NodeKeeper, POOL_BYTES)
        said = said_by(carries, tmp_path, keeper.address, stages, axis, tmp_path / "meeting")
    assert [said[rank][1] for rank in (0, 1)] == [[True] * 8] * 2
    assert [said[rank][0] for rank in (0, 1)] == [[True] * 8, [False] * 8]


# Ranks that join, as threads


def joins(rank, folder, address):
    """One of two ranks whose rows lie in other orders, and which want other sizes. The order and the size of both."""
    config = config_of(folder, ranks=2, pool=address, rank=rank)
    pool = Settings.of(config, one_group(BLOCKS)).pool
    sizes, orders = (4096, 8192), ("KV", "VK")
    with closing(PoolHere(pool, config.parallel_config, sizes[rank], orders[rank], torch.device("cpu"))) as here:
        ranks.of_all(None)  # both have joined
        return here._joined._namespace.spelled["row order"], here.arena.blocks.shape[1]


@pytest.fixture
def said_by_both(tmp_path, monkeypatch):
    """Results of two threads that join as ranks which meet: what each has joined, or why it has not."""
    of_both, both, this = [None, None], threading.Barrier(2, timeout=PATIENCE), threading.local()

    def of_all(value):
        of_both[this.rank] = value
        both.wait()
        found = list(of_both)
        both.wait()
        return found

    def joined(rank, address):
        this.rank = rank
        try:
            return joins(rank, tmp_path, address)
        except ConfigurationError as error:
            return str(error)

    monkeypatch.setattr(ranks, "of_all", of_all)
    vllm_config(tmp_path)  # which writes a file that both read
    with ThreadPoolExecutor(2) as threads:
        yield lambda address=ADDRESS: list(threads.map(joined, (0, 1), [address] * 2))


def test_ranks_join_with_the_orders_of_all_and_the_size_of_the_largest(tmp_path, said_by_both):
    with starting(tmp_path) as begin:
        assert said_by_both(begin(NodeKeeper, POOL_BYTES).address) == [("KV | VK", 8192)] * 2


def test_no_rank_waits_for_a_first_one_that_the_keeper_refuses(monkeypatch, said_by_both):
    monkeypatch.setattr(JoinedPool, "join", Mock(side_effect=ConfigurationError("the keeper refuses")))
    assert said_by_both() == ["the keeper refuses"] * 2


def test_a_rank_on_another_machine_is_refused_on_all(tmp_path, monkeypatch, said_by_both):
    """It does not find the first one."""
    taken = JoinedPool.taken
    monkeypatch.setattr(JoinedPool, "taken", lambda _, *others, **more: taken("cpc-nobody-is-here", *others, **more))
    with starting(tmp_path) as begin:
        said = said_by_both(begin(NodeKeeper, POOL_BYTES).address)
    assert all("on one machine" in each for each in said)
