"""A tier of ours below the host memory of vLLM's tiering manager, which is vLLM's own, with its shared region."""

import logging
import threading
import time
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics, TransferJob

from connector.vllm_tiers import tier
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.stores import frame, opening
from cpu_prefix_cache.tiers.keyed_questions import ABSENT_SECONDS
from tests.vllm.engine import drafting
from tests.vllm.memory_by_url import STORES
from tests.vllm.secondary import CHUNKS, OURS, ROW, TIER_BYTES, Server, config, key, ours, shared


@pytest.fixture
def server(tmp_path):
    with closing(Server(ours(tmp_path))) as server:
        yield server


def test_a_chunk_comes_back_when_the_host_has_lost_it(server):
    assert server.ask("ab") == ".."
    server.compute("abc")
    assert server.ask("abcd") == "abc."
    server.rows[:] = 0
    assert server.ask("b") == "b"


def test_a_policy_of_ours_goes_with_a_tier_of_ours(tmp_path):
    with closing(Server(ours(tmp_path), policy="AdaptivePolicy")) as server:
        for prompt in ("abcdef", "ghijkl", "abcdef"):
            server.compute(prompt)
        assert server.ask("abcdefghijkl"[:CHUNKS]) == "abcdefgh"
        server.manager.primary_tier._policy.check_valid()


def test_a_restart_keeps_what_was_stored(tmp_path):
    for served in ("..", "ab"):
        with closing(Server(ours(tmp_path))) as server:
            assert server.tier._tier.is_whole, "the first requests find nothing"
            assert server.ask("ab") == served
            server.compute("ab")


def test_a_second_server_on_the_path_goes_on_without_it(tmp_path, server, caplog):
    server.compute("ab")
    with closing(Server(ours(tmp_path))) as other:
        assert "another process uses" in caplog.text
        other.compute("ab")
        assert other.ask("ab") == ".."
    assert server.ask("ab") == "ab"


def test_a_path_that_cannot_be_used_costs_no_request(tmp_path, caplog):
    (tmp_path / "file").touch()
    with closing(Server(ours(tmp_path / "file"))) as server:
        assert "cannot be opened" in caplog.text
        server.compute("ab")
        assert server.ask("ab") == ".."


def test_vllm_counts_the_bytes_that_are_read_and_written(server):
    server.compute("abc")
    server.ask("ab")
    data = server.manager.get_stats().data["data"]
    assert [*data[TieringOffloadingMetrics.WRITE_BYTES].values()] == [3 * ROW]
    assert [*data[TieringOffloadingMetrics.READ_BYTES].values()] == [2 * ROW]


def test_more_than_the_tier_holds_evicts_the_least_recently_used(tmp_path):
    letters = [chr(0x4E00 + at) for at in range(2 * TIER_BYTES // ROW)]
    with closing(Server(ours(tmp_path))) as server:
        server.compute("ab")
        for at in range(0, len(letters), CHUNKS):
            if at % (len(letters) // 4) == 0:
                server.manager.touch([key("a"), key("b")], ReqContext("uses both"))
            server.compute("".join(letters[at : at + CHUNKS]))
        assert server.ask("".join(letters[:CHUNKS])) == "." * CHUNKS
        assert server.ask("".join(letters[-CHUNKS:])) == "".join(letters[-CHUNKS:])
        assert server.ask("ab") == "ab"
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) <= TIER_BYTES


@pytest.mark.parametrize(("reset", "after"), [("with_connector", ".."), ("never", "ab")])
def test_a_reset_empties_it_unless_it_never_does(tmp_path, reset, after):
    with closing(Server(ours(tmp_path, reset=reset))) as server:
        server.compute("ab")
        server.reset(weights=server.weights)
        assert server.ask("ab") == after
        server.compute("ab")
        assert server.ask("ab") == "ab"


def test_nothing_from_before_a_reset_is_served_after_a_restart(tmp_path):
    with closing(Server(ours(tmp_path))) as server:
        server.compute("ab")
        server.reset(weights="2")
    with closing(Server(ours(tmp_path), weights="2")) as server:
        assert server.ask("ab") == ".."


def test_vllm_s_memory_is_unmapped_at_the_end(tmp_path):
    server = Server(ours(tmp_path))
    region = server.manager.primary_tier._mmap_region
    mapped, path = region.mmap_obj, Path(region.mmap_path)
    server.compute("ab")
    server.ask("ab")
    server.close()
    assert mapped.closed and not path.exists()


def test_a_reset_waits_for_what_is_being_written(server, monkeypatch):
    write = Slab.write

    def slowly(*arguments):
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(Slab, "write", slowly)
    server.compute("ab", waits=False)
    server.reset(weights="2")  # in which vLLM asserts that no job is left
    assert server.ask("ab") == ".."


def test_requests_compute_what_a_disk_that_hangs_does_not_bring(tmp_path, monkeypatch):
    monkeypatch.setattr(tier, "STALL_SECONDS", 0.2)
    goes_on, read = threading.Event(), Slab.read

    def hangs(*arguments):
        refused = read(*arguments)
        goes_on.wait()
        return refused

    with closing(Server(ours(tmp_path))) as server:
        server.compute("ab")
        monkeypatch.setattr(Slab, "read", hangs)
        try:
            assert server.ask("ab") == ".."
        finally:
            goes_on.set()
        server.compute("ab")
        assert server.ask("ab") == "ab"


def test_a_job_that_lost_a_chunk_names_the_others(server):
    server.compute("abc")
    server.settle()
    (slot,) = [
        slot
        for slot in range(server.tier._rank.tier._below.slots)
        if (record := server.tier._rank.tier._below.record(slot)) and record.label.key == key("b")[:-4]
    ]
    server.tier._rank.tier._below.records.clear([slot])
    keys = [key(letter) for letter in "abc"]
    server.tier.submit_load(TransferJob(77, keys, np.arange(3), True, ReqContext("partly")))
    server.tier._rank.drain()
    (result,) = server.tier.get_finished_jobs()
    assert result.job_id == 77 and not result.success
    assert result.successful_keys == (key("a"), key("c"))


def test_replicas_of_one_configuration_have_folders_of_their_own(tmp_path):
    with closing(Server(ours(tmp_path), number=0)) as one, closing(Server(ours(tmp_path), number=1)) as other:
        one.compute("ab")
        other.compute("cd")
        assert (one.ask("abcd"), other.ask("abcd")) == ("ab..", "..cd")


def set_scaling(engine):
    engine.model_config.hf_config.rope_parameters = {"rope_type": "yarn", "factor": 4.0}


def set_length(engine):
    engine.model_config.hf_config.rope_parameters = {"rope_type": "longrope"}
    engine.model_config.max_model_len *= 2


def set_pixels(engine):
    engine.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs={"max_pixels": 100352})


def set_ranks(engine):
    engine.parallel_config.decode_context_parallel_size = 2


def set_drafter(engine):
    engine.speculative_config = drafting("eagle", draft_model_config=deepcopy(engine.model_config))


CHANGES = {
    "scaling": set_scaling,
    "length": set_length,
    "pixels": set_pixels,
    "context parallel": set_ranks,
    "drafter": set_drafter,
    "dtype": lambda engine: setattr(engine.model_config, "dtype", torch.bfloat16),
    "quantization": lambda engine: setattr(engine.model_config, "quantization", "fp8"),
    "backend": lambda engine: setattr(engine.attention_config, "backend", "FLASH_ATTN"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_engine_that_computes_other_kv_finds_nothing(tmp_path, change):
    """Also with one revision, which names the weights and nothing else."""
    with closing(Server(ours(tmp_path))) as server:
        server.compute("ab")
    with closing(Server(ours(tmp_path), weights="2", change=change)) as other:
        assert other.ask("ab") == ".."


def test_control_an_engine_like_it_finds_what_it_computed(tmp_path):
    for served in ("..", "ab"):
        with closing(Server(ours(tmp_path), change=set_scaling)) as server:
            assert server.ask("ab") == served
            server.compute("ab")


def test_keys_of_another_hash_are_refused(tmp_path):
    def set_hash(engine):
        engine.cache_config.prefix_caching_hash_algo = "xxhash"

    with pytest.raises(ConfigurationError, match="--prefix-caching-hash-algo sha256"):
        Server(ours(tmp_path), change=set_hash)


def test_keys_of_an_engine_without_prefix_caching_are_refused(tmp_path):
    """They have a request's number in place of its image, and of KV that depends on later tokens only those before."""

    def set_uncached(engine):
        engine.cache_config.enable_prefix_caching = False

    with pytest.raises(ConfigurationError, match="start vLLM with prefix caching, or without"):
        Server(ours(tmp_path), change=set_uncached)


def test_adapters_need_a_revision(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"1")

    def set_adapters(engine):
        engine.lora_config = LoRAConfig(max_lora_rank=8)

    with pytest.raises(ConfigurationError, match=r"with LoRA .* give the tier a revision"):
        Server(ours(tmp_path / "tier", revision=None), model=str(tmp_path), change=set_adapters)


def test_a_tier_below_vllm_s_own_connector_is_refused(tmp_path):
    """Nothing in it names what the bytes depend on."""
    with pytest.raises(ConfigurationError, match="take the kv_connector CPUPrefixCacheOffloadingConnector in place"):
        OffloadingSpecFactory.create_spec(config(ours(tmp_path))).get_manager()


def test_one_hash_in_two_groups_is_two_chunks(server):
    server.compute("a")
    same = make_offload_key(key("a")[:-4], 1)
    assert server.tier.lookup(key("a"), ReqContext("one")) is LookupResult.HIT
    assert server.tier.lookup(same, ReqContext("one")) is LookupResult.MISS


# A store that servers share


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setitem(opening.OURS, "memory", "tests.vllm.memory_by_url:MemoryByUrl")
    STORES.clear()
    return "memory://one"


def test_servers_that_share_a_store_find_what_others_computed(url):
    with closing(Server(shared(url, revision="1"))) as one, closing(Server(shared(url, revision="1"))) as other:
        assert other.ask("ab") == ".."
        one.compute("abc")
        assert other.ask("c") == "c"
        time.sleep(ABSENT_SECONDS)
        assert other.ask("abcd") == "abc."


def test_a_question_goes_out_with_the_step_that_looked_up(url):
    with closing(Server(shared(url, revision="1"))) as server:
        assert server.manager.lookup(key("a"), ReqContext("looks up")) is LookupResult.RETRY
        server.step()
        assert not server.tier._tier.plan().asks


@pytest.mark.parametrize("described", [{"model": "other"}, {"dtype": "bfloat16"}])
def test_servers_of_other_models_do_not_meet(url, described):
    with closing(Server(shared(url, revision="1"))) as one:
        one.compute("ab")
    with closing(Server(shared(url, revision="1"), weights="2", **described)) as other:
        assert other.ask("ab") == ".."
    with closing(Server(shared(url, revision="2"), weights="2")) as other:
        assert other.ask("ab") == ".."


@pytest.mark.parametrize(("makes_frame_fit", "served"), [(False, ".b"), (True, "?b")])
def test_a_value_that_was_changed_in_the_store_is_computed(url, monkeypatch, makes_frame_fit, served):
    """The control makes the checksum fit."""
    monkeypatch.setattr(frame, "checksum", (lambda view: bytes(16)) if makes_frame_fit else frame.checksum)
    with closing(Server(shared(url, revision="1"))) as server:
        server.compute("ab")
        (name,) = [name for name in STORES[url] if key("a")[:-4].hex() in name]
        STORES[url][name][frame.SIZE] ^= 1
        assert server.ask("ab") == served


def test_after_a_reset_servers_share_again_that_name_one_revision(url, tmp_path):
    revision = tmp_path / "revision"
    revision.write_text("1")
    tier = shared(url, revision_file=str(revision))
    with closing(Server(tier)) as one, closing(Server(tier)) as other:
        one.compute("ab")
        revision.write_text("2")
        for server in (one, other):
            server.reset(weights="2")
        assert other.ask("ab") == ".."
        one.compute("ab")
        time.sleep(ABSENT_SECONDS)
        assert other.ask("ab") == "ab"


# Configurations


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"root_dir": "/nvme"}, "no option 'root_dir'; give it tier, and perhaps reset"),
        ({"tier": None}, "needs the option tier, such as file:/nvme/kv:1TiB"),
        ({"reset": "always"}, "is with_connector or never, got 'always'"),
        ({"tier": {"kind": "redis", "store": "redis://x", "offload": "lazy"}}, "leave offload and policy out"),
        (
            {"tier": {"kind": "file", "path": "/x", "bytes": TIER_BYTES, "policy": "arc"}},
            "leave offload and policy out",
        ),
        (
            {"tier": {"kind": "file", "path": "/x", "bytes": TIER_BYTES, "offload": "lazy"}},
            "leave offload and policy out",
        ),
        ({"tier": {"kind": "file", "path": "/x", "bytes": CHUNKS * ROW, "revision": "1"}}, "give the tier at least"),
        ({"tier": {"kind": "file", "path": "/x", "bytes": TIER_BYTES}}, "give the tier a revision"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(tmp_path, options, sentence):
    with pytest.raises(ConfigurationError) as refused:
        Server(OURS | {"tier": f"file:{tmp_path}:1MiB"} | options)
    assert sentence in str(refused.value)


def test_backpressure_of_vllm_is_its_own(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    pressure = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    with closing(Server(ours(tmp_path) | {"backpressure": pressure})) as server:
        assert server.tier.bp_detector is not None
        server.compute("ab")
        assert server.ask("ab") == "ab"
