"""Groups of which all ranks have the same bytes beside others, such as Kimi Linear's latents beside its states.

Ranks share a region, whose host blocks are rows of a lane for each rank (`shares.py`). The latent is there once, in
whole rows, and of a state each rank has its own in its lane.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from connector.vllm.settings import Settings
from connector.vllm.start_line import start_line
from connector.vllm.tier_namespace import engine_namespace
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache.copying import ChosenCopier
from cpu_prefix_cache.deciding import (
    Direction,
    GroupCopy,
    HybridChunkPlanner,
    conversation_bytes,
)
from tests.vllm import byte_ranks
from tests.vllm.byte_ranks import BlockMemory, carried, damage, fail_once, forget_the_device, swap_lanes
from tests.vllm.engine import BLOCK, Engine, full, latent, state, vllm_config, window
from tests.vllm.test_ranks import meet
from tests.vllm.test_stress import live_through
from tests.vllm.test_tier_stress import FAULTS
from tests.vllm.two_processes import said_by

KIMI = [latent(), state()]
MODELS = {
    "latent and states": KIMI,
    "latent and a drafter's heads": [latent(), full(layers=1)],
    "latent, windows and states": [latent(), window(9), state()],
    "latent of long blocks, and windows": [latent(block=8), window(9, layers=3)],
}
PROMPT = list(range(50))
LAST = 48  # the last boundary of the prompt

every_model = pytest.mark.parametrize("model", MODELS)


def engine_of(folder, groups=KIMI, ranks=2, **options):
    return byte_ranks.engine_of(folder, groups, ranks, **options)


def rows(engine, group):
    """The host blocks that stores of this group have written, in lanes."""
    lanes = engine.cache.planner.ranks
    return (
        engine.ranks[0].region[sorted(engine.ranks[0].stored[group])].view(-1, lanes, engine.cache.planner.lane_bytes)
    )


# A round trip


@every_model
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_gets_back_its_own_and_what_all_of_them_have(tmp_path, model, size):
    """The engine compares the bytes of each rank with those that it wrote there."""
    with engine_of(tmp_path, MODELS[model], size) as engine:
        answer = engine.run(PROMPT)
        forget_the_device(engine)
        assert engine.run(PROMPT) == answer
        assert engine.admitted == [(0, 0), (0, LAST)], "the host had nothing of it"
        assert engine.counts["loads done"] == 1
        engine.check_nothing_leaked()


def test_the_latent_is_in_the_region_once_and_of_a_state_each_rank_has_its_own(tmp_path):
    with engine_of(tmp_path, ranks=4) as engine:
        engine.run(PROMPT)
        assert len({rank.region.data_ptr() for rank in engine.ranks}) == 1
        latents, states = (rows(engine, group) for group in (0, 1))
        planner = engine.cache.planner
        assert planner.pieces[0].num_bytes <= planner.pieces[0].host_blocks * planner.host_block_bytes
        used = latents.view(len(latents), -1)[:, : planner.pieces[0].num_bytes]
        assert len(used.unique(dim=0)) == len(used), "a latent is there twice"
        lanes = states.view(-1, planner.lane_bytes)
        assert len(lanes.unique(dim=0)) == len(lanes), "two ranks have the same"


def test_tokens_that_the_device_still_has_are_not_loaded(tmp_path):
    with engine_of(tmp_path) as engine:
        engine.run(PROMPT)
        forget_the_device(engine)
        engine.run(PROMPT[:24], max_tokens=1)
        engine.run(PROMPT)
        assert engine.admitted[1:] == [(0, 0), (24, LAST)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("group", [0, 1])
def test_a_byte_that_one_lane_has_lost_is_noticed(tmp_path, size, group):
    """The control: of a latent on all ranks, of a state on the one whose lane it is."""
    with engine_of(tmp_path, ranks=size) as engine:
        engine.run(PROMPT)
        forget_the_device(engine)
        damage(engine, group, lane=size - 1)
        with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
            engine.run(PROMPT)


def test_the_lane_of_another_rank_is_not_taken_for_ones_own(tmp_path):
    """The control of the control."""
    with engine_of(tmp_path) as engine:
        engine.run(PROMPT)
        forget_the_device(engine)
        swap_lanes(engine, group=1)
        with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
            engine.run(PROMPT)


def test_each_latent_is_written_by_one_rank(tmp_path):
    """All ranks carry some of them."""
    with engine_of(tmp_path, ranks=3) as engine:
        engine.run(PROMPT)
        pieces = engine.cache.planner.pieces
        latents, states = (len(engine.ranks[0].stored[at]) // piece.host_blocks for at, piece in enumerate(pieces))
        latent_bytes, state_bytes = (piece.num_bytes for piece in pieces)
        carried = [rank.carried[Direction.STORE] for rank in engine.ranks]
        assert sum(carried) == latents * latent_bytes + 3 * states * state_bytes
        assert latents > 3 and min(carried) > states * state_bytes
        forget_the_device(engine)
        engine.run(PROMPT)
        loaded = LAST // BLOCK * latent_bytes + state_bytes
        assert [rank.carried[Direction.LOAD] for rank in engine.ranks] == [loaded] * 3


# Failures


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_chunks_that_one_rank_could_not_store_are_found_by_nobody(tmp_path, failing):
    with engine_of(tmp_path, ranks=3, step_tokens=64) as engine:
        fail_once(engine.ranks[failing])
        answer = engine.run(PROMPT)
        assert engine.cache.statistics().stores_failed == 1
        for _ in range(2):  # computed, and stored again; then loaded
            forget_the_device(engine)
            assert engine.run(PROMPT) == answer
        assert engine.admitted[-1] == (0, LAST)
        engine.check_nothing_leaked()


@pytest.mark.parametrize("failing", [0, 1])
def test_chunks_that_one_rank_could_not_load_are_computed_by_all(tmp_path, failing):
    with engine_of(tmp_path) as engine:
        answer = engine.run(PROMPT)
        forget_the_device(engine)
        fail_once(engine.ranks[failing])
        assert engine.run(PROMPT) == answer
        assert engine.cache.statistics().loads_failed == 1
        engine.check_nothing_leaked()


@every_model
def test_nobody_reads_wrong_bytes_where_requests_end_in_every_way(tmp_path, model):
    with engine_of(tmp_path, MODELS[model], device_blocks=120, host_blocks=400) as engine:
        live_through(engine, requests=120)
        engine.check_nothing_leaked()
        assert engine.counts["hit"] and engine.counts["loads done"] and engine.counts["preemptions"]


@pytest.mark.parametrize(("model", "offload"), zip(MODELS, ["lazy", "eager"] * 2, strict=True))
def test_nobody_reads_wrong_kv_where_everything_goes_wrong(tmp_path, model, offload):
    options = dict(
        groups=MODELS[model], retention=None, ranks=3, tensor_parallel=True, offload=offload, host_blocks=600
    )
    engine = Engine(tmp_path, failure_rate=0.05, device_blocks=40 + 40 * len(MODELS[model]), **options)
    live_through(engine, requests=400)
    engine.check_nothing_leaked()
    happened = ("hit", "loads done", "loads failed", "preemptions", "stores planned")
    assert all(engine.counts[each] for each in happened), engine.counts


# Coded latents


def narrow(pattern):
    """Bytes of bf16 numbers with one exponent."""
    return bytes(byte if at % 2 == 0 else 0x3F for at, byte in enumerate(pattern))


@pytest.mark.parametrize("stop", [5, 1000])
def test_coded_latents_are_found_up_to_the_first_that_does_not_fit(tmp_path, monkeypatch, stop):
    """Random bytes do not fit. The rank that was to write them reports it, by the host blocks of the plan."""
    seen = {}
    monkeypatch.setattr(
        byte_ranks,
        "SHAPED",
        {0: lambda pattern: pattern if seen.setdefault(pattern, len(seen)) == stop else narrow(pattern)},
    )
    coded, heads = latent(), full(layers=1)
    coded.kv_cache_spec = replace(coded.kv_cache_spec, dtype=torch.bfloat16, head_size=128)
    with engine_of(tmp_path, [coded, heads], ranks=3, codec="exponent") as engine:
        assert [group.codec for group in engine.cache.planner.groups] == ["exponent", "none"]
        answer = engine.run(PROMPT)
        forget_the_device(engine)
        assert engine.run(PROMPT) == answer
        assert engine.admitted == [(0, 0), (0, min(stop * BLOCK, LAST))]
        assert bool(engine.cache.statistics().store_unfit) == (stop < LAST)
        engine.check_nothing_leaked()


# Context parallelism


@pytest.mark.skipif("dcp_sharded" not in SlidingWindowSpec.__dataclass_fields__, reason="vLLM before 0.31 has none")
def test_windows_that_all_have_lie_beside_latents_that_ranks_divide(tmp_path):
    """Each has a part of the latent, in its lane; ranks 0 and 2 the same part, which is there twice."""
    drafter = window(9)
    fields = dict(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=9)
    drafter.kv_cache_spec = SlidingWindowMLASpec(**fields, dcp_sharded=False)
    with engine_of(tmp_path, [latent(), drafter], ranks=4, context_parallel=2) as engine:
        assert [group.lanes for group in engine.cache.planner.groups] == [None, 1]
        assert (engine.cache.planner.ranks, engine.grid) == (4, 2 * BLOCK)
        engine.run(PROMPT)
        forget_the_device(engine)
        engine.run(PROMPT)
        assert engine.admitted[-1] == (0, LAST)


# Below the host


def with_tier(folder, path, **options):
    """Files of two ranks at `path`."""
    folder.mkdir()
    tier = {"path": str(path), "model": "Kimi", "revision": "1", "offload": "eager"}
    return engine_of(folder, tier=tier, host_blocks=400, **options)


@pytest.fixture
def files(tmp_path):
    """Files of an engine that has ended, and what its ranks have written."""
    (tmp_path / "files").mkdir()
    with with_tier(tmp_path / "first", tmp_path / "files") as engine:
        engine.run(PROMPT)
        engine.check_nothing_leaked()
        assert engine.counts["writes planned"]
        return tmp_path / "files", [rank.device for rank in engine.ranks]


@contextmanager
def started_again(folder, files):
    path, devices = files
    with with_tier(folder, path) as engine:
        for rank, before in zip(engine.ranks, devices, strict=True):
            rank.device.remember(before)
        while not engine.half.tier.below.pool.statistics().cached:
            engine.step()
        yield engine


def test_after_a_restart_each_rank_has_its_own_again(tmp_path, files):
    with started_again(tmp_path / "second", files) as engine:
        engine.run(PROMPT)
        assert engine.admitted == [(0, LAST)]
        assert engine.counts["reads planned"]
        engine.check_nothing_leaked()


def test_there_is_one_file_for_all_ranks_of_which_the_first_writes_all(files):
    path, _ = files
    assert [each.name for each in path.glob("*/*")] == ["rank-0-of-1"]


def test_a_byte_of_one_lane_that_a_file_has_lost_is_noticed(tmp_path, files):
    """The control: nothing of it is served."""
    path, _ = files
    (blocks,) = path.glob("*/*/blocks")
    with open(blocks, "r+b") as file:
        for page in range(0, blocks.stat().st_size, 4096):  # a lane
            if page // 4096 % 2 == 1:
                file.seek(page)
                file.write(b"!")
    with started_again(tmp_path / "second", files) as engine:
        engine.run(PROMPT)
        assert engine.admitted == [(0, 0)]
        assert engine.half.tier.tier_statistics().refused


def test_nobody_reads_wrong_kv_where_reads_and_writes_of_the_tier_go_wrong(tmp_path):
    options = dict(tier={"offload": "eager"}, tier_faults=FAULTS, failure_rate=0.03, tier_slots=800)
    sizes = dict(device_blocks=100, host_blocks=300)
    engine = Engine(tmp_path, groups=KIMI, ranks=2, tensor_parallel=True, asynchronous=True, **sizes, **options)
    live_through(engine, requests=400)
    engine.check_nothing_leaked()
    statistics = engine.half.tier.tier_statistics()
    assert min(statistics.hit_tokens, statistics.late, statistics.refused) > 0


def test_files_in_which_each_rank_had_all_are_not_read(tmp_path):
    """A release before lanes has other ranks in their namespace."""
    tier = {"kind": "file", "path": str(tmp_path), "bytes": 1 << 30, "revision": "1"}
    config = config_of(tmp_path, tier=tier)
    settings = Settings.of(config, KVCacheConfig(48, [], KIMI))
    planner = HybridChunkPlanner(settings.planner.groups, max_model_len=256, in_pages=True)
    before = engine_namespace(settings.tier.tier, planner, config, BLOCK, owners=8)
    assert (settings.tier.namespace.spelled["ranks"], before.spelled["ranks"]) == (1, 8)
    assert settings.tier.namespace.folder != before.folder


# Memory


def kimi_linear(ranks):
    """As Kimi Linear 48B: 7 layers of latents, and 20 of states with 32 heads, in blocks of 256 tokens."""
    latents = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    shapes = (3, 3 * 32 * 128 // ranks), (32 // ranks, 128, 128)
    dtypes = torch.bfloat16, torch.float32
    states = MambaSpec(block_size=256, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    layers = iter(range(27))
    return [
        KVCacheGroupSpec([f"layer.{next(layers)}" for _ in range(count)], spec)
        for count, spec in ((7, latents), (7, states), (7, states), (6, states))
    ]


def config_of(folder, ranks=8, memory=64 << 20, length=256, **options):
    config = vllm_config(folder, cpu_bytes_to_use=memory, max_model_len=length, **options)
    config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = ranks
    return config


def settings_of(folder, *groups, **options):
    return Settings.of(config_of(folder, **options), KVCacheConfig(48, [], list(groups)))


def line_of(settings, length=32_768):
    return start_line(settings, length, ChosenCopier(None, "staged", "tests"))


def test_a_gib_holds_seven_times_the_tokens_of_kimi_linear_on_eight_ranks(tmp_path):
    settings = settings_of(tmp_path, *kimi_linear(8), memory=1 << 30, length=32_768)
    assert (settings.is_shared, settings.regions, settings.host_bytes) == (True, 1, 1 << 30)
    assert "tokens in prompts of 32,768" in line_of(settings)
    held = conversation_bytes(settings.planner, 32_768)
    each = HybridChunkPlanner(settings.planner.groups, max_model_len=32_768)  # the latent on each rank
    assert f": {(1 << 30) * 32_768 // held:,} tokens" in line_of(settings)
    tokens = [(1 << 30) * 32_768 // num_bytes for num_bytes in (held, 8 * conversation_bytes(each, 32_768))]
    assert tokens == [109_509, 16_275]


def test_one_rank_and_models_without_latents_have_what_they_had(tmp_path):
    for groups, ranks in ((KIMI, 1), ([full(), state()], 8), ([latent()], 8)):
        assert settings_of(tmp_path, *groups, ranks=ranks).planner.ranks == 1
    assert [settings_of(tmp_path, *groups).is_shared for groups in (KIMI, [latent()], [full()])] == [True, True, False]


def test_stages_of_a_pipeline_have_a_region_for_each_tensor_parallel_group(tmp_path):
    config = vllm_config(tmp_path, cpu_bytes_to_use=64 << 20)
    parallel = config.parallel_config
    parallel.world_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size = 8, 4, 2
    settings = Settings.of(config, KVCacheConfig(48, [], KIMI))
    assert (settings.regions, settings.planner.ranks, settings.host_bytes) == (2, 4, 32 << 20)


# Two processes


def carries(rank, folder, file, told):
    """In a process of its own."""
    meet(rank, file)
    config = config_of(folder, ranks=2)
    config.parallel_config.rank, config.cache_config.num_gpu_blocks = rank, 48
    caches = KVCacheConfig(48, [], KIMI)
    half = WorkerHalf(Settings.of(config, caches), config, caches)
    memory = BlockMemory(rank, 48, KIMI, parts={0: 0})
    half.register_kv_caches(memory.layers(KIMI))
    latents, states = half._settings.planner.pieces
    blocks = {0: range(1, 9), 1: range(9, 17)}
    copies = (
        GroupCopy(0, tuple(range(8 * latents.host_blocks)), tuple(blocks[0])),
        GroupCopy(1, tuple(range(100, 100 + 8 * states.host_blocks)), tuple(blocks[1])),
    )
    told.put((rank, carried(half, rank, memory, copies, blocks)))
    half.close()


def test_two_processes_load_what_both_have_stored(tmp_path):
    """The control is in it: half of the latents, and the states of the second, are not there before it has stored."""
    said = said_by(carries, tmp_path, tmp_path / "meeting")
    assert [said[rank][1] for rank in (0, 1)] == [[True] * 16] * 2
    assert [said[rank][0] for rank in (0, 1)] == [[True, False] * 4 + [True] * 8, [True, False] * 4 + [False] * 8]
