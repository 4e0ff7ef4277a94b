"""Short stories, each about one thing between vLLM's scheduler and the cache."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.messages import WorkerReports
from connector.vllm.settings import Settings
from cpu_prefix_cache import ConfigurationError
from tests.vllm.engine import (
    AT_ONCE,
    ATTENTION,
    BLOCK,
    LOADING,
    NEVER,
    Engine,
    full,
    latent,
    one_group,
    state,
    vllm_config,
)

PROMPT = list(range(30))  # 7 full blocks and 2 tokens


@pytest.fixture
def start(tmp_path):
    """An engine at rest, whose host memory is ready."""

    def start(**options):
        engine = Engine(tmp_path, **{"host_blocks": 1000, "slowest": 1, **options})
        while engine.cache.pool.statistics().ready < engine.cache.pool.capacity:
            engine.step()
        return engine

    return start


def flood(engine: Engine, prompts: int = 12) -> None:
    """Enough other prompts to push everything else out of the device."""
    for _ in range(prompts):
        engine.run([engine.random.randrange(500, 900) for _ in range(30)])


def order_on_device(engine: Engine, keys: list[bytes]) -> list[int]:
    """Which chunks of `keys` wait to be evicted, soonest first."""
    return [keys.index(key) for _, key in engine.device.soonest_evicted() if key in keys]


# Coming back


def test_the_first_prompt_after_a_pause_in_which_the_host_became_ready_is_stored(tmp_path):
    """The report reaches the scheduler only in the step in which the prompt is computed, and ends."""
    engine = Engine(tmp_path, host_blocks=1000, slowest=1, offload="eager")
    engine.ranks[0].ready = 1000
    assert engine.cache.pool.ready == 0
    engine.run(PROMPT, max_tokens=1)
    flood(engine)
    engine.run(PROMPT)
    assert engine.cache.statistics().chunks_loaded == 7
    engine.check_nothing_leaked()


def test_a_load_that_has_ended_is_computed_once_vllm_has_looked_after_it(start):
    """Before that its tokens count, and its blocks have no hashes. That may take long: what runs comes first."""
    engine = start(offload="eager", device_blocks=80, step_tokens=16, max_requests=4)
    engine.run(PROMPT)
    flood(engine)
    computed, found = engine.cache.computed, []

    def computed_and_look(id, tokens):
        keys = engine.requests[id].block_hashes[: tokens // BLOCK]
        found.append((id, [engine.device.find(key) is not None for key in keys]))
        computed(id, tokens)

    engine.cache.computed = computed_and_look
    engine.ranks[0].pace = NEVER
    loaded = engine.submit(PROMPT)
    engine.step()
    assert engine.requests[loaded].status is LOADING
    engine.submit(list(range(400, 640)), max_tokens=1)  # takes all tokens of 15 steps
    engine.step()
    engine.ranks[0].pace = AT_ONCE
    engine.drain()
    waited = [of for id, of in found if id == loaded]
    assert len(waited) > 10 and all(all(of) for of in waited)


def test_the_time_of_a_step_is_its_own_however_many_are_under_way(start):
    """Eight stages of a pipeline have eight steps under way: counted to four, one seemed to take no time."""
    engine = start(offload="eager")
    half = engine.half
    now = iter(range(1_000))
    taken = []
    half.clock = lambda: float(next(now))
    half.cache.prefilled = lambda tokens, seconds: taken.append((tokens, seconds))
    begun = []
    for tokens in (*range(2_000, 2_008), 5, 0):
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = tokens
        begun.append(half.build_connector_meta(output).timed)
    assert begun[-2:] == [None, None]  # too few tokens to measure anything
    for timed in (*begun[:3], None, *begun[4:8], begun[2]):  # the output of one of them had nothing in it
        reports = None if timed is None else WorkerReports((), timed)
        half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))
    assert taken == [(2_000 + at, float(8 + done - at)) for done, at in enumerate((0, 1, 2, 4, 5, 6, 7))]
    assert not half._begun


def test_ranks_know_whether_a_step_computes(start):
    """In one that does not they leave Python to the copies, and may announce a load before it ends."""
    half = start().half
    output = SchedulerOutput.make_empty()
    told = []
    for tokens in (0, 5):
        output.total_num_scheduled_tokens = tokens
        told.append(half.build_connector_meta(output).computes)
    assert told == [False, True]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_are_timed_beside_copies_that_are_late(start, asynchronous):
    engine = start(offload="eager", device_blocks=80, slowest=6, asynchronous=asynchronous)
    taken = []
    engine.half.cache.prefilled = lambda tokens, seconds: taken.append(tokens)
    with patch("connector.vllm.scheduler.MIN_TIMED_TOKENS", 20):
        for prompt in range(40):
            engine.submit([900 + prompt] * 20, max_tokens=1)
            for _ in range(prompt % 7):
                engine.step()
        engine.drain()
    assert len(taken) > 20 and len(engine.half._begun) <= 1


# Storing


@pytest.mark.parametrize(("asynchronous", "seen_after"), [(False, 1), (True, 2)], ids=["in turn", "overlapping"])
def test_lazy_loses_nothing_of_long_prompts_that_come_without_a_break(start, asynchronous, seen_after):
    """Copies take as long as the step they go out with. A worker looks at them as soon as a step is launched: where
    steps overlap, the next is launched before the copies have begun."""
    engine = start(device_blocks=240, host_blocks=2000, step_tokens=24, asynchronous=asynchronous)
    (rank,) = engine.ranks
    rank.pace, rank.lost_reports = seen_after, 0.0
    prompts = [[first, *range(200 + 4 * (first % 9))] for first in range(900, 930)]  # of nine or ten steps
    for prompt in prompts:
        engine.submit(prompt, max_tokens=1)
        while engine.scheduler.requests:
            engine.step()
    engine.drain()
    stored = [[engine.cache.pool.find(key) is not None for key in engine.keys(prompt)] for prompt in prompts]
    on_device = [[engine.device.find(key) is not None for key in engine.keys(prompt)] for prompt in prompts]
    assert engine.cache.statistics().lost_before_store == 0
    assert all(any(both) for each in zip(stored, on_device, strict=True) for both in zip(*each, strict=True))
    assert all(map(all, stored[:20])) and not any(map(any, on_device[:20]))


def test_chunks_that_one_step_computes_are_stored_with_the_next(start):  # S7.9
    engine = start(offload="eager")
    engine.submit(list(range(100)), max_tokens=1)
    on_their_way = []
    while engine.scheduler.has_requests():
        engine.step()
        pool = engine.cache.pool.statistics()
        on_their_way.append(pool.writing + pool.cached)
    assert on_their_way == [0, 12, 25, 25]  # 48 tokens a step: 12 chunks, 12 more and at its end the last


def test_the_last_step_of_a_request_is_not_lost(start):  # S7.11
    engine = start(offload="eager")
    engine.run(PROMPT, max_tokens=1)  # one step of prefill, and that is all
    assert engine.cache.statistics().chunks_stored == 7


def test_a_block_cannot_be_stored_in_the_step_that_computes_it(start):  # S7.9
    """vLLM hashes it before that. Somebody may have confirmed the same chunk long ago, in a block that is gone."""
    engine = start()
    keys = engine.requests[engine.submit(PROMPT)].block_hashes
    step, seen = engine.cache.step, []

    def step_and_look():
        seen.append(engine.device.find(keys[0]) is not None)
        return step()

    engine.cache.step = step_and_look
    engine.step()
    engine.step()
    assert seen == [False, True]


@pytest.mark.parametrize("together", [False, True])
def test_the_same_prompt_is_stored_once(start, together):
    """Also while its first store is in flight."""
    engine = start(offload="eager", slowest=20, device_blocks=80)
    for _ in range(3):
        engine.submit(PROMPT, max_tokens=1)
        if not together:
            engine.drain()
    engine.drain()
    assert engine.cache.statistics().chunks_stored == 7
    engine.check_nothing_leaked()


def test_a_store_outlives_its_request_and_gives_its_blocks_back_deepest_first(start):  # S7.1, S7.6
    engine = start(offload="eager", slowest=30)
    id = engine.submit(PROMPT, max_tokens=1)
    keys = engine.requests[id].block_hashes
    while id in engine.requests:
        engine.step()
    assert engine.half.has_transfers() and order_on_device(engine, keys) == []
    engine.drain()  # S7.42
    assert order_on_device(engine, keys) == [6, 5, 4, 3, 2, 1, 0]
    engine.check_nothing_leaked()


def test_lazy_does_not_read_the_order_of_eviction_where_it_stores_at_hand_out(start):  # S7.47
    engine = start(offload="lazy", device_blocks=100)
    flood(engine, prompts=40)
    assert engine.cache.statistics().chunks_stored > 0 and engine.counts["blocks walked"] == 0


# Going wrong


def test_a_failed_load_is_forgotten_when_its_request_ends(start):
    """The next request of that name loads."""
    engine = start(offload="eager")
    engine.run(PROMPT)
    flood(engine)
    engine.ranks[0].failure_rate = 1.0
    engine.run(PROMPT)
    assert not len(engine.half._requests)


def test_a_request_that_is_admitted_again_finds_what_others_have_computed(start, monkeypatch):
    """While its first run ends, nothing on the device counts as computed; when the second one begins, it does again."""
    engine = start(offload="eager")
    engine.run(PROMPT)
    flood(engine)
    engine.ranks[0].failure_rate = 1.0
    admit, is_hidden = engine.cache.admit, []

    def admitted(*request):
        is_hidden.append(b"of another request" in engine.device._unwritten())
        admit(*request)

    monkeypatch.setattr(engine.cache, "admit", admitted)
    engine.run(PROMPT)
    assert is_hidden == [False, False]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_the_one_of_three_loads_that_fails_is_computed(start, asynchronous):
    engine = start(offload="eager", asynchronous=asynchronous, device_blocks=80)
    prompts = [[first, *PROMPT] for first in (900, 901, 902)]
    said = [engine.run(prompt) for prompt in prompts]
    flood(engine)
    engine.ranks[0].pace = NEVER
    for prompt in prompts:
        engine.submit(prompt)
    engine.step()
    _, second, _ = engine.ranks[0].copies.values()
    second.fails, engine.ranks[0].pace = True, AT_ONCE
    engine.drain()
    assert sorted(engine.finished[-3:]) == sorted(said)
    assert (engine.counts["loads done"], engine.counts["loads failed"]) == (2, 1)
    engine.check_nothing_leaked()


def test_one_rank_that_fails_fails_the_load(start):
    engine = start(offload="eager", ranks=3, slowest=4)
    said = engine.run(PROMPT)
    flood(engine)
    engine.ranks[1].failure_rate = 1.0
    assert engine.run(PROMPT) == said
    assert engine.counts["loads failed"] == 1


def test_an_aborted_load_keeps_its_blocks_until_the_bytes_have_landed(start):  # S7.22, S7.13
    engine = start(offload="eager", slowest=20)
    engine.run(PROMPT)
    flood(engine)
    id = engine.submit(PROMPT)
    engine.step()
    assert engine.requests[id].status is LOADING
    engine.abort(id)
    assert engine.pool.get_num_free_blocks() < engine.pool.num_gpu_blocks - 1
    engine.drain()
    engine.check_nothing_leaked()


# Being constructed


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ({"speed": "fast"}, "unknown option 'speed'; known options are cpu_bytes_to_use"),
        ({"offload": "never"}, "offload must be one of lazy, eager; got 'never'"),
        ({"offload": 1}, "offload must be one of lazy, eager; got 1"),
        ({"reset": "always"}, "reset must be one of with_device, with_connector, never; got 'always'"),
        ({"reset": []}, "reset must be one of"),
        ({"policy": "fifo"}, "policy"),
        ({"store_after": 0}, "store_after is a whole number of prompts, at least 1; got 0"),
        ({"min_store_tokens": "4k"}, "min_store_tokens is a whole number of tokens, at least 0; got '4k'"),
        ({"min_load_tokens": True}, "min_load_tokens is a whole number of tokens, at least 0; got True"),
        ({"checkpoint_interval": 6}, "checkpoint_interval must be a multiple of the grid's 4 tokens, got 6"),
    ],
)
def test_options_are_checked_by_name(start, said, answer):
    with pytest.raises(ConfigurationError, match=answer):
        start(**said)


def test_memory_is_whole_bytes_and_enough_for_a_chunk(tmp_path):
    def connector(**said):
        made = CPUPrefixCacheConnector(vllm_config(tmp_path, **said), KVConnectorRole.SCHEDULER, one_group(80))
        made.bind_gpu_block_pool(BlockPool(80, enable_caching=True, hash_block_size=BLOCK))

    with pytest.raises(ConfigurationError, match="needs cpu_bytes_to_use, a whole number of bytes"):
        connector()
    with pytest.raises(ConfigurationError, match="a whole number of bytes, at least 1; got '48 GiB'"):
        connector(cpu_bytes_to_use="48 GiB")
    with pytest.raises(
        ConfigurationError, match="a chunk and its checkpoint on all ranks, at least 2048 bytes; got 100"
    ):
        connector(cpu_bytes_to_use=100)


def test_a_connector_without_prefix_caching_logs_it_and_does_nothing(tmp_path, log):
    config = vllm_config(tmp_path, cpu_bytes_to_use=2**30)
    config.cache_config.enable_prefix_caching = False
    connector = CPUPrefixCacheConnector(config, KVConnectorRole.SCHEDULER, one_group(80))
    assert "prefix caching is off" in log.text
    connector.bind_gpu_block_pool(BlockPool(80, enable_caching=False, hash_block_size=BLOCK))
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector.build_connector_meta(None).plan is None
    assert not connector.has_pending_push_work()


def test_a_connector_without_prefix_caching_checks_the_options_and_not_the_model(tmp_path):
    """vLLM then keeps states in another way, which we could not: mamba_cache_mode is "none"."""

    def connector(**said):
        config = vllm_config(tmp_path, **said)
        config.cache_config.enable_prefix_caching = False
        caches = KVCacheConfig(80, [], [full(), state(mode="none")])
        return CPUPrefixCacheConnector(config, KVConnectorRole.SCHEDULER, caches)

    assert connector(cpu_bytes_to_use=2**30).scheduler is None
    with pytest.raises(ConfigurationError, match="unknown option 'polcy'"):
        connector(cpu_bytes_to_use=2**30, polcy="lru")


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (8, 1), (4, 2)])
def test_a_token_of_mla_takes_as_many_host_bytes_on_any_number_of_ranks(tmp_path, tensor, pipeline):
    config = vllm_config(tmp_path, cpu_bytes_to_use=2**30)
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.world_size = tensor * pipeline
    settings = Settings.of(config, KVCacheConfig(80, [], [latent()]))
    block_bytes = settings.planner.host_block_bytes  # of all layers that a stage has
    assert settings.host_bytes // block_bytes * pipeline == 2**30 // (2 * BLOCK * 16 * 4)


def test_a_kind_of_state_that_is_not_known_is_refused_and_not_guessed_at(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class LikeFullAttention(FullAttentionSpec):
        """Keeps of its blocks nobody knows what."""

    spec = LikeFullAttention(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=ATTENTION.dtype)
    config = vllm_config(tmp_path, cpu_bytes_to_use=2**30)
    caches = KVCacheConfig(80, [], [KVCacheGroupSpec(["full"], spec)])
    with pytest.raises(ConfigurationError, match="KV state of kind LikeFullAttention is not known; known are Chunked"):
        CPUPrefixCacheConnector(config, KVConnectorRole.SCHEDULER, caches)


def test_admission_options_reach_the_cache(start):
    engine = start(offload="eager", store_after=2, min_store_tokens=len(PROMPT))
    stored = []
    for prompt in (PROMPT, PROMPT, range(500, 529), range(500, 529)):
        engine.run(list(prompt))
        stored.append(engine.cache.statistics().chunks_stored)
    assert stored == [0, 7, 7, 7]


def test_a_device_that_is_not_full_keeps_what_it_has(start):
    """Blocks that hold nothing are handed out first, and what was stored does not stand in front of them. The host has
    no room for all that the device holds."""
    engine = start(offload="lazy", device_blocks=1000, host_blocks=900)
    for prompt in (PROMPT, range(500, 530), PROMPT):
        engine.run(list(prompt))
    statistics = engine.cache.statistics()
    assert (statistics.chunks_stored, statistics.chunks_loaded) == (0, 0)
    flood(engine, prompts=118)  # 944 blocks: fewer than 40 are still empty, and the stretch is 40 long
    engine.run(PROMPT)
    assert engine.cache.statistics().chunks_loaded == 0
