"""Ranks know more of the layers than vLLM's scheduler does, and less: both must come to the same host blocks."""

import time

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.vllm import ranks, regions
from connector.vllm.groups import layer_pages
from connector.vllm.messages import StepMetadata
from connector.vllm.settings import Settings
from connector.vllm.tensors import group_rows
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.memory import mapping
from tests.vllm.engine import vllm_config
from tests.vllm.planning import kv_cache_configs

MEMORY = 32 << 20  # of the device, and as much of the host


def full(size):
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=size, dtype=torch.float32)


def window(size):
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=size, dtype=torch.float32, sliding_window=40)


def latent(size, dtype=torch.bfloat16):
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=size, dtype=dtype)


def states():
    """A convolution's and a recurrent one, in pages as large as those of `full(64)`."""
    shapes, dtypes = ((4, 32), (8, 16, 16)), (torch.bfloat16, torch.float32)
    page = full(64).page_size_bytes
    return MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, page_size_padded=page, mamba_cache_mode="align")


def repeated(**layers):
    return {f"{name}.{at}": spec for at in range(3) for name, spec in layers.items()}


MODELS = {
    "large first": repeated(a=full(128), b=full(64)),
    "small first": repeated(a=full(64), b=full(128)),
    "attention before its indexer": repeated(attn=latent(576), indexer=latent(132, torch.uint8)),
    "indexer before its attention": repeated(indexer=latent(132, torch.uint8), attn=latent(576)),
    "of two sizes, and windows": repeated(a=full(256), b=full(64), c=window(64), d=window(64)),
    "of one size": repeated(a=full(64)),
}


def configure(folder, stages, layout="LBNHC"):
    """vLLM's configurations for the layers of each stage: the engine's, the scheduler's, and those of the stages."""
    config = vllm_config(folder, cpu_bytes_to_use=MEMORY)
    config.cache_config.block_size = 16
    config.cache_config.kv_cache_layout = layout
    config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = len(stages)
    caches = kv_cache_configs(config, stages, MEMORY)
    config.cache_config.num_gpu_blocks = caches[0].num_blocks
    return config, generate_scheduler_kv_cache_config(caches), caches


def tensors_of(caches):
    """Noise for every layer, in blocks as vLLM has made them."""
    specs = ((name, spec) for group in caches.kv_cache_groups for name, spec in specs_of(group))
    return {name: noise(spec, caches.num_blocks) for name, spec in specs}


def noise(spec, num_blocks):
    if isinstance(spec, MambaSpec):
        return [randoms(num_blocks, shape, dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    if isinstance(spec, MLAAttentionSpec):
        return randoms(num_blocks, (spec.block_size, spec.head_size), spec.dtype)
    return randoms(num_blocks, (2, spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype)


def randoms(num_blocks, shape, dtype):
    return torch.randint(0, 100, (num_blocks, *shape)).to(dtype)


def specs_of(group):
    spec = group.kv_cache_spec
    per_layer = (
        spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
    )
    return [(name, per_layer[name]) for name in group.layer_names]


def copied(worker, planner, direction, block, apart=0):
    """Copy a piece of each group between host blocks, from 0 on, and the device's, from this on, those of each group so
    far from those before. Whether that went well."""
    copies, first = [], 0
    for group, piece in enumerate(planner.pieces):
        there = tuple(range(block + group * apart, block + group * apart + piece.device_blocks))
        copies.append(GroupCopy(group, tuple(range(first, first + piece.host_blocks)), there))
        first += piece.host_blocks
    number = 0 if direction is Direction.STORE else 1
    plan = StepPlan(0, (TransferPlan(number, direction, tuple(copies), first),))
    worker.begin(StepMetadata(plan, {}, True))
    stop = time.monotonic() + 20
    while time.monotonic() < stop:
        worker.results()
        if number in worker._report.done | worker._report.failed:
            return number in worker._report.done
        time.sleep(0.01)
    raise TimeoutError


def check_round_trip(config, scheduled, caches):
    """Stored from some blocks and loaded into others, by the scheduler's numbers. How many host blocks there are."""
    planner = Settings.of(config, scheduled).planner
    tensors = tensors_of(caches)
    worker = WorkerHalf(Settings.of(config, caches), config, caches)
    worker.register_kv_caches(tensors)
    rows = [group_rows(tensors, group.layer_names, caches.num_blocks) for group in caches.kv_cache_groups]
    for one in (row for group in rows for row in group):
        one[20:40] = 0xAA
    assert copied(worker, planner, Direction.STORE, 1)
    assert copied(worker, planner, Direction.LOAD, 20)
    for piece, group in zip(planner.pieces, rows, strict=True):
        width = piece.device_blocks
        assert all(torch.equal(one[1 : 1 + width], one[20 : 20 + width]) for one in group)
    blocks = worker._worker._arena.blocks.shape[0]
    worker.close()
    return blocks


def check_stages(monkeypatch, config, scheduled, stages):
    """The same for each stage of a pipeline, in this process."""
    counts = [piece.host_blocks for piece in Settings.of(config, scheduled).planner.pieces]
    monkeypatch.setattr(ranks, "as_on_the_first_stage", lambda numbers: counts)
    monkeypatch.setattr(ranks, "agree", lambda problem: None)
    for caches in stages:
        check_round_trip(config, scheduled, caches)


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_different_sizes_in_one_group(tmp_path, model, layout):
    config, scheduled, (caches,) = configure(tmp_path, [MODELS[model]], layout)
    there, here = Settings.of(config, scheduled), Settings.of(config, caches)
    assert [piece.host_blocks for piece in there.planner.pieces] == [piece.host_blocks for piece in here.planner.pieces]
    blocks = check_round_trip(config, scheduled, caches)
    assert blocks == there.host_bytes // there.planner.host_block_bytes  # none that nobody hands out


@pytest.mark.skipif(
    "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__, reason="vLLM replays windows from 0.31 on"
)
@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_windows_that_vllm_computes_again_are_not_copied(tmp_path, layout):
    seen = SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=32, bounded_replay=True
    )
    model = repeated(attn=latent(576), seen=seen)
    config, scheduled, (caches,) = configure(tmp_path, [model], layout)
    planner = Settings.of(config, scheduled).planner
    tensors = tensors_of(caches)
    windows = {name: rows.clone() for name, rows in tensors.items() if name.startswith("seen")}
    worker = WorkerHalf(Settings.of(config, caches), config, caches)
    worker.register_kv_caches(tensors)
    latents = [rows for name, rows in tensors.items() if name not in windows]
    for one in latents:
        one[20] = 99
    assert copied(worker, planner, Direction.STORE, 1)
    assert copied(worker, planner, Direction.LOAD, 20)
    assert all(torch.equal(one[1], one[20]) for one in latents)
    assert len(windows) == 3 and all(torch.equal(tensors[name], rows) for name, rows in windows.items())
    worker.close()


def test_layers_of_different_kinds_in_one_group_are_refused_at_once(tmp_path):
    """Only a rank sees them: the scheduler is given the first."""
    config, _, (caches,) = configure(tmp_path, [MODELS["large first"]])
    caches.kv_cache_groups[0].kv_cache_spec.kv_cache_specs["b.1"] = window(64)
    with pytest.raises(ConfigurationError, match="of different kinds"):
        Settings.of(config, caches)


def test_a_stage_may_have_no_layer_of_some_groups(tmp_path, monkeypatch):
    """vLLM cuts groups of the whole model to what each stage has, and leaves groups with nothing in them."""
    first = {"f": full(64), "v": window(64), "w": window(64)}
    second = {"x": window(64), "y": window(64), "z": window(64)}
    config, scheduled, stages = configure(tmp_path, [first, second])
    assert not all(group.layer_names for stage in stages for group in stage.kv_cache_groups)
    check_stages(monkeypatch, config, scheduled, stages)


def test_stages_may_have_different_numbers_of_states(tmp_path, monkeypatch):
    first = {"f": full(64), "m": states(), "n": states()}
    second = {"g": full(64), "h": full(64), "o": states()}
    config, scheduled, stages = configure(tmp_path, [first, second])
    assert Settings.of(config, scheduled).planner.has_checkpoints
    assert [[len(group.layer_names) for group in each.kv_cache_groups] for each in stages] == [[1, 2], [2, 1]]
    check_stages(monkeypatch, config, scheduled, stages)


@pytest.mark.parametrize("latents", [1, 3])
def test_stages_may_have_different_numbers_of_latents_beside_states(tmp_path, monkeypatch, latents):
    """Lanes are as large as the layers of each stage require."""
    monkeypatch.setattr(regions, "_shared_region", mapping.private)
    monkeypatch.setattr(ranks, "share_memory", lambda: True)
    first = {"l": latent(512), "m": states(), "n": states()}
    second = {f"k.{at}": latent(512) for at in range(latents)} | {f"o.{at}": states() for at in range(4 - latents)}
    config, scheduled, stages = configure(tmp_path, [first, second])
    config.parallel_config.tensor_parallel_size, config.parallel_config.world_size = 2, 4
    assert Settings.of(config, scheduled).planner.ranks == 2
    check_stages(monkeypatch, config, scheduled, stages)


@pytest.mark.parametrize(("layer_stride", "block_stride"), [(800, 100), (100, 700)], ids=["layers", "blocks"])
def test_how_much_room_layers_have_in_a_block(layer_stride, block_stride):
    """Either the blocks of a layer lie together, or the layers of a block."""
    tensor = KVCacheTensor(5600, ["a", "b"], layer_stride, block_stride)
    assert layer_pages(KVCacheConfig(8, [tensor], [])) == {"a": 100, "b": 100}
