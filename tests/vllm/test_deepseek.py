"""DeepSeek V4-Flash and V4.1-Flash: what the host keeps of them, by the planner and by an engine that runs.

V4-Flash                   3.8 KiB a token, and at the end of a prompt windows and what compressors have not
                           compressed yet: 15.9 MiB
V4.1-Flash                 1.8 KiB a token, and nothing more: vLLM computes its windows again
V4.1-Flash, windows kept   1.8 KiB a token, and at the end of a prompt 3.5 MiB (`--no-swa-bounded-replay`)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, SlidingWindowMLASpec

from connector.vllm.groups import device_blocks_per_chunk, planned_group_ids, planner_for
from cpu_prefix_cache.deciding import HybridChunkPlanner, conversation_bytes
from tests.vllm.deepseek import BLOCK, v4_flash, v41_flash
from tests.vllm.engine import Engine, vllm_config
from tests.vllm.planning import kv_cache_configs

KIB, GIB = 2**10, 2**30
PROMPT = 8_192


class Model(NamedTuple):
    specs: Callable[[], dict[str, KVCacheSpec]]
    kinds: list[str]  # of the groups that are kept
    token_bytes: float
    tokens_in_a_gib: dict[int, int]  # by the tokens of a prompt
    device_blocks: int  # that vLLM allocates for a chunk


replays = pytest.mark.skipif(
    "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__, reason="vLLM replays windows from 0.31 on"
)
MODELS = [
    pytest.param(
        Model(
            v4_flash,
            ["window", "window", "prefix", "window", "window"],
            3_915.0,
            {8_192: 180_337, 32_768: 242_666, 131_072: 265_617},
            device_blocks=4 + 4 + 1 + 64 + 32,
        ),
        id="V4-Flash",
    ),
    pytest.param(
        Model(
            v41_flash,
            ["prefix"],
            1_797.75,
            {8_192: 597_269, 32_768: 597_269, 131_072: 597_269},
            device_blocks=8 + 8 + 1 + 1,
        ),
        id="V4.1-Flash",
        marks=replays,
    ),
    pytest.param(
        Model(
            lambda: v41_flash(replays=False),
            ["window", "window", "prefix"],
            1_797.75,
            {8_192: 477_815, 32_768: 562_136, 131_072: 588_081},
            device_blocks=8 + 8 + 1 + 1,
        ),
        id="V4.1-Flash, windows kept",
    ),
]


def made_by_vllm(tmp_path, model: Model, memory: int) -> tuple[HybridChunkPlanner, KVCacheConfig]:
    config = vllm_config(tmp_path, max_model_len=131_072, cpu_bytes_to_use=1)
    config.cache_config.kv_cache_layout = "BLNHC"
    config.cache_config.block_size = BLOCK
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # where vLLM does not know the platform
    [caches] = kv_cache_configs(config, [model.specs()], memory)
    return planner_for(config, caches), caches


@pytest.mark.parametrize("model", MODELS)
def test_the_planner_keeps_what_vllm_caches(tmp_path, model):
    planner, caches = made_by_vllm(tmp_path, model, memory=8 * GIB)
    assert [group.kind for group in planner.groups] == model.kinds
    assert tuple(planned_group_ids(caches)) == caches.prefix_cacheable_group_ids
    assert planner.grid_tokens == BLOCK and any(group.lanes is not None for group in planner.groups)
    assert device_blocks_per_chunk(planner, caches) == model.device_blocks
    assert planner.chunk_bytes / planner.grid_tokens == model.token_bytes
    assert {length: GIB * length // conversation_bytes(planner, length) for length in model.tokens_in_a_gib} == (
        model.tokens_in_a_gib
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_running_engine_keeps_as_much(tmp_path, model):
    """Two prompts come back at their last boundary from a host that has room for no more."""
    planner, caches = made_by_vllm(tmp_path, model, memory=GIB)
    caches = replace(generate_scheduler_kv_cache_config([caches]), num_blocks=1_500)
    usual = dict(
        caches=caches, device_blocks=1_500, offload="eager", policy="lru", max_model_len=16_384, step_tokens=1_024
    )
    each = conversation_bytes(planner, PROMPT) // planner.host_block_bytes
    engine = Engine(tmp_path, host_blocks=2 * each, slowest=1, **usual)
    prompts = [[1_000 * at + token for token in range(PROMPT + 1)] for at in range(2)]
    for at, prompt in enumerate(prompts, start=1):
        engine.run(prompt, max_tokens=1)
        assert engine.cache.pool.statistics().cached == at * each
    engine.pool.reset_prefix_cache()
    for prompt in prompts:
        engine.run(prompt, max_tokens=1)
        assert engine.admitted[-1] == (0, PROMPT)
    engine.run([10_000 + token for token in range(BLOCK + 1)], max_tokens=1)  # the control: there was no room left
    engine.pool.reset_prefix_cache()
    for prompt in prompts:
        engine.run(prompt, max_tokens=1)
    assert engine.admitted[-2:] != [(0, PROMPT)] * 2
