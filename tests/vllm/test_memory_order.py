"""The connector asks vLLM for blocks that lie in one piece, where that is faster. vLLM decides."""

from types import SimpleNamespace
from unittest.mock import PropertyMock, patch

import pytest
import torch
from vllm.config import KVTransferConfig, ModelConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from connector.vllm import memory_order
from connector.vllm.tensors import group_rows
from cpu_prefix_cache.memory.parts import side_by_side
from tests.vllm.engine import vllm_config

LAYERS_FIRST, BLOCKS_FIRST = ["LBNHC", "LBHNC"], ["BLNHC", "BLHNC"]
LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 3, 6, 16, 2, 8


@pytest.fixture
def gpu(monkeypatch):
    """vLLM believes that it runs on a device of CUDA's, of this major compute capability."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    device = SimpleNamespace(major=9)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda self=None, device_id=0: device)
    return device


def resolved(config, supported=(*LAYERS_FIRST, *BLOCKS_FIRST)) -> str:
    """The order that vLLM takes, of those that its attention can, the preferred one first."""
    return resolve_kv_cache_layout(config, [list(supported)]).name


def test_vllm_keeps_blocks_in_one_piece(tmp_path, gpu):
    assert resolved(vllm_config(tmp_path, cpu_bytes_to_use=1)) == "BLNHC"


def test_a_device_of_blackwells_takes_heads_first(tmp_path, gpu):
    gpu.major = 10
    assert resolved(vllm_config(tmp_path, cpu_bytes_to_use=1), ["LBHNC", "BLHNC"]) == "BLHNC"


def test_attention_that_cannot_has_its_own_order(tmp_path, gpu):
    assert resolved(vllm_config(tmp_path, cpu_bytes_to_use=1), LAYERS_FIRST) == "LBNHC"


def test_the_order_that_a_user_gives_stays(tmp_path, gpu, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert resolved(vllm_config(tmp_path, cpu_bytes_to_use=1)) == "LBHNC"


@pytest.mark.parametrize("kind", ["use_mla", "is_hybrid"])
def test_latents_and_states_stay_as_vllm_keeps_them(tmp_path, gpu, kind):
    config = vllm_config(tmp_path, cpu_bytes_to_use=1)
    with patch.object(ModelConfig, kind, new_callable=PropertyMock, return_value=True):
        assert resolved(config) == "LBNHC"


def test_coded_blocks_go_through_kernels_in_any_order(tmp_path, gpu):
    assert resolved(vllm_config(tmp_path, cpu_bytes_to_use=1, codec="exponent")) == "LBNHC"


def test_a_cache_that_is_off_wants_nothing(tmp_path, gpu):
    config = vllm_config(tmp_path, cpu_bytes_to_use=1)
    config.cache_config.enable_prefix_caching = False
    assert resolved(config) == "LBNHC"


def test_on_a_cpu_nothing_crosses_a_link(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    assert resolved(vllm_config(tmp_path, cpu_bytes_to_use=1)) == "LBNHC"


def test_another_connector_beside_this_one_has_what_it_requires(tmp_path, gpu):
    """With two answers vLLM would not start."""
    config = vllm_config(tmp_path)
    ours = dict(kv_connector="CPUPrefixCacheConnector", kv_connector_module_path="connector.vllm", kv_role="kv_both")
    theirs = dict(kv_connector="ExampleHiddenStatesConnector", kv_role="kv_producer")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [ours, theirs]}
    )
    assert resolved(config, ["LBHNC", "LBNHC", "BLNHC"]) == "LBNHC"
    assert memory_order.wanted_order(vllm_config(tmp_path, cpu_bytes_to_use=1)) == "BLNHC"


def registered(order: str) -> dict[str, torch.Tensor]:
    """KV of each layer as vLLM registers it, [blocks, heads, tokens, K and V], in memory that all layers share."""
    sizes = dict(L=LAYERS, B=BLOCKS, N=TOKENS, H=HEADS, C=2 * SIZE)
    memory = torch.randn(*(sizes[axis] for axis in order))
    views = memory.permute(*(order.index(axis) for axis in "LBHNC"))
    return {f"layer.{at}": view for at, view in enumerate(views)}


@pytest.mark.parametrize("order", BLOCKS_FIRST)
def test_a_block_is_one_piece_of_all_layers(order):
    caches = registered(order)
    (piece,) = side_by_side(group_rows(caches, caches, BLOCKS))
    assert piece.shape == (BLOCKS, LAYERS * TOKENS * HEADS * 2 * SIZE * 4)
    assert len(side_by_side(group_rows(registered("LBNHC"), caches, BLOCKS))) == LAYERS  # the control
