"""The connector asks vLLM for blocks that lie in one piece, where that is faster. vLLM decides."""

from types import SimpleNamespace
from unittest.mock import PropertyMock, patch

import pytest
import torch
from vllm.config import KVTransferConfig, ModelConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from connector.vllm import memory_order
from connector.vllm.settings import Settings
from connector.vllm.tensors import _as_bytes, group_rows
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.memory.parts import side_by_side
from tests.vllm.engine import vllm_config
from tests.vllm.test_layers import configure, copied

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


STATE_TOKENS = 48
STATES = MambaSpec(  # in pages as large as those of attention
    block_size=STATE_TOKENS,
    shapes=((3, 128), (8, 16, 8)),
    dtypes=(torch.bfloat16, torch.bfloat16),
    page_size_padded=STATE_TOKENS * 64,
    mamba_cache_mode="align",
)
ATTENTION = FullAttentionSpec(block_size=STATE_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
KINDS = {
    "states": {f"layer.{at}": ATTENTION if at % 4 == 3 else STATES for at in range(8)},
    "latents": {f"layer.{at}": LATENT for at in range(3)},
}


@pytest.mark.parametrize("order", [*LAYERS_FIRST, *BLOCKS_FIRST])
@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_states_come_back_in_any_order_that_vllm_allocates(tmp_path, kind, order):
    """A user may set VLLM_KV_CACHE_LAYOUT. Other blocks, and what is between views, stay as they are."""
    config, scheduled, (caches,) = configure(tmp_path, [KINDS[kind]], order)
    views = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[order])
    memory = _as_bytes(next(iter(views.values())))
    before = torch.randint(1, 255, memory.shape, dtype=torch.uint8)
    memory.copy_(before)
    blocks = [
        [view.view(torch.uint8) for name, view in views.items() if name in group.layer_names]
        for group in caches.kv_cache_groups
    ]
    stored = [[view[1 + at].clone() for view in group] for at, group in enumerate(blocks)]
    worker = WorkerHalf(Settings.of(config, caches), config, caches)
    worker.register_kv_caches(views)
    planner = Settings.of(config, scheduled).planner
    assert copied(worker, planner, Direction.STORE, 1, apart=1)
    memory.zero_()
    assert copied(worker, planner, Direction.LOAD, 9, apart=1)
    worker.close()
    loaded = memory.clone()
    assert not torch.equal(loaded, memory.zero_())
    for at, (group, was) in enumerate(zip(blocks, stored, strict=True)):
        for view, bytes_of_block in zip(group, was, strict=True):
            view[9 + at].copy_(bytes_of_block)
    assert torch.equal(loaded, memory)
    assert len(blocks) == {"states": 4, "latents": 1}[kind]
