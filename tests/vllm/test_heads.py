"""Fewer KV heads than ranks: each head is in host memory once, as vLLM gives some adjacent ranks the same.

The model has two heads. Ranks have real memory, in which those with the same head have the same bytes (byte_ranks.py).
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from connector.vllm import groups
from connector.vllm.heads import different_heads
from connector.vllm.settings import Settings
from cpu_prefix_cache.deciding import Direction
from tests.vllm import byte_ranks
from tests.vllm.byte_ranks import damage, fail_once, forget_the_device, swap_lanes
from tests.vllm.engine import HEADS, Engine, drafting, head, latent, state, vllm_config
from tests.vllm.test_stress import live_through

ONE_HEAD = HEADS | dict(num_kv_heads=1)
WINDOW = KVCacheGroupSpec(["window.0", "window.1"], SlidingWindowSpec(**ONE_HEAD, sliding_window=9))
MODELS = {
    "heads": [head()],
    "heads, and windows of heads": [head(), WINDOW],
    "heads and states": [head(), state()],
    "heads, a latent and states": [head(), latent(), state()],
}
PROMPT = list(range(50))
LAST = 48  # the last boundary of the prompt

every_model = pytest.mark.parametrize("model", MODELS)


def engine_of(folder, model="heads", ranks=4, **options):
    return byte_ranks.engine_of(folder, MODELS[model], ranks, **options)


# A round trip


@every_model
@pytest.mark.parametrize("ranks", [4, 8])
def test_each_rank_gets_back_its_head(tmp_path, model, ranks):
    """The engine compares the bytes of each rank with those that it wrote there."""
    with engine_of(tmp_path, model, ranks) as engine:
        answer = engine.run(PROMPT)
        forget_the_device(engine)
        assert engine.run(PROMPT) == answer
        assert engine.admitted == [(0, 0), (0, LAST)]
        assert engine.cache.planner.pieces[0].lanes == 2
        engine.check_nothing_leaked()


@every_model
@pytest.mark.parametrize("lane", [0, 1])
def test_a_byte_of_one_head_that_the_host_has_lost_is_noticed(tmp_path, model, lane):
    """The control: the first head is in the first half of each row."""
    with engine_of(tmp_path, model) as engine:
        engine.run(PROMPT)
        forget_the_device(engine)
        damage(engine, group=0, lane=lane)
        with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
            engine.run(PROMPT)


def test_the_other_head_is_not_taken_for_ones_own(tmp_path):
    """The control of the control."""
    with engine_of(tmp_path) as engine:
        engine.run(PROMPT)
        forget_the_device(engine)
        swap_lanes(engine, group=0)
        with pytest.raises(AssertionError, match="was loaded with wrong bytes"):
            engine.run(PROMPT)


def test_ranks_with_the_same_head_write_it_in_turns(tmp_path):
    with engine_of(tmp_path) as engine:
        engine.run(PROMPT)
        (piece,) = engine.cache.planner.pieces
        assert len(engine.ranks[0].stored[0]) == 13 * piece.host_blocks
        carried = [rank.carried[Direction.STORE] for rank in engine.ranks]
        assert carried == [chunks * piece.num_bytes for chunks in (7, 6, 7, 6)]
        forget_the_device(engine)
        engine.run(PROMPT)
        assert [rank.carried[Direction.LOAD] for rank in engine.ranks] == [LAST // 4 * piece.num_bytes] * 4


def test_chunks_that_one_of_them_could_not_write_are_found_by_nobody(tmp_path):
    with engine_of(tmp_path, step_tokens=64) as engine:
        fail_once(engine.ranks[3])
        answer = engine.run(PROMPT)
        assert engine.cache.statistics().stores_failed == 1
        for _ in range(2):  # computed, and stored again; then loaded
            forget_the_device(engine)
            assert engine.run(PROMPT) == answer
        assert engine.admitted[-1] == (0, LAST)
        engine.check_nothing_leaked()


@every_model
def test_nobody_reads_wrong_kv_where_everything_goes_wrong(tmp_path, model):
    options = dict(groups=MODELS[model], retention=None, ranks=4, tensor_parallel=True, host_blocks=600)
    engine = Engine(tmp_path, failure_rate=0.05, device_blocks=40 + 40 * len(MODELS[model]), **options)
    live_through(engine, requests=300)
    engine.check_nothing_leaked()
    assert all(engine.counts[each] for each in ("hit", "loads done", "loads failed", "stores planned")), engine.counts


def test_after_a_restart_each_rank_has_its_head_again(tmp_path):
    (tmp_path / "files").mkdir()
    tier = {"path": str(tmp_path / "files"), "model": "two heads", "revision": "1", "offload": "eager"}
    before = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with engine_of(tmp_path / name, tier=tier, host_blocks=400) as engine:
            for rank, device in zip(engine.ranks, before, strict=bool(before)):
                rank.device.remember(device)
            while before and not engine.half.tier.below.pool.statistics().cached:
                engine.step()
            engine.run(PROMPT)
            engine.check_nothing_leaked()
            found = engine.admitted
            before = [rank.device for rank in engine.ranks]
    assert found == [(0, LAST)] and [each.name for each in tmp_path.glob("files/*/*")] == ["rank-0-of-1"]


# Memory


def test_a_gib_holds_as_many_tokens_on_eight_ranks_as_on_two(tmp_path, monkeypatch):
    """As Qwen3 30B-A3B with half of its four heads: 48 layers, heads of 128 values in bf16."""

    def tokens(ranks):
        spec = FullAttentionSpec(**ONE_HEAD | dict(head_size=128, dtype=torch.bfloat16))
        group = KVCacheGroupSpec([f"layer.{at}" for at in range(48)], spec)
        settings = Settings.of(config_of(tmp_path, ranks, memory=1 << 30), KVCacheConfig(100, [], [group]))
        return settings.host_blocks // settings.planner.host_blocks_per_chunk * settings.planner.grid_tokens

    assert [tokens(ranks) for ranks in (2, 4, 8)] == [21_844] * 3
    monkeypatch.setattr(groups, "different_heads", lambda config: None)
    assert [tokens(ranks) for ranks in (2, 4, 8)] == [21_844, 10_920, 5_460], "as before"


# Where that is certain


def config_of(folder, ranks=8, memory=64 << 20, **model):
    config = vllm_config(folder, cpu_bytes_to_use=memory)
    config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.distributed_executor_backend = "mp"
    for name, value in model.items():
        setattr(config.model_config.hf_text_config, name, value)
    return config


@pytest.mark.parametrize(("ranks", "heads"), [(8, 2), (4, 2), (2, None), (1, None), (3, None)])
def test_ranks_have_the_same_heads_if_there_are_more_of_them(tmp_path, ranks, heads):
    assert different_heads(config_of(tmp_path, ranks)) == heads


@pytest.mark.parametrize(
    "other",
    [
        {"num_global_key_value_heads": 1},
        {"num_global_key_value_heads": 2},
        {"swa_num_key_value_heads": 4},
        {"block_configs": [{"attention": {"n_heads_in_group": 2}}]},
        {"attention_other_setting": {"num_attention_groups": 8}},
        {"num_key_value_heads_per_layer": [2, 4]},
    ],
    ids=str,
)
def test_where_layers_may_have_other_heads_each_rank_keeps_its_own(tmp_path, other):
    assert different_heads(config_of(tmp_path, **other)) is None


def test_a_name_without_a_number_is_no_other_number_of_heads(tmp_path):
    assert different_heads(config_of(tmp_path, num_global_key_value_heads=None)) == 2


def test_ranks_on_several_machines_keep_their_own(tmp_path):
    config = config_of(tmp_path)
    config.parallel_config.nnodes = 2
    assert different_heads(config) is None
    config = config_of(tmp_path)
    config.parallel_config.distributed_executor_backend = "ray"
    assert different_heads(config) is None


def test_ranks_that_have_other_tokens_of_a_head_keep_their_own(tmp_path):
    config = config_of(tmp_path)
    config.parallel_config.decode_context_parallel_size = 2
    assert different_heads(config) is None


@pytest.mark.parametrize(("drafts", "heads"), [(2, 2), (4, None)])
def test_a_drafter_has_the_heads_of_the_model(tmp_path, drafts, heads):
    text = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": drafts})
    draft = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: drafts)
    config = config_of(tmp_path)
    config.speculative_config = drafting("eagle", draft_model_config=draft)
    assert different_heads(config) == heads


def test_groups_of_more_than_one_head_on_a_rank_are_each_ranks_own(tmp_path):
    """Then ranks divide the heads among them, whatever the configuration has."""
    group = KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**HEADS))
    settings = Settings.of(config_of(tmp_path), KVCacheConfig(48, [], [group]))
    assert (settings.is_shared, settings.planner.ranks) == (False, 1)
