"""Faults of vLLM 0.32 and 0.33, without any load of ours: a hit that ends within a block may copy other bytes than its
own.

There are such hits with states, where hashes are shorter than a block of attention: with a `prefix_match_unit`, and by
default with decode context parallelism, but not else. A prompt of 31 tokens ends its hits at token 28, within block 3
of attention; the state there has a block of its own. Of block 3 a copy is made, before it is computed:

    the first run        stops at 28 to keep the state
    it is preempted      and others take its blocks of attention, and not that state
    it resumes           with its answer it is longer, so the step does not stop at 28, and notes no state there
    the same prompt      in the same step: state 28 is old, so nothing shows that block 3 is being computed; it is
                         copied for the request before that

And not all bytes are copied. Layers of several groups lie on the same memory, and vLLM copies each place once, as the
first layer there has it: in Qwen3-Next one with states, and of a block of attention the last 8 tokens are left out, or
16 of one head, as the layout is (vllm-project/vllm#55112):

    a block of attention    [ keys and values of 536 tokens             | of 8  ]
    a block of states       [ a convolution, a recurrent state          |       ]
    copied                   -------------------------------------------
"""

from dataclasses import replace

import pytest
import torch
from vllm.config import CacheConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from tests.vllm.engine import Engine, full, latent, state
from tests.vllm.test_layers import configure

PROMPT = list(range(31))
LONGER = 45  # tokens, with the answer so far
FINER = {
    "a match unit": dict(groups=[full(block=8), state(block=8)], match_unit=4),
    "context parallelism": dict(groups=[latent(), state()], ranks=2, tensor_parallel=True, context_parallel=2),
}
every_way = pytest.mark.parametrize("way", FINER)


def resumed(tmp_path, monkeypatch, way, evicts=True):
    """An engine whose next step computes the prompt again, and what follows it. It loads nothing."""
    engine = Engine(tmp_path, **FINER[way], retention=None, device_blocks=80, offload="eager")
    monkeypatch.setattr(engine.half, "_may_load", lambda request: False)
    request = engine.requests[engine.submit(PROMPT, max_tokens=30)]
    while request.num_tokens < LONGER:
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    if evicts:
        engine.pool.evict_blocks({block for block, group in engine_blocks(engine) if group == 0})
    return engine


@every_way
def test_a_warning_names_them_at_start(tmp_path, log, way):
    Engine(tmp_path, **FINER[way])
    assert log.text.count("where a hit ends within a block") == 1


def test_no_warning_without_them(tmp_path, log):
    Engine(tmp_path, groups=[full(block=8), state(block=8)])
    Engine(tmp_path, groups=[latent()], ranks=2, tensor_parallel=True, context_parallel=2)
    assert "within a block" not in log.text


def engine_blocks(engine):
    """The cached blocks, and the group of each."""
    named = [block for block in engine.pool.blocks if block.block_hash is not None]
    return [(block.block_id, int.from_bytes(block.block_hash[-4:], "big")) for block in named]


# Copies of blocks that are not computed


@every_way
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="vLLM copies block 3 before it is computed")
def test_the_prompt_of_a_request_that_resumes_in_the_same_step_is_read_right(tmp_path, monkeypatch, way):
    engine = resumed(tmp_path, monkeypatch, way)
    engine.submit(PROMPT)
    engine.drain()


@every_way
def test_control_a_step_later_it_is(tmp_path, monkeypatch, way):
    engine = resumed(tmp_path, monkeypatch, way)
    engine.step()
    engine.submit(PROMPT)
    engine.drain()
    assert engine.counts["blocks copied"] > 0


@every_way
def test_control_with_blocks_that_are_computed_it_is(tmp_path, monkeypatch, way):
    engine = resumed(tmp_path, monkeypatch, way, evicts=False)
    engine.submit(PROMPT)
    engine.drain()
    assert engine.counts["blocks copied"] > 0


# Copies of a part


def attention(tokens=544):
    return FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)


def states():
    """A linear layer of Qwen3-Next 80B-A3B."""
    page, dtypes = attention().page_size_bytes, (torch.bfloat16, torch.bfloat16)
    shapes = (3, 8192), (32, 128, 128)
    return MambaSpec(block_size=544, shapes=shapes, dtypes=dtypes, page_size_padded=page, mamba_cache_mode="align")


def qwen3_next(folder, layout):
    """The first eight layers: each fourth has attention. vLLM's configurations: the engine's, and that of its rank."""
    layers = {f"layers.{at}": states() if at % 4 < 3 else attention() for at in range(8)}
    config, _, (caches,) = configure(folder, [layers], layout)
    return config, caches


def copied_tokens(folder, layout, first="layers.0"):
    """The tokens of a block of attention that vLLM copies for all heads, where this layer comes first."""
    config, caches = qwen3_next(folder, layout)
    sizes = [group.kv_cache_spec.block_size for group in caches.kv_cache_groups]
    layers = allocate_kv_cache(caches, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), sizes)
    for layer in layers.values():
        layer.untyped_storage().fill_(0)
    kept = layers["layers.3"]  # blocks, heads, tokens, keys and values
    kept[1].fill_(1)
    ordered = sorted(layers, key=lambda name: (name != first, name))
    copy_kv_cache_blocks_inplace([layers[name] for name in ordered], caches.num_blocks, [(1, 2)])
    return int((kept[2] == 1).all(dim=(0, 2)).sum())


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="vLLM copies as many bytes as a state has")
def test_all_tokens_of_a_block_of_attention_are_copied(tmp_path, layout):
    assert copied_tokens(tmp_path, layout) == 544


@pytest.mark.parametrize(("layout", "first"), [("LBNHC", "layers.3"), ("LBHNC", "layers.3"), ("BLNHC", "layers.0")])
def test_control_they_are_where_attention_comes_first_or_blocks_are_in_one_piece(tmp_path, layout, first):
    assert copied_tokens(tmp_path, layout, first) == 544


# Ends of hits


def finest(folder, **options):
    """The tokens between ends of hits, and those of a block of attention as the scheduler sees it."""
    config, caches = qwen3_next(folder, "LBNHC")
    config.cache_config = replace(config.cache_config, **options)
    grid, hashes = resolve_kv_cache_block_sizes(caches, config)
    return hashes, grid


def test_by_default_hits_end_with_blocks(tmp_path):
    assert CacheConfig().prefix_match_unit is None
    assert finest(tmp_path) == (544, 544)


def test_with_a_match_unit_or_context_parallelism_they_do_not(tmp_path):
    assert finest(tmp_path, prefix_match_unit=32) == (32, 544)
    config, caches = qwen3_next(tmp_path, "LBNHC")
    config.parallel_config.decode_context_parallel_size = 2
    grid, hashes = resolve_kv_cache_block_sizes(caches, config)
    assert (hashes, grid) == (544, 1088)
