"""Our connector against every release it says it runs with: what we override is there, what we must is overridden."""

import inspect
import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.metrics import CacheStats
from tests_vllm.contract import contract, sources

FOLDER = Path(__file__).parent / "contracts"
RELEASES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
BASES = ("KVConnectorBase_V1", "SupportsHMA")
OURS = {name for name in vars(CPUPrefixCacheConnector) if not name.startswith("_")}

# Overrides that some release does not have: nobody calls them there.
NOT_EVERYWHERE = {"get_transfer_results": {"0.26.0"}, "requires_kv_delivery": {"0.26.0"}}

# What the scheduler half and the device touch, beside the connector's own class.
TOUCHED = {
    "BlockPool": {
        "methods": {"get_cached_block", "touch", "free_blocks"},
        "fields": {"blocks", "free_block_queue", "num_gpu_blocks", "null_block"},
    },
    "KVCacheBlock": {
        "methods": {"block_hash"},
        "fields": {"block_id", "ref_cnt", "prev_free_block", "next_free_block", "is_null"},
    },
    "FreeKVCacheBlockQueue": {
        "methods": {"iter_blocks_after"},
        "fields": {"num_free_blocks", "fake_free_list_head", "fake_free_list_tail"},
    },
    "HybridKVCacheCoordinator": {"methods": {"find_longest_cache_hit", "find_longest_cache_hit_per_group"}},
    "SchedulerOutput": {"fields": {"num_scheduled_tokens", "preempted_req_ids", "total_num_scheduled_tokens"}},
    "KVConnectorOutput": {"fields": {"invalid_block_ids", "kv_connector_worker_meta", "finished_recving"}},
    "Request": {
        "methods": {"num_tokens"},
        "fields": {
            *("request_id", "block_hashes", "num_computed_tokens", "num_output_placeholders", "num_prompt_tokens"),
            *("skip_reading_prefix_cache", "kv_transfer_params"),
        },
    },
    "KVCacheConfig": {"methods": {"has_mamba_layers"}, "fields": {"num_blocks", "kv_cache_groups"}},
    "KVCacheGroupSpec": {"fields": {"layer_names", "kv_cache_spec"}},
    "SlidingWindowSpec": {"fields": {"sliding_window"}},
    "MambaSpec": {"fields": {"shapes", "dtypes", "mamba_cache_mode"}},
}


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
        release = RELEASES[number][name]
        assert touched.get("methods", set()) <= set(release["methods"]), name
        assert touched.get("fields", set()) <= set(release["fields"]) | set(release["methods"]), name


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
