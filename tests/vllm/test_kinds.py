"""README's table of kinds, for vLLM: each type of KV cache that it has, and what the connector makes of it."""

from dataclasses import replace

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from connector.vllm import groups
from connector.vllm.groups import planned_group_ids
from connector.vllm.settings import Settings
from tests.support.kinds import ANEW, KEPT, REFUSED, column, outcome
from tests.vllm.engine import BLOCK, full, latent, local, replayed, state, vllm_config, window

HEADS = dict(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
PAGE = dict(block_size=BLOCK, page_size=64)
MORE = {  # fields that a type needs beside those of attention
    "RSWASpec": dict(rswa_window=8),
    "SinkFullAttentionSpec": dict(sink_len=4),
    "HiSparseHotSpec": dict(PAGE, blocks_per_request=2),
    "HiSparseResidentSpec": PAGE,
}
OTHERS = (*MORE, "HiddenStateCacheSpec", "EncoderOnlyAttentionSpec", "CrossAttentionSpec")
BASES = (KVCacheSpec, AttentionSpec, UniformTypeKVCacheSpecs)


def of(name: str, **fields: object) -> KVCacheGroupSpec:
    usual = {} if "page_size" in MORE.get(name, ()) else HEADS
    spec = getattr(kv_cache_interface, name)(**usual | MORE.get(name, {}) | fields)
    return KVCacheGroupSpec(["layer"], spec)


KINDS = {
    "full attention": [[full()]],
    "MLA": [[latent()]],
    "MLA with an indexer, or of compressed tokens": [
        [latent(), of("MLAAttentionSpec", cache_role=kv_cache_interface.SparseCacheRole.INDEXER)],
        [of("MLAAttentionSpec", tokens_per_state=2)],
    ],
    "sliding windows": [[full(), window(9)], [latent(), of("SlidingWindowMLASpec", sliding_window=9)]],
    "chunked-local attention": [[full(), local(12)]],
    "states: Mamba, linear attention, convolutions": [[full(), state()]],
    "a window and states in one layer": [[window(9), state()]],
    "windows that are replayed (DeepSeek V4.1), open groups of compressors": [
        [full(), of("CircularBufferSpec")],
        *([[full(), replayed(9)]] if "bounded_replay" in SlidingWindowMLASpec.__dataclass_fields__ else []),
    ],
    "others: of encoders, with sinks of their own, HiSparse": [[full(), of(name)] for name in OTHERS],
}


@pytest.fixture
def found(tmp_path):
    """The words for a model with these groups."""
    config = vllm_config(tmp_path, cpu_bytes_to_use=2**30)

    def found(*model: KVCacheGroupSpec) -> str:
        named = [
            replace(group, layer_names=[f"{at}.{name}" for name in group.layer_names]) for at, group in enumerate(model)
        ]
        caches = KVCacheConfig(80, [], named)
        return outcome(lambda: bool(Settings.of(config, caches)) and len(planned_group_ids(caches)) == len(model))

    return found


def test_the_table_has_what_the_connector_keeps(found):
    assert {row: {cell} for row, cell in column("vLLM").items()} == {
        row: {found(*model) for model in models} for row, models in KINDS.items()
    }
    assert {*column("vLLM").values()} == {KEPT, ANEW, REFUSED}


def test_the_table_has_all_types_that_vllm_has():
    types = {each for each in vars(kv_cache_interface).values() if isinstance(each, type)}
    specs = {each for each in types if issubclass(each, KVCacheSpec)} - {*BASES}
    given = {type(group.kv_cache_spec) for models in KINDS.values() for model in models for group in model}
    assert specs <= given


def test_states_are_refused_in_another_mode_than_align(found):
    assert [found(full(), state(mode=mode)) for mode in ("align", "all", "none")] == [KEPT, REFUSED, REFUSED]


def test_a_kind_that_is_kept_no_more_would_be_noticed(found, monkeypatch):
    monkeypatch.delitem(groups._KNOWN, "SlidingWindowSpec")
    assert column("vLLM")["sliding windows"] == KEPT != found(full(), window(9))
