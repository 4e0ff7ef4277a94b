"""Replays of models that need checkpoints to resume: prompts of letters, a letter to a chunk of 16 tokens."""

import pytest

from cpu_prefix_cache.deciding import ChunkLocalGroup, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.tools.replay.below import ThreeTierEngine
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.replayed_model import counted, most_blocks, planner_of
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.two_tiers import ReplayEngine, replay_device, replay_two_tiers
from tests.unit.replay.traces import random_prompts, trace_of

GRID = 16
FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=512)
STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=512)
LOCAL = ChunkLocalGroup(name="local", block_tokens=GRID, block_bytes=512, window_tokens=48)
WINDOW = WindowGroup(name="window", block_tokens=GRID, block_bytes=512, window_tokens=40)
KINDS = [[FULL], [FULL, STATE], [FULL, LOCAL], [FULL, WINDOW], [STATE], [WINDOW], [FULL, STATE, LOCAL, WINDOW]]
NAMES = ["-".join(group.name for group in groups) for groups in KINDS]
# Prompts that push everything else out of a device that is hardly larger than one of them.
OTHERS = ["0123", "4567", "89!?"]


def engine_of(prompts, groups, host=1_000, device=1_000, below=None, offload="lazy", policy="lru"):
    trace = trace_of(prompts, GRID)
    tiers = HostTier(host, policy), DeviceTier(device, offload)
    planner = counted(planner_of(groups, trace))
    if below is None:
        return ReplayEngine(trace, *tiers, planner), trace
    return ThreeTierEngine(trace, *tiers, BelowTier(below), planner=planner), trace


def hits(*prompts, groups, **tiers):
    """How many chunks of each prompt were found."""
    engine, trace = engine_of(prompts, groups, **tiers)
    found = []
    for request in trace.requests:
        found.append(engine.serve(request))
        engine.cache.check_valid()
        engine.gpu.check_valid()
        now, gpu = engine.cache.statistics(), engine.gpu.statistics()
        assert now.running == now.storing == now.loading == now.pool.pinned == gpu.pinned == gpu.writing == 0
    return found


def test_full_attention_is_found_wherever_prompts_part():
    assert hits("abc", "abcd", "abx", "abcd", groups=[FULL]) == [0, 3, 2, 4]


def test_states_are_found_at_ends_of_prompts_and_from_the_second_time_on_where_prompts_part():
    assert hits("abc", "abcd", "abx", "aby", "abz", groups=[FULL, STATE]) == [0, 3, 0, 2, 2]


def test_local_chunks_need_no_checkpoint_where_they_begin():
    assert hits("abcdef", "abcx", "abcdef", "abcde", groups=[FULL, LOCAL]) == [0, 3, 6, 3]


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("groups", KINDS, ids=NAMES)
def test_a_prompt_that_left_the_device_comes_from_the_host_with_its_checkpoint(groups, offload):
    small = dict(groups=groups, device=blocks(groups, chunks=6, checkpoints=3), offload=offload)
    prompts = ["abcd", *OTHERS, "abcde"]
    assert hits(*prompts, **small)[-1] == 4
    host = blocks(groups, chunks=1, checkpoints=1)
    assert hits(*prompts, host=host, **small)[-1] < 4, "the control: a host that holds one chunk"


def blocks(groups, chunks, checkpoints):
    planner = planner_of(groups, trace_of(["a"], GRID))
    return chunks * planner.host_blocks_per_chunk + checkpoints * max(map(planner.checkpoint_blocks, range(1, 7)))


@pytest.mark.parametrize("groups", KINDS, ids=NAMES)
def test_a_prompt_that_left_the_host_comes_from_the_tier_with_its_checkpoint(groups):
    prompts = ["abcd", *OTHERS, *(prompt.upper() + "z" for prompt in ("efgh", "ijkl", "mnop", "qrst")), "abcde"]
    sizes = blocks(groups, chunks=6, checkpoints=3), blocks(groups, chunks=16, checkpoints=4)
    small = dict(zip(("device", "host"), sizes, strict=True)) | dict(groups=groups, below=1_000)
    assert hits(*prompts, **small)[-1] == 4
    assert hits(*prompts, **{**small, "below": None})[-1] < 4, "the control: no tier"


@pytest.mark.parametrize("groups", KINDS, ids=NAMES)
def test_a_host_for_everything_evicts_nothing(groups):
    prompts = random_prompts(4, 120, "abc", longest=9)
    engine, trace = engine_of(prompts, groups, host=10**6, device=40)
    assert engine.most_blocks == most_blocks(trace, engine.planner)
    for request in trace.requests:
        engine.serve(request)
    assert engine.cache.statistics().pool.evictions == 0


@pytest.mark.parametrize("groups", KINDS, ids=NAMES)
def test_a_larger_host_finds_more_on_the_whole(groups):
    trace = trace_of(random_prompts(5, 150, "abcd", longest=6), GRID)
    planner = counted(planner_of(groups, trace))
    least = max(8, planner.fewest_blocks)
    found = [
        replay_two_tiers(trace, HostTier(host), DeviceTier(24), Meter("", trace.blocks), planner).hit_blocks
        for host in (least, 10 * least, 10**5)
    ]
    alone = replay_device(trace, DeviceTier(24), Meter("", trace.blocks), planner).hit_blocks
    assert alone <= found[0] < found[1] <= found[2]


def test_a_load_counts_the_blocks_of_its_checkpoint():
    loaded = []
    for groups in ([FULL], [FULL, STATE]):
        engine, trace = engine_of(["abcd", *OTHERS, "abcde"], groups, device=14)
        for request in trace.requests:
            engine.serve(request)
        loaded.append(engine.loaded_blocks)
    assert loaded[0] <= 4 and loaded[1] == 4 + 1


def test_a_prompt_longer_than_the_device_is_cut():
    assert hits("abcdefghijklmnop", "abcdefghijklmnop", groups=[FULL, STATE], device=9)[-1] == 7
