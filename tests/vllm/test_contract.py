"""Our connector against every release it names: overridden methods exist, and abstract ones are overridden."""

import ast
import inspect
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.outputs import KVConnectorOutput

import connector.vllm
import cpu_prefix_cache_vllm
from connector.vllm import CPUPrefixCacheConnector, versions
from connector.vllm.metrics import CacheStats
from cpu_prefix_cache import ConfigurationError
from tests.vllm.contract import Contract, abstract, contract, methods, names, sources
from tests.vllm.releases import recorded

RELEASES = recorded()
BASES = ("KVConnectorBase_V1", "SupportsHMA")
OURS = {name for name in vars(CPUPrefixCacheConnector) if not name.startswith("_")}

# Touched by both halves, beside the connector's own class.
TOUCHED = {
    "VllmConfig": {
        "attention_config",
        "cache_config",
        "compilation_config",
        "device_config",
        "instance_id",
        "kv_events_config",
        "kv_transfer_config",
        "load_config",
        "lora_config",
        "max_concurrent_batches",
        "model_config",
        "parallel_config",
        "scheduler_config",
        "speculative_config",
    },
    "CacheConfig": {"cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"},
    "SchedulerConfig": {"async_scheduling", "disable_hybrid_kv_cache_manager", "max_num_batched_tokens"},
    "ParallelConfig": {
        "rank",
        "world_size",
        "local_world_size",
        "nnodes",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "cp_kv_cache_interleave_size",
        "distributed_executor_backend",
        "data_parallel_index",
    },
    "SpeculativeConfig": {
        "draft_load_config",
        "draft_model_config",
        "kv_cache_dtype",
        "method",
        "num_speculative_tokens",
        "use_eagle_block_drop",
    },
    "LoadConfig": {"load_format"},
    "ModelConfig": {
        "code_revision",
        "dtype",
        "hf_config",
        "hf_config_path",
        "hf_text_config",
        "max_model_len",
        "model",
        "model_class_overrides",
        "model_impl",
        "multimodal_config",
        "original_max_model_len",
        "quantization",
        "quantization_config",
        "revision",
        "using_transformers_backend",
    },
    "MultiModalConfig": {
        "media_io_kwargs",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    },
    "GroupCoordinator": {"world_size", "cpu_group", "broadcast_object"},
    "KVConnectorFactory": {"register_connector"},
    "BlockPool": {
        "touch",
        "free_blocks",
        "cached_block_hash_to_block",
        "reset_prefix_cache",
        "blocks",
        "free_block_queue",
        "num_gpu_blocks",
        "null_block",
    },
    "BlockHashToBlockMap": {"get_one_block"},
    "KVCacheBlock": {"block_hash", "block_id", "ref_cnt", "prev_free_block", "next_free_block"},
    "FreeKVCacheBlockQueue": {
        "iter_blocks_after",
        "num_free_blocks",
        "fake_free_list_head",
        "fake_free_list_tail",
    },
    "KVCacheBlocks": {"get_block_ids"},
    "SchedulerOutput": {"num_scheduled_tokens", "preempted_req_ids", "total_num_scheduled_tokens"},
    "KVConnectorOutput": {"invalid_block_ids", "kv_connector_worker_meta", "finished_recving", "failed_recving"},
    "Request": {
        "request_id",
        "block_hashes",
        "num_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "status",
        "skip_reading_prefix_cache",
        "kv_transfer_params",
        "resumable",
        "lora_request",
        "all_token_ids",
        "mm_features",
        "prompt_embeds",
        "cache_salt",
    },
    "RequestStatus": {"WAITING_FOR_REMOTE_KVS"},
    "KVCacheConfig": {"num_blocks", "kv_cache_groups", "kv_cache_tensors", "prefix_cache_retention_interval"},
    "KVCacheGroupSpec": {"layer_names", "kv_cache_spec"},
    "KVCacheTensor": {"layers", "layer_stride", "block_stride"},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    "AttentionSpec": {"real_page_size_bytes"},
    "SlidingWindowSpec": {"sliding_window", "extra_retained_tokens"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "MambaSpec": {"shapes", "dtypes", "mamba_cache_mode"},
    "BlockStored": {
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "lora_name",
        "extra_keys",
        "medium",
        "locality",
    },
    "BlockRemoved": {"block_hashes", "medium", "locality"},
    "KVConnectorStats": {"data"},
    "KVConnectorPromMetrics": {"observe", "_labelnames", "_counter_cls", "_gauge_cls", "_histogram_cls"},
}

FOLDERS = [Path(package.__file__).parent for package in (connector.vllm, cpu_prefix_cache_vllm)]
OUR_SOURCES = {str(path): path.read_text() for folder in FOLDERS for path in folder.rglob("*.py")}


def has(number: str, owner: str) -> set[str]:
    return names(RELEASES[number], owner)


def methods_of_bases(release: Contract) -> dict[str, list[str]]:
    return {name: parameters for base in BASES for name, parameters in methods(release, base).items()}


@pytest.mark.parametrize("number", RELEASES)
def test_overridden_methods_exist_with_the_same_parameters(number):
    theirs = methods_of_bases(RELEASES[number])
    for name in OURS:
        assert name in theirs, f"vLLM {number} has no {name}"
        ours = getattr(CPUPrefixCacheConnector, name)
        if not isinstance(ours, property):
            assert parameters_of(ours) == without_self(theirs[name]), name


@pytest.mark.parametrize("number", RELEASES)
def test_abstract_methods_are_overridden(number):
    assert {name for base in BASES for name in abstract(RELEASES[number], base)} <= OURS


@pytest.mark.parametrize("number", RELEASES)
def test_touched_names_exist(number):
    for name, touched in TOUCHED.items():
        assert touched <= has(number, name), name


@pytest.mark.parametrize("number", RELEASES)
def test_imported_names_exist(number):
    """Imports at the top of a file: names that not every release has are imported where they are used."""
    modules = {owner for owner, _ in RELEASES[number]}
    for file, text in OUR_SOURCES.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm"):
                for each in node.names:
                    known = f"{node.module}.{each.name}" in modules or each.name in has(number, node.module)
                    assert known, f"{file} imports {each.name} of {node.module}"


def test_names_listed_as_touched_are():
    everything = "\n".join(OUR_SOURCES.values())
    for name, touched in TOUCHED.items():
        assert not [each for each in touched if not re.search(rf"\.{each}\b|\b{each}=|\"{each}\"", everything)], name


@pytest.mark.parametrize("number", RELEASES)
def test_statistics_have_what_the_logger_calls(number):
    assert set(methods(RELEASES[number], "KVConnectorStats")) <= set(dir(CacheStats))


def test_the_release_that_runs_here_is_the_one_on_file():
    """Files that differ from those they were recorded from would prove nothing."""
    here = Path(vllm.__file__).parents[1]
    assert contract(sources(here)) == RELEASES[vllm.__version__.partition("+")[0]]


def test_each_tested_release_is_on_file():
    assert {versions.release_of(number) for number in RELEASES} == set(versions.TESTED)


@pytest.mark.parametrize("number", RELEASES)
def test_a_release_has_its_listed_additions_and_none_of_later_ones(number):
    for added in versions.ADDED:
        owner = added.owner.__name__
        found = added.name in has(number, owner)
        assert found == (versions.release_of(number) >= added.since), f"{owner}.{added.name}"


@pytest.mark.parametrize("number", [*RELEASES, "0.32.0+cpu", "0.34.0", "1.0.0", "dev", "0.1.dev7+g1234567"])
def test_releases_that_run(number):
    versions.check_release(number)


@pytest.mark.parametrize("number", ["0.9.2", "0.26.0", "0.29.0"])
def test_releases_that_are_refused(number):
    with pytest.raises(ConfigurationError, match=rf"vLLM {number}: .* use 0\.30 to 0\.33"):
        versions.check_release(number)


@pytest.mark.parametrize("number", ["0.30.0", "0.34.0", "dev"])
def test_a_name_that_vllm_has_changed_is_not_taken_for_one_it_never_had(monkeypatch, number):
    changed = versions.Addition((0, 30), KVConnectorOutput, "failed_receiving")
    monkeypatch.setattr(versions, "ADDED", (*versions.ADDED, changed))
    with pytest.raises(ConfigurationError, match=f"vLLM {number}: KVConnectorOutput has no failed_receiving"):
        versions.check_release(number)


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
