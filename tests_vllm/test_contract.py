"""Our connector against every release it says it runs with: what we override is there, what we must is overridden."""

import ast
import inspect
import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import connector.vllm
from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.metrics import CacheStats
from tests_vllm.contract import contract, sources

FOLDER = Path(__file__).parent / "contracts"
RELEASES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
BASES = ("KVConnectorBase_V1", "SupportsHMA")
OURS = {name for name in vars(CPUPrefixCacheConnector) if not name.startswith("_")}

# Overrides that some release does not have: nobody calls them there.
NOT_EVERYWHERE = {"get_transfer_results": {"0.26.0"}, "requires_kv_delivery": {"0.26.0"}}

# What both halves touch, beside the connector's own class.
TOUCHED = {
    "ParallelConfig": {
        *("rank", "world_size", "local_world_size", "tensor_parallel_size", "pipeline_parallel_size"),
        *("data_parallel_rank", "decode_context_parallel_size", "prefill_context_parallel_size"),
        *("distributed_executor_backend", "data_parallel_index"),
    },
    "SpeculativeConfig": {"num_speculative_tokens", "use_eagle"},
    "GroupCoordinator": {"world_size", "cpu_group", "broadcast_object"},
    "KVConnectorFactory": {"register_connector", "_registry"},
    "BlockPool": {
        *("touch", "free_blocks", "cached_block_hash_to_block"),
        *("blocks", "free_block_queue", "num_gpu_blocks", "null_block"),
    },
    "BlockHashToBlockMap": {"get_one_block"},
    "KVCacheBlock": {"block_hash", "block_id", "ref_cnt", "prev_free_block", "next_free_block"},
    "FreeKVCacheBlockQueue": {
        *("iter_blocks_after", "num_free_blocks", "fake_free_list_head", "fake_free_list_tail"),
    },
    "HybridKVCacheCoordinator": {"find_longest_cache_hit", "find_longest_cache_hit_per_group"},
    "KVCacheBlocks": {"get_block_ids"},
    "SchedulerOutput": {"num_scheduled_tokens", "preempted_req_ids", "total_num_scheduled_tokens"},
    "KVConnectorOutput": {"invalid_block_ids", "kv_connector_worker_meta", "finished_recving"},
    "Request": {
        *("request_id", "block_hashes", "num_tokens", "num_computed_tokens", "num_output_placeholders"),
        *("num_output_tokens", "status", "skip_reading_prefix_cache", "kv_transfer_params"),
    },
    "RequestStatus": {"WAITING_FOR_REMOTE_KVS"},
    "KVCacheConfig": {"has_mamba_layers", "num_blocks", "kv_cache_groups", "kv_cache_tensors"},
    "KVCacheGroupSpec": {"layer_names", "kv_cache_spec"},
    "KVCacheTensor": {"block_stride"},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    "AttentionSpec": {"real_page_size_bytes"},
    "SlidingWindowSpec": {"sliding_window"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "MambaSpec": {"shapes", "dtypes", "mamba_cache_mode"},
    "BlockStored": {
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "medium", "locality"),
    },
    "BlockRemoved": {"block_hashes", "medium", "locality"},
    "KVConnectorStats": {"data"},
    "KVConnectorPromMetrics": {"observe", "_labelnames", "_counter_cls", "_gauge_cls", "_histogram_cls"},
}

# How a release places layers in memory: one of them.
PLACES = ({"layers", "layer_stride"}, {"shared_by", "size", "offset"})

OUR_SOURCES = {path.name: path.read_text() for path in Path(connector.vllm.__file__).parent.glob("*.py")}


def has(number: str, name: str) -> set[str]:
    found = RELEASES[number][name]
    return {*found["methods"], *found["fields"]}


def methods(release: dict) -> dict[str, list[str]]:
    return {name: names for base in BASES for name, names in release[base]["methods"].items()}


@pytest.mark.parametrize("number", RELEASES)
def test_what_we_override_is_there_with_the_same_parameters(number):
    theirs = methods(RELEASES[number])
    for name in OURS:
        if name in theirs:
            ours = getattr(CPUPrefixCacheConnector, name)
            if isinstance(ours, property):
                continue
            assert parameters_of(ours) == without_self(theirs[name]), name
        elif number not in NOT_EVERYWHERE.get(name, ()):
            assert name in theirs, f"vLLM {number} has no {name}"


@pytest.mark.parametrize("number", RELEASES)
def test_what_must_be_overridden_is(number):
    release = RELEASES[number]
    assert {name for base in BASES for name in release[base]["abstract"]} <= OURS


@pytest.mark.parametrize("number", RELEASES)
def test_what_we_touch_is_there(number):
    for name, touched in TOUCHED.items():
        assert touched <= has(number, name), name
    assert any(place <= has(number, "KVCacheTensor") for place in PLACES)


@pytest.mark.parametrize("number", RELEASES)
def test_what_we_import_is_there(number):
    """But for what is imported only where it is."""
    names = RELEASES[number]["names"]
    for file, text in OUR_SOURCES.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm"):
                for each in node.names:
                    known = f"{node.module}.{each.name}" in names or each.name in names.get(node.module, ())
                    assert known, f"{file} imports {each.name} of {node.module}"


def test_what_is_said_to_be_touched_is():
    everything = "\n".join(OUR_SOURCES.values())
    for name, touched in TOUCHED.items():
        assert not [each for each in touched if not re.search(rf"\.{each}\b|\b{each}=", everything)], name


@pytest.mark.parametrize("number", RELEASES)
def test_statistics_have_what_the_logger_calls(number):
    assert set(RELEASES[number]["KVConnectorStats"]["methods"]) <= set(dir(CacheStats))


def test_the_release_that_runs_here_is_the_one_on_file():
    """Or the files say nothing of what they say they do."""
    here = Path(vllm.__file__).parents[1]
    assert contract(sources(here)) == RELEASES[vllm.__version__.partition("+")[0]]


def test_vllm_knows_the_connector_by_name():
    (entry,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "cpu_prefix_cache"]
    register = entry.load()
    register()
    register()  # vLLM does so at times
    config = KVTransferConfig(kv_connector="CPUPrefixCacheConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is CPUPrefixCacheConnector


def parameters_of(method) -> list[str]:
    shown = []
    for each in inspect.signature(method).parameters.values():
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(stars + each.name)
    return without_self(shown)


def without_self(names: list[str]) -> list[str]:
    return [name for name in names if name not in ("self", "cls")]
