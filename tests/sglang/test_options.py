"""Options and shapes of KV that are refused when SGLang starts, each with a sentence, and pages that are not whole."""

import copy
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from connector.sglang.linker import blocks_of
from connector.sglang.pools import groups_of
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.deciding import PrefixGroup, StateGroup
from tests.sglang.engine import Engine, server_args
from tests.sglang.models import FULL, KINDS, Model
from tests.support.simulated_driver import SimulatedDriver, pins_host_caches
from tests.support.threads import wait_until

PAGES = PrefixGroup(name="pages", block_tokens=4, block_bytes=8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs host_bytes"),
        ({"host_bytes": "a lot"}, "a size is a number of bytes"),
        ({"host_bytes": 1.5}, "host_bytes must be a whole number"),
        ({"host_bytes": 10}, "must hold at least what one key has"),
        ({"host_bytes": "1MiB", "policy": "newest"}, "newest"),
        ({"host_bytes": "1MiB", "host_size": 3}, "unknown option 'host_size'"),
    ],
)
def test_an_option_that_is_none_is_refused(options, sentence):
    with server_args(**options) as args, pytest.raises(ConfigurationError, match=sentence):
        Engine(args, KINDS["full"])


def test_the_region_is_pinned_from_the_start_on(monkeypatch):
    driver = SimulatedDriver()
    pins_host_caches(monkeypatch, driver)
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, KINDS["full"])
        host = engine.linker.host
        wait_until(lambda: host.statistics().ready_bytes == host.statistics().host_bytes)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_policies(policy):
    with server_args(host_bytes=1 << 20, policy=policy) as args:
        engine = Engine(args, KINDS["full"])
        engine.run(range(50))
        engine.evict()
        engine.run(range(51))
        assert engine.computed == 50 + 3 and engine.wrong == []


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"mtp_draft_device_pools": (object(),)}, "a drafter's KV"),
        ({"sidecar_draft_device_pools": (object(),)}, "a drafter's KV"),
    ],
)
def test_pages_of_more_than_we_know_are_refused(shape, what):
    with server_args(host_bytes="1MiB") as args, pytest.raises(ConfigurationError, match=what):
        Engine(args, KINDS["full"], **shape)


class AnotherPool(MHATokenToKVPool):
    """As those of formats of their own are in SGLang."""


@pytest.mark.parametrize("change", ["class", "layout", "scales"])
def test_kv_of_another_layout_is_refused(monkeypatch, change):
    def pool(model):
        kv = made(model)
        if change == "class":
            kv.__class__ = AnotherPool
        elif change == "layout":
            kv.kv_cache_layout = "hnd"
        else:
            kv.k_scale_buffer = [torch.ones(1)]
        return kv

    made = Model._pool
    monkeypatch.setattr(Model, "_pool", pool)
    with server_args(host_bytes="1MiB") as args, pytest.raises(ConfigurationError, match="does not keep KV in a"):
        Engine(args, KINDS["full"])


def test_states_with_others_beside_them_are_refused(monkeypatch):
    def requests(model):
        states = made(model)
        states.ngram_pool = SimpleNamespace(enabled=True)
        return states

    made = Model._requests
    monkeypatch.setattr(Model, "_requests", requests)
    with server_args(host_bytes="1MiB") as args, pytest.raises(ConfigurationError, match="states in int8"):
        Engine(args, KINDS["state"])


def test_states_that_the_tree_leaves_out_are_refused():
    """A model that SGLang restores without its states would go on with those of another prompt."""
    states = Model(KINDS["state"]).requests
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, KINDS["full"])
        params = copy.copy(engine.params)
        params.req_to_token_pool = states
        with pytest.raises(ConfigurationError, match="states that its tree leaves out"):
            groups_of(params)


@pytest.mark.parametrize("indices", [[8, 9, 11, 10], [6, 7, 8, 9], [8, 9, 10, 12]])
def test_indices_that_are_no_whole_pages_are_refused(indices):
    with pytest.raises(MisuseError, match="whole pages of 4 tokens"):
        blocks_of(torch.tensor(indices), PAGES)


def test_blocks_are_the_pages_of_all_tokens():
    assert blocks_of(torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), PAGES) == [2, 0]
    assert blocks_of(torch.tensor([5, 3]), StateGroup(name="states", block_tokens=4, block_bytes=8)) == [5, 3]
    assert blocks_of(torch.tensor([], dtype=torch.int64), PAGES) == []


def test_a_forward_in_one_graph_waits_for_the_last_layer():
    with server_args(host_bytes="1MiB") as args:
        model = KINDS["full"]
        assert Engine(args, model).counter.num_layers == 1 + max(model.of(FULL))
