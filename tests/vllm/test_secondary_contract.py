"""Our tier against what a secondary tier is in every release of vLLM on file."""

import inspect

import pytest

import connector.vllm_tiers
from connector.vllm_tiers import CPUPrefixCacheOffloadingConnector, PrefixCacheTier
from tests.vllm.contract import abstract, imported_from_vllm, methods, names
from tests.vllm.releases import recorded

RELEASES = recorded()
THEIRS = "SecondaryTierManager"
READ = {  # of vLLM's objects, what ours reads
    "OffloadingSpec": {"config"},
    "OffloadingConfig": {
        "canonical_layout",
        "groups",
        "kv_cache_layout",
        "replicated_layout",
        "worker_kv_bytes_per_block",
    },
    "OffloadingGroupConfig": {"group_id", "layer_names", "tokens_per_block"},
    "OffloadingParallelConfig": {"world_size"},
    "TransferJob": {"chunk_ids", "is_promotion", "job_id", "keys"},
    "JobResult": {"job_id", "success", "successful_keys"},
}
each_release = pytest.mark.parametrize("number", RELEASES)


@each_release
def test_it_has_every_method_that_it_must(number):
    assert abstract(RELEASES[number], THEIRS) <= set(vars(PrefixCacheTier))


@each_release
def test_every_method_of_ours_takes_the_arguments_that_the_release_gives(number):
    given = methods(RELEASES[number], THEIRS)
    ours = {name: each for name, each in vars(PrefixCacheTier).items() if name in given and name != "__init__"}
    assert ours
    for name, method in ours.items():
        assert [*inspect.signature(method).parameters] == given[name], name


@each_release
def test_the_connector_takes_what_a_connector_is_given(number):
    given = methods(RELEASES[number], "OffloadingConnector")["__init__"]
    assert [*inspect.signature(CPUPrefixCacheOffloadingConnector.__init__).parameters] == given


@each_release
def test_it_passes_on_no_more_than_the_release_takes(number):
    parameters = methods(RELEASES[number], THEIRS)["__init__"]
    assert {"offloading_spec", "primary_kv_view", "tier_type"} <= {*parameters}
    assert ("backpressure_detector" in parameters) == (number >= "0.31.0")


@each_release
def test_every_field_that_is_read_exists(number):
    for owner, fields in READ.items():
        assert fields <= names(RELEASES[number], owner), owner


@each_release
def test_every_imported_name_exists(number):
    theirs = imported_from_vllm(connector.vllm_tiers)
    assert theirs
    for node in theirs:
        assert {each.name for each in node.names} <= names(RELEASES[number], node.module)


@each_release
def test_a_tier_may_be_given_by_its_module(number):
    assert "get_tier_class" in names(RELEASES[number], "SecondaryTierFactory")
