"""Context parallelism: ranks divide the tokens of a prompt among them, and each keeps its own part on the host.

With blocks of 4 tokens on each of two ranks (`decode_context_parallel_size`), one token after another:

    tokens            0   1   2   3   4   5   6   7     8 ...
    rank 0            0       2       4       6         a block of 4 tokens on each, and one of 8 to the scheduler
    rank 1                1       3       5       7

Under prefill context parallelism alone the ranks divide what they compute, and all have all KV.
"""

import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from connector.vllm.multi.connector import _bytes_per_token
from connector.vllm.settings import Settings
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import conversation_bytes
from tests.vllm.byte_ranks import close, forget_the_device, with_byte_ranks
from tests.vllm.engine import BLOCK, Engine, full, latent, local, state, vllm_config, window
from tests.vllm.test_stress import live_through

BLOCKS = 48
KIMI = [latent(), state()]  # a latent whose tokens are divided, and states of which each rank has heads of its own
MODELS = {"attention": [full()], "latent": [latent()], "latent and states": KIMI}


def settings(folder, *groups, tier=None, **parallel):
    """Settings of an engine of four ranks."""
    config = vllm_config(folder, cpu_bytes_to_use=64 << 20)
    for name, value in {"world_size": 4, "tensor_parallel_size": 4, **parallel}.items():
        setattr(config.parallel_config, name, value)
    config.cache_config.num_gpu_blocks = BLOCKS
    if tier is not None:
        config.kv_transfer_config.kv_connector_extra_config["tier"] = tier
    return Settings.of(config, KVCacheConfig(BLOCKS, [], list(groups)))


def tokens(count, seed=1):
    return [random.Random(seed + at).randrange(997) for at in range(count)]


@contextmanager
def engine_of(folder, groups, size, divided, **more):
    """An engine of so many ranks with real memory, of which so many divide the tokens."""
    usual = dict(groups=groups, retention=None, offload="eager", tensor_parallel=True)
    engine = with_byte_ranks(Engine(folder, ranks=size, context_parallel=divided, **usual | more))
    try:
        yield engine
    finally:
        close(engine)


# A round trip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("size", "divided"), [(2, 2), (4, 2), (4, 4)])
def test_each_rank_gets_back_what_it_had_of_a_prompt(tmp_path, model, size, divided):
    """The engine compares the bytes of each rank with those that it wrote there."""
    with engine_of(tmp_path, MODELS[model], size, divided) as engine:
        assert engine.grid == divided * BLOCK
        answer = engine.run(tokens(50))
        forget_the_device(engine)
        assert engine.run(tokens(50)) == answer
        assert engine.admitted == [(0, 0), (0, 48)], "the host had nothing of it"
        assert engine.counts["loads done"] == 1
        engine.check_nothing_leaked()


def test_tokens_that_the_device_still_has_are_not_loaded(tmp_path):
    with engine_of(tmp_path, [full()], 2, 2) as engine:
        engine.run(tokens(50))
        forget_the_device(engine)
        engine.run(tokens(24), max_tokens=1)
        engine.run(tokens(50))
        assert engine.admitted[1:] == [(0, 16), (24, 48)]


@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize("length", [46, 50, 54, 61])
@pytest.mark.parametrize("divided", [2, 4])
def test_a_prompt_with_states_is_found_wherever_it_ends(tmp_path, divided, length, retention):
    """vLLM ends its steps at the last 4 tokens of all, where hits of its device may end, and no chunk does."""
    with engine_of(tmp_path, KIMI, 4, divided, retention=retention, host_blocks=400) as engine:
        engine.run(tokens(length))
        forget_the_device(engine)
        engine.run(tokens(length))
        assert engine.admitted == [(0, 0), (0, (length - 1) // engine.grid * engine.grid)]


@pytest.mark.parametrize("model", MODELS)
def test_a_byte_that_one_rank_has_lost_is_noticed(tmp_path, model):
    with engine_of(tmp_path, MODELS[model], 2, 2) as engine:
        engine.run(tokens(50))
        forget_the_device(engine)
        engine.ranks[1].region[:, 100] ^= 1
        with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
            engine.run(tokens(50))


def test_the_part_of_another_rank_is_not_taken_for_ones_own(tmp_path):
    """The control of the control."""
    with engine_of(tmp_path, [latent()], 2, 2) as engine:
        engine.run(tokens(50))
        forget_the_device(engine)
        first, second = engine.ranks
        second.region.copy_(first.region)
        with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
            engine.run(tokens(50))


@pytest.mark.parametrize("model", MODELS)
def test_nobody_reads_wrong_kv_where_everything_goes_wrong(tmp_path, model):
    options = dict(groups=MODELS[model], retention=None, ranks=2, tensor_parallel=True, context_parallel=2)
    engine = Engine(tmp_path, failure_rate=0.05, device_blocks=96, **options)
    live_through(engine, requests=400)
    engine.check_nothing_leaked()
    happened = ("hit", "loads done", "loads failed", "preemptions", "stores planned")
    assert all(engine.counts[each] for each in happened), engine.counts


def test_each_rank_has_files_of_its_own_below_the_host(tmp_path):
    options = dict(ranks=2, tensor_parallel=True, context_parallel=2, host_blocks=60)
    engine = Engine(tmp_path, groups=[latent()], offload="eager", tier={}, **options)
    live_through(engine, requests=300)
    engine.check_nothing_leaked()
    assert [type(rank.tier).__name__ for rank in engine.ranks] == ["FakeTier", "FakeTier"]
    assert engine.counts["reads planned"] and engine.counts["writes planned"]


# Memory


def test_ranks_that_divide_the_tokens_have_a_region_each(tmp_path):
    """A token takes as much memory as where the ranks share a region, and have all tokens."""
    together = settings(tmp_path, latent())
    apart = settings(tmp_path, latent(), decode_context_parallel_size=4)
    assert (together.is_shared, together.regions) == (True, 1)
    assert (apart.is_shared, apart.regions) == (False, 4)
    assert (together.planner.grid_tokens, apart.planner.grid_tokens) == (BLOCK, 4 * BLOCK)
    held = [conversation_bytes(each.planner, 64) * each.regions for each in (together, apart)]
    assert held[0] == held[1]


def test_states_are_not_divided(tmp_path):
    made = settings(tmp_path, *KIMI, decode_context_parallel_size=2)
    assert [group.block_tokens for group in made.planner.groups] == [2 * BLOCK, BLOCK]
    assert (made.planner.grid_tokens, made.hashes_per_chunk) == (2 * BLOCK, 2)


def test_ranks_that_divide_only_what_they_compute_have_all_kv(tmp_path):
    """Ranks of one tensor-parallel group share a region, as ever."""
    made = settings(tmp_path, latent(), tensor_parallel_size=2, prefill_context_parallel_size=2)
    assert (made.planner.grid_tokens, made.is_shared, made.regions, made.ranks) == (BLOCK, True, 2, 4)


def test_a_token_crosses_one_of_the_links(tmp_path):
    """The link of the rank that has it."""
    caches = KVCacheConfig(BLOCKS, [], KIMI)
    states = _bytes_per_token(KVCacheConfig(BLOCKS, [], [state()]), 1)
    whole, part = _bytes_per_token(caches, 1) - states, _bytes_per_token(caches, 4) - states
    assert whole == pytest.approx(4 * part)


# Groups of which vLLM divides none


def test_windows_of_which_each_rank_would_have_a_part_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"group 'window-1' is neither .*-parallel-size 1"):
        settings(tmp_path, full(), window(8), decode_context_parallel_size=2)
    with pytest.raises(ConfigurationError, match="vLLM finds chunked-local attention only in blocks of that length"):
        settings(tmp_path, full(), local(8), decode_context_parallel_size=2)


@pytest.mark.skipif(
    "dcp_sharded" not in SlidingWindowSpec.__dataclass_fields__, reason="vLLM before 0.31 has no such drafter"
)
def test_a_drafter_that_has_all_tokens_on_each_rank_may_have_windows(tmp_path):
    drafter = window(8)
    drafter.kv_cache_spec = replace(drafter.kv_cache_spec, dcp_sharded=False)
    made = settings(tmp_path, full(), drafter, decode_context_parallel_size=2)
    assert [group.block_tokens for group in made.planner.groups] == [2 * BLOCK, BLOCK]


def test_states_must_lie_where_the_steps_of_vllm_end(tmp_path):
    """At the ends of one rank's blocks, not of those of all: it would give a state the hash of a later token."""
    for length in (2 * BLOCK, BLOCK // 2):
        groups = latent(), state(block=length)
        refuses = pytest.raises(ConfigurationError, match="hashes states as if they were of later tokens")
        with refuses if length > BLOCK else nullcontext():
            settings(tmp_path, *groups, decode_context_parallel_size=2)


# Tiers


def test_engines_that_divide_tokens_otherwise_never_meet(tmp_path):
    (tmp_path / "tier").mkdir()
    tier = {"kind": "file", "path": str(tmp_path / "tier"), "bytes": 1 << 30, "revision": "1"}

    def of(**parallel):
        return settings(tmp_path, full(), tier=tier, **parallel).tier.namespace

    divided = {"decode_context_parallel_size": 2}
    namespaces = [
        of(),
        of(**divided),
        of(**divided, cp_kv_cache_interleave_size=BLOCK),
        of(decode_context_parallel_size=4),
        of(tensor_parallel_size=2, prefill_context_parallel_size=2),
        of(tensor_parallel_size=2, prefill_context_parallel_size=2, **divided),
        of(tensor_parallel_size=2, pipeline_parallel_size=2),
    ]
    assert len({each.folder for each in namespaces}) == len(namespaces)
    assert of(**divided) == of(**divided)


def test_folders_of_engines_without_it_are_found_as_before(tmp_path):
    (tmp_path / "tier").mkdir()
    tier = {"kind": "file", "path": str(tmp_path / "tier"), "bytes": 1 << 30, "revision": "1"}
    named = settings(tmp_path, full(), tier=tier).tier.namespace.spelled
    assert not [name for name in named if "context" in name]
