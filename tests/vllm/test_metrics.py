"""Every number an operator sees: where it comes from, how reports are added up, and what vLLM makes of them."""

import time
from dataclasses import replace
from functools import partial
from itertools import permutations

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    get_connector_metric_definitions,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import OffloadingCounterMetadata
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput

from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.metrics import (
    KINDS,
    METRICS,
    OFFLOADING,
    PREFIX,
    STATES,
    TIER_METRICS,
    CacheCounts,
    CachePromMetrics,
    CacheStats,
    Kind,
    TierMoves,
    TransferTimes,
)
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.keeper.metrics import metrics_of, spelled
from cpu_prefix_cache.messages.stats import CacheStatistics, KeeperStatistics, PoolStatistics, TierStatistics
from cpu_prefix_cache.prefix_cache import FAILURES_IN_A_ROW
from cpu_prefix_cache.slab.tier_copier import SlotStatistics
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS
from tests.vllm.engine import ATTENTION, BLOCK, Engine, one_group, vllm_config

PROMPT = list(range(30))  # 7 full blocks and 2 tokens
CHUNK_BYTES = 2 * ATTENTION.page_size_bytes
READS_FAILED, WRITES_FAILED = "tiering_promotion_job_failures", "tiering_cascade_job_failures"
ENGINES = {0: ["llama", "0"], 1: ["llama", "1"]}
OF_HOST = [key for metric in METRICS for key, _ in metric.series()]
OF_TIER = [key for metric in TIER_METRICS for key, _ in metric.series()]


class Board:
    """vLLM's /metrics as one engine sees them, on a registry of their own."""

    def __init__(self, config):
        self.registry = CollectorRegistry()

        class Prom(KVConnectorProm):
            _gauge_cls = partial(Gauge, registry=self.registry)
            _counter_cls = partial(Counter, registry=self.registry)
            _histogram_cls = partial(Histogram, registry=self.registry)

        self.prom = Prom(config, ["model_name", "engine"], ENGINES)

    def hear(self, data, engine=0):
        if data is not None:
            self.prom.observe(data, engine)

    def shows(self, key, engine=0, suffix=None):
        """The value of a series: of a histogram, how many observations, or `suffix`."""
        name, _, value = key.partition(":")
        metric = next(metric for metric in (*METRICS, *TIER_METRICS) if metric.name == name)
        default = {Kind.COUNT: "_total", Kind.LEVEL: "", Kind.TIMES: "_count"}[metric.kind]
        labels = {"model_name": "llama", "engine": str(engine)}
        labels |= {metric.label: value or metric.values[0]} if metric.label else {}
        return self.registry.get_sample_value(metric.prefix + name + (suffix or default), labels)


@pytest.fixture
def board(tmp_path):
    return Board(vllm_config(tmp_path, cpu_bytes_to_use=2**20))


class Watched:
    """An engine whose statistics are shown after every step, as the frontend would."""

    def __init__(self, folder, board, **options):
        self.engine = Engine(folder, **{"host_blocks": 1000, "slowest": 1, "offload": "eager"} | options)
        self.board, self.reports = board, []
        scheduler = self.engine.scheduler
        scheduler.log_stats = scheduler.kv_cache_manager.log_stats = True
        scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
        scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        self.hits_as_vllm_says = [0, 0]  # of requests at their first admission, and later
        make_stats = scheduler.make_stats

        def seen(*args, **kwargs):
            stats = make_stats(*args, **kwargs)
            external = stats.connector_prefix_cache_stats
            self.hits_as_vllm_says[0] += external.hits
            self.hits_as_vllm_says[1] += external.preempted_hits
            self.reports.append(stats.kv_connector_stats)
            board.hear(stats.kv_connector_stats)
            return stats

        scheduler.make_stats = seen
        self.engine.drain()  # until host memory is ready

    def flood(self, prompts=12):
        for _ in range(prompts):
            self.engine.run([self.engine.random.randrange(500, 900) for _ in range(30)])

    def shows(self, *keys):
        return [self.board.shows(key) for key in keys]


@pytest.fixture
def start(tmp_path, board):
    return partial(Watched, tmp_path, board)


# Each value, from where it comes to where it is seen


class Still:
    """A cache that stands still, but for the statistics that a test sets."""

    def __init__(self, statistics):
        self.now, self.is_off = statistics, False

    def statistics(self):
        return self.now

    def says(self, name, value):
        if name == "is_off":
            self.is_off = bool(value)
        elif "." in name:
            part, name = name.split(".")
            self.now = replace(self.now, **{part: replace(getattr(self.now, part), **{name: value})})
        else:
            self.now = replace(self.now, **{name: value})


FROM = {
    "hit_tokens": "hit_tokens",
    "evicted_chunks": "pool.evictions",
    "evicted_unused_chunks:chunk": "pool.unused_chunks",
    "evicted_unused_chunks:checkpoint": "pool.unused_checkpoints",
    "dropped_chunks:pool_full": "store_refusals",
    "dropped_chunks:declined": "store_declined",
    "dropped_chunks:failed": "store_cancelled",
    "dropped_chunks:unfit": "store_unfit",
    "failed_loads": "loads_failed",
    "lost_before_store_chunks": "lost_before_store",
    "union_misses": "union_misses",
    "next_use_hints:accepted": "hints.accepted",
    "next_use_hints:clipped": "hints.clipped",
    "next_use_hints:malformed": "hints.malformed",
    "resident_blocks": "pool.cached",
    "pinned_blocks": "pool.protected",
    "ready_blocks": "pool.ready",
    "capacity_blocks": "pool.capacity",
    "transfers_in_flight:store": "storing",
    "transfers_in_flight:load": "loading",
    "off": "is_off",
}


def test_the_table_above_is_complete():
    """The ranks' reports of their copies are not in it."""
    told = times(store=[1.0], load=[1.0]).data
    assert set(FROM) | set(told) == set(OF_HOST) and not set(FROM) & set(told)
    assert len(set(FROM.values())) == len(FROM)


@pytest.mark.parametrize("key", sorted(FROM))
def test_a_value_goes_from_0_to_where_operators_look_and_back(tmp_path, board, key):
    cache = Still(Engine(tmp_path).cache.statistics())
    counts = CacheCounts(cache, {})
    cache.says(FROM[key], 0)
    others = {each: None for each in FROM if each != key}

    def after(value):
        cache.says(FROM[key], value)
        stats = counts.take()
        assert counts.take() is None, "told again though nothing has changed"
        board.hear(stats and stats.data)
        return board.shows(key)

    assert after(0) == 0
    others = {each: board.shows(each) for each in others}
    assert after(1) == 1
    if KINDS[key] is Kind.LEVEL:
        assert after(0) == 0
        assert after(1) == 1
    else:
        assert after(1) == 1
        assert after(5) == 5  # 4 more
    assert {each: board.shows(each) for each in others} == others, "something else has moved"
    assert board.shows(key, engine=1) == 0, "another engine's number has moved"


def test_each_engine_has_its_own_numbers(board):
    for engine in ENGINES:
        board.hear({**SUM, "hit_tokens": 10 + engine}, engine)
    assert [board.shows("hit_tokens", engine) for engine in ENGINES] == [10, 11]
    assert [board.shows("transfer_seconds:store", engine) for engine in ENGINES] == [3, 3]
    assert [board.shows("resident_blocks", engine) for engine in ENGINES] == [7, 7]


def test_every_series_is_there_from_the_first_report_on(board):
    board.hear({"hit_tokens": 0})
    assert [board.shows(key) for key in OF_HOST] == [0] * len(OF_HOST)


def test_series_of_a_tier_are_there_if_there_is_one(tmp_path, board):
    with_tier = Board(vllm_config(tmp_path, cpu_bytes_to_use=2**20, tier={"kind": "file"}))
    for each in (board, with_tier):
        each.hear({"hit_tokens": 0})
    assert {board.shows(key) for key in OF_TIER} == {None}
    assert [with_tier.shows(key) for key in KINDS] == [0] * len(KINDS)
    assert [*OF_HOST, *OF_TIER] == list(KINDS)


# In an engine


def test_bytes_and_hit_tokens_are_those_of_the_prompt_that_came_back(start):
    watched = start()
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("store_bytes", "load_bytes", "hit_tokens") == [7 * CHUNK_BYTES, 0, 0]
    assert watched.shows("resident_blocks", "capacity_blocks", "ready_blocks") == [7, 1000, 1000]
    watched.flood()
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("load_bytes", "hit_tokens", "failed_loads") == [7 * CHUNK_BYTES, 7 * BLOCK, 0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_engine_without_requests_steps_until_its_memory_is_ready(start, ranks):
    watched = start(ranks=ranks)
    assert watched.shows("capacity_blocks", "ready_blocks") == [1000, 1000]
    assert not watched.engine.scheduler.has_requests()


def test_memory_that_never_becomes_ready_is_not_waited_for(start):
    """A rank is short of memory, or has larger blocks than others: it reports that it has all it will ever have."""
    watched = start()
    engine, half = watched.engine, watched.engine.half
    half._unprepared = {0}
    assert engine.scheduler.has_requests()
    half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReports((), prepared=(0,))))
    assert not engine.scheduler.has_requests()


def test_vllm_counts_hits_apart_that_a_request_has_after_it_was_preempted(start):
    watched = start()
    engine = watched.engine
    engine.run(PROMPT, max_tokens=1)
    watched.flood()
    engine.submit(PROMPT, max_tokens=12)
    for _ in range(6):
        engine.step()
    assert watched.hits_as_vllm_says == [7 * BLOCK, 0]
    assert engine.restart_running()
    engine.drain()
    assert watched.hits_as_vllm_says[1] > 0
    assert watched.shows("hit_tokens") == [sum(watched.hits_as_vllm_says)]


def test_transfers_in_flight_and_pins_go_up_and_down(start):
    watched = start(slowest=30)
    watched.engine.run(PROMPT)
    levels = ["transfers_in_flight:store", "transfers_in_flight:load", "pinned_blocks"]
    assert watched.shows(*levels) == [0, 0, 0]
    watched.flood()
    watched.engine.submit(PROMPT)
    watched.engine.step()
    assert watched.shows(*levels) == [0, 1, 7]
    watched.engine.drain()
    assert watched.shows(*levels) == [0, 0, 0]
    assert max(report.get("transfers_in_flight:store", 0) for report in watched.reports if report) > 0


def test_a_small_host_evicts(start):
    watched = start(host_blocks=20)
    watched.flood()
    now = watched.engine.cache.statistics()
    assert watched.shows("evicted_chunks", "resident_blocks") == [now.pool.evictions, 20]
    assert now.pool.evictions > 0


def test_chunks_that_are_not_stored_count_by_reason(start):
    watched = start(store_after=2)
    watched.engine.run(PROMPT)
    declined = watched.shows("dropped_chunks:declined")[0]
    assert declined >= 7
    watched.engine.ranks[0].failure_rate = 1.0
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("dropped_chunks:declined", "dropped_chunks:failed", "dropped_chunks:pool_full") == [
        declined,
        7,
        0,
    ]


def test_chunks_without_room_on_a_full_host_are_counted(start):
    watched = start(host_blocks=20)
    watched.flood(4)
    pool = watched.engine.cache.pool
    pins = [pool.pin(node) for node in list(pool.soonest_evicted())]
    assert watched.shows("dropped_chunks:pool_full") == [0]
    watched.engine.run(PROMPT)
    assert watched.shows("dropped_chunks:pool_full")[0] >= 7
    assert watched.shows("pinned_blocks") == [20]
    for pin in pins:
        pool.unpin(pin)


def test_loads_that_fail_and_a_cache_that_gives_up_are_seen(start):
    watched = start()
    for at in range(FAILURES_IN_A_ROW):
        watched.engine.run([at, *PROMPT])
    watched.flood()
    watched.engine.ranks[0].failure_rate = 1.0
    assert watched.shows("failed_loads", "off") == [0, 0]
    watched.engine.run([0, *PROMPT])
    assert watched.shows("failed_loads") == [1]
    for at in range(FAILURES_IN_A_ROW):
        watched.engine.run([at, *PROMPT])
    assert watched.shows("off", "resident_blocks") == [1, 0]


def test_a_step_in_which_nothing_happens_reports_nothing(start):
    watched = start()
    watched.engine.run(PROMPT)
    before = len(watched.reports)
    for _ in range(5):
        watched.engine.step()
    assert watched.reports[before:] == [None] * 5


# A tier


@pytest.fixture
def start_with_tier(tmp_path):
    board = Board(vllm_config(tmp_path, cpu_bytes_to_use=2**20, tier={"kind": "file"}))
    return partial(Watched, tmp_path, board, host_blocks=60, tier_slots=500)


def test_hits_of_the_tier_are_those_that_came_from_it(start_with_tier):
    watched = start_with_tier(tier={"offload": "eager"})
    watched.engine.drain()
    assert watched.shows(*(f"tier_state:{state}" for state in STATES)) == [0, 1, 0, 0]
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("tier_capacity_blocks", "tier_resident_blocks", "tier_hit_tokens") == [500, 7, 0]
    watched.flood()
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("tier_hit_tokens", "hit_tokens", "tier_requests:asked") == [7 * BLOCK, 7 * BLOCK, 1]
    assert watched.shows("tier_requests:late", "tier_refused_slots", READS_FAILED, WRITES_FAILED) == [0] * 4


def test_failures_of_a_tier_are_counted(start_with_tier):
    watched = start_with_tier(tier={"offload": "eager"}, tier_faults=dict(refusal_rate=1.0))
    watched.engine.run(PROMPT, max_tokens=1)
    watched.flood()
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("tier_refused_slots", "tier_hit_tokens") == [7, 0]
    watched.engine.ranks[0].tier.failure_rate = 1.0
    for at in range(2 * FAILURES_IN_A_ROW):
        watched.engine.run([at, *PROMPT], max_tokens=1)
    assert watched.shows(READS_FAILED, WRITES_FAILED) == [0, FAILURES_IN_A_ROW]
    assert watched.shows(*(f"tier_state:{state}" for state in STATES)) == [0, 0, 1, 0]
    watched.flood()
    watched.engine.now += PAUSE_SECONDS  # what has left meanwhile is counted now
    watched.engine.step()
    assert watched.shows("tier_unsaved_chunks")[0] > 0


def test_bytes_that_a_rank_has_moved_are_reported_once():
    moves = TierMoves()
    moved = SlotStatistics(100, 200, 0.5, 0.25, 0)
    assert moves.take(moved).data == {
        "tiering_read_bytes": 100,
        "tiering_write_bytes": 200,
        "tiering_read_time": 0.5,
        "tiering_write_time": 0.25,
    }
    assert moves.take(moved) is None
    assert moves.take(moved._replace(bytes_read=160)).data == {"tiering_read_bytes": 60}
    assert moves.take(moved._replace(bytes_read=160, kept=3)).data == {"tier_kept_values": 3}


# Times


def plan_of(id, direction, num_bytes):
    return TransferPlan(id, direction, (), num_bytes)


def times(**seconds):
    """A worker's report: of each direction, transfers of 10**9 bytes that took so long."""
    taken = TransferTimes()
    for name, each in seconds.items():
        for one in each:
            taken.observe(plan_of(0, Direction(name), 10**9), one)
    return taken.take()


def test_bytes_over_seconds_are_the_rate_of_a_rank(board):
    for _ in range(2):  # two ranks
        board.hear(times(store=[0.02, 0.04], load=[0.1]).data)
    assert board.shows("transfer_seconds:store") == 4
    for direction, rate in (("store", 2 / 0.06), ("load", 10)):
        seconds = board.shows(f"transfer_seconds:{direction}", suffix="_sum")
        assert board.shows(f"{direction}_bytes") / 1e9 / seconds == pytest.approx(rate)
    assert board.shows("transfer_seconds:load", engine=1) == board.shows("load_bytes", engine=1) == 0


def test_times_are_reported_once_and_not_for_transfers_without_bytes_of_the_rank():
    taken = TransferTimes()
    taken.observe(plan_of(0, Direction.STORE, 10**9), 1.0)
    taken.observe(plan_of(1, Direction.LOAD, 0), 1.0)
    taken.observe(plan_of(2, Direction.STORE, 8), 0.0)
    assert taken.take().data == {"store_bytes": 10**9 + 8, "transfer_seconds:store": [1.0, 0.0]}
    assert taken.take() is None


def test_a_worker_reports_the_time_of_its_copies(tmp_path, board):
    """A real worker on CPU tensors: two blocks to the host and one back."""
    config = vllm_config(tmp_path, cpu_bytes_to_use=16 * CHUNK_BYTES)
    worker = CPUPrefixCacheConnector(config, KVConnectorRole.WORKER, one_group(8))
    worker.register_kv_caches({f"layer.{at}": torch.zeros(8, 2, BLOCK, 2, 16) for at in range(2)})
    assert worker.get_kv_connector_stats() is None
    moves = [
        TransferPlan(0, Direction.STORE, (GroupCopy(0, (0, 1), (3, 4)),), 2 * CHUNK_BYTES),
        TransferPlan(1, Direction.LOAD, (GroupCopy(0, (0,), (5,)),), CHUNK_BYTES),
    ]
    done, data = set(), {}
    for at, move in enumerate(moves):
        worker.bind_connector_metadata(StepMetadata(StepPlan(0, (move,)), {1: "r"} if at else {}))
        while at not in done:
            time.sleep(0.001)
            worker.get_transfer_results(set())
            reports = worker.build_connector_worker_meta()
            done |= reports.reports[0].done if reports else set()
        data |= worker.get_kv_connector_stats().data
        assert worker.get_kv_connector_stats() is None
    worker.shutdown()
    assert set(data) == set(times(store=[1.0], load=[1.0]).data)
    for direction, num_bytes in (("store", 2 * CHUNK_BYTES), ("load", CHUNK_BYTES)):
        (seconds,) = data[f"transfer_seconds:{direction}"]
        assert 0 < seconds < 10
        assert data[f"{direction}_bytes"] == num_bytes


# Adding up


REPORTS = [
    {"transfer_seconds:store": [0.5], "store_bytes": 10**9},
    {"transfer_seconds:store": [0.25, 1.0], "store_bytes": 2 * 10**9},
    {"hit_tokens": 28, "failed_loads": 1, "resident_blocks": 7, "capacity_blocks": 10, "off": 0},
    {"transfer_seconds:load": [0.1], "load_bytes": 10**9},
]
SUM = {
    "transfer_seconds:store": [0.25, 0.5, 1.0],
    "store_bytes": 3 * 10**9,
    "transfer_seconds:load": [0.1],
    "load_bytes": 10**9,
    **REPORTS[2],
}


def as_sets(stats):
    return {key: sorted(value) if isinstance(value, list) else value for key, value in stats.data.items()}


def test_reports_of_one_step_add_up_in_any_order_and_grouping():
    of = CacheStats.of
    for a, b, c, d in permutations(REPORTS):
        assert as_sets(of(a).aggregate(of(b)).aggregate(of(c)).aggregate(of(d))) == SUM
        assert as_sets(of(a).aggregate(of(b)).aggregate(of(c).aggregate(of(d)))) == SUM
        assert as_sets(of(a).aggregate(of(b).aggregate(of(c).aggregate(of(d))))) == SUM
        assert as_sets(of(a).aggregate(CacheStats()).aggregate(of(b).aggregate(of(c)).aggregate(of(d)))) == SUM


def test_counts_of_two_steps_add_up_and_the_later_level_counts():
    steps = [{"hit_tokens": 28, "resident_blocks": 7}, {"hit_tokens": 4, "resident_blocks": 2}, {"hit_tokens": 1}]
    a, b, c = (CacheStats.of(step) for step in steps)
    assert a.aggregate(b).aggregate(c).data == {"hit_tokens": 33, "resident_blocks": 2}


def test_adding_up_changes_nobody_elses_data():
    """The same dict goes to the log, which adds up, and to /metrics."""
    data = {"transfer_seconds:store": [0.5], "hit_tokens": 1}
    other = CacheStats.of({"transfer_seconds:store": [1.0], "hit_tokens": 2})
    CPUPrefixCacheConnector.build_kv_connector_stats(data).aggregate(other)
    assert data == {"transfer_seconds:store": [0.5], "hit_tokens": 1}
    CacheStats().aggregate(other).aggregate(CacheStats.of(data))
    assert other.data == {"transfer_seconds:store": [1.0], "hit_tokens": 2}


def test_an_empty_report_is_empty_and_not_false():
    """vLLM tests reports for truth, and then drops those that are false."""
    stats = CacheStats()
    assert stats.is_empty() and stats
    stats.aggregate(CacheStats({"hit_tokens": 0}))
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert CPUPrefixCacheConnector.build_kv_connector_stats().is_empty()


def test_a_report_can_be_sent_and_built_again(start):
    watched = start()
    watched.engine.run(PROMPT)
    sent = [*filter(None, watched.reports), SUM]
    assert len(sent) > 2
    for data in sent:
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(data))
        assert CPUPrefixCacheConnector.build_kv_connector_stats(back).data == data


def test_ranks_and_the_scheduler_are_added_up_by_vllm_itself(start):
    """Three ranks, with a report each, through KVOutputAggregator and the scheduler."""
    watched = start(ranks=3)
    watched.engine.run(PROMPT, max_tokens=1)
    assert watched.shows("store_bytes", "resident_blocks") == [3 * 7 * CHUNK_BYTES, 7]
    assert watched.shows("transfer_seconds:store") == [3 * watched.engine.counts["stores planned"]]


# The log


def test_the_log_shows_the_figures_that_matter(tmp_path):
    logging = KVConnectorLogging(vllm_config(tmp_path, cpu_bytes_to_use=2**20).kv_transfer_config)
    lines = []
    logging.log(lambda text, *args: lines.append(text % args))
    assert lines == []
    for report in REPORTS:
        logging.observe(report)
    logging.observe({"hit_tokens": 2, "store_bytes": 10**9, "resident_blocks": 8, "capacity_blocks": 10})
    logging.log(lambda text, *args: lines.append(text % args))
    assert lines == [
        "KV Transfer metrics: hit_tokens=30, stored_gb=4.0, stored_gb_per_second=2.3, loaded_gb=1.0, "
        "loaded_gb_per_second=10.0, resident_share=0.8, failed_loads=1"
    ]
    logging.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1, "the same interval was told twice"
    logging.observe({"tier_hit_tokens": 64, "tiering_read_bytes": 3 * 10**9, "tier_capacity_blocks": 10})
    logging.observe({"tier_state:paused": 1, "tier_unsaved_chunks": 2})
    logging.log(lambda text, *args: lines.append(text % args))
    assert lines[1].endswith(
        "tier_hit_tokens=64, tier_read_gb=3.0, tier_write_gb=0.0, tier_unsaved_chunks=2, tier_state_paused=1"
    )


# In a MultiConnector


def multi_config(folder, *parts):
    config = vllm_config(folder, cpu_bytes_to_use=2**20)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": list(parts)}
    )
    return config


OURS = {
    "kv_connector": "CPUPrefixCacheConnector",
    "kv_connector_module_path": "connector.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**20},
}
SILENT = {
    "kv_connector": "SilentConnector",
    "kv_connector_module_path": "tests.vllm.silent",
    "kv_role": "kv_both",
}


def test_a_multi_connector_knows_the_class_by_its_name():
    assert KVConnectorFactory.get_connector_class_by_name("CPUPrefixCacheConnector") is CPUPrefixCacheConnector


def test_reports_survive_a_multi_connector(tmp_path):
    config = multi_config(tmp_path, SILENT, OURS)
    caches = one_group(80)
    multi = MultiConnector(config, KVConnectorRole.SCHEDULER, caches)
    multi.bind_gpu_block_pool(BlockPool(80, enable_caching=True, hash_block_size=BLOCK))
    first = multi.get_kv_connector_stats()
    assert multi.get_kv_connector_stats() is None
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(first.to_dict()))
    again = MultiConnector.build_kv_connector_stats(sent)
    again.aggregate(MultiConnector.build_kv_connector_stats({"CPUPrefixCacheConnector": REPORTS[0]}))
    again.aggregate(MultiConnector.build_kv_connector_stats({"CPUPrefixCacheConnector": REPORTS[1]}))
    board = Board(config)
    board.hear(again.to_dict())
    assert board.shows("capacity_blocks") == 2**20 // CHUNK_BYTES
    assert board.shows("transfer_seconds:store") == 3


# Beside vLLM's OffloadingConnector


THEIRS = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
COMMON = [metric for metric in (*METRICS, *TIER_METRICS) if metric.prefix == OFFLOADING]


def test_common_names_are_those_of_vllm_with_its_kinds_and_labels():
    theirs = get_connector_metric_definitions() | TieringOffloadingSpec.build_metric_definitions({})
    assert len(COMMON) == 8
    for metric in COMMON:
        found = theirs[metric.prefix + metric.name]
        assert isinstance(found, OffloadingCounterMetadata) and metric.kind is Kind.COUNT
        assert found.labelnames == (() if metric.label is None else (metric.label,))


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "theirs first"])
def test_beside_an_offloading_connector_each_has_its_own_numbers(tmp_path, order):
    board = Board(multi_config(tmp_path, *order))
    theirs = OffloadingConnectorStats()
    theirs.increase_counter("vllm:kv_offload_load_bytes", 3)
    board.hear({"CPUPrefixCacheConnector": {"load_bytes": 5}, "OffloadingConnector": theirs.data})
    labels = {"model_name": "llama", "engine": "0"}
    found = [board.registry.get_sample_value(f"{prefix}load_bytes_total", labels) for prefix in (PREFIX, OFFLOADING)]
    assert found == [5, 3]


def test_two_engines_that_were_made_before_either_reports_both_report(tmp_path):
    """As vLLM's own series, those of the later one are shown."""
    config, types = vllm_config(tmp_path), {each: each for each in (Counter, Gauge, Histogram)}
    labels = ["model_name", "engine"], {0: ["llama", "0"]}
    first, second = (CachePromMetrics(config, types, *labels) for _ in range(2))
    unregister_vllm_metrics()  # of other tests
    try:
        for made, tokens in ((first, 3), (second, 5), (first, 1)):
            made.observe({"hit_tokens": tokens})
        shown = REGISTRY.get_sample_value(f"{PREFIX}hit_tokens_total", {"model_name": "llama", "engine": "0"})
        assert shown == 5
    finally:
        unregister_vllm_metrics()


OF_A_KEEPER = {"engines", "leases", "writes", "questions"}
OF_A_KEEPER |= {"asked_chunks", "hit_chunks", "tier_hit_chunks", "stored_chunks"}


def test_numbers_of_a_keeper_are_called_as_those_of_an_engine_where_they_count_the_same():
    pool = PoolStatistics(capacity=4, ready=4)
    tier = TierStatistics(CacheStatistics(pool), "open", "eager", 0, 0, 0, None)
    page = spelled(metrics_of(KeeperStatistics(pool, 1, 0, 0, 0, 0, 0, 0, 0), tier))
    shown = {each.name.removeprefix("cpu_prefix_cache_"): each for each in text_string_to_metric_families(page)}
    ours = {metric.name: metric for metric in (*METRICS, *TIER_METRICS)}
    assert {*shown} - {*ours} == OF_A_KEEPER
    for name in {*shown} & {*ours}:
        assert shown[name].type == {Kind.COUNT: "counter", Kind.LEVEL: "gauge"}[ours[name].kind]
        labels = [sample.labels for sample in shown[name].samples]
        values = [{ours[name].label: value} for value in ours[name].values if len(ours[name].values) > 1]
        assert labels == (values or [{}])
