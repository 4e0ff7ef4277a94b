"""Settings and reports of vLLM reach the parts that they concern: configuration, ranks, blocks that have gone bad."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import vllm
from vllm.distributed.aux_output_connector.store import BlockObject, BlockObjectStore, BlockObjectStoreError
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.common.request_flags import LOAD, allows
from connector.vllm import CPUPrefixCacheConnector, ranks, regions, versions
from connector.vllm import worker as worker_module
from connector.vllm.device import VllmDevice
from connector.vllm.settings import Settings
from cpu_prefix_cache import ConfigurationError
from tests.vllm.engine import AT_ONCE, BLOCK, NEVER, Engine, drafting, full, latent, one_group, state, vllm_config
from tests.vllm.two_processes import said_by

ROOT = Path(__file__).parents[2]
BLOCKS = 48


def configure(folder, **parallel):
    config = vllm_config(folder, cpu_bytes_to_use=64 << 20)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return config


# Importing


def outside(code: str) -> str:
    """Output of a program, run where nothing of ours is imported yet, and nothing may touch a GPU."""
    before = """
import sys, torch, vllm.v1.core.sched.scheduler
def refuse():
    print("CUDA was initialised")
    raise RuntimeError
torch.cuda._lazy_init = refuse
def new():
    return set(sys.modules) - known
known = set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", before + code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip()


HEAVY = """
LIGHT = {"cpu_prefix_cache.memory", "cpu_prefix_cache.memory.layout_version"}
HEAVY = ("connector.vllm.worker", "cpu_prefix_cache.copier", "cpu_prefix_cache.memory", "triton")
print(sorted(name for name in new() - LIGHT if name.startswith(HEAVY)))
"""


def test_importing_the_connector_imports_nothing_that_copies_and_no_package_that_vllm_has_not():
    code = """
import connector.vllm
ours = {"connector", "cpu_prefix_cache", "cpu_prefix_cache_vllm"}  # the last one by vLLM, where we are installed
needed = ours | {"vllm", "sortedcontainers", "xxhash"} | sys.stdlib_module_names
print(sorted({name.partition(".")[0] for name in new()} - needed))
"""
    assert outside(code + HEAVY) == "[]\n[]"


def test_the_scheduler_half_needs_nothing_that_copies(tmp_path):
    code = f"""
from pathlib import Path
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from tests.vllm.engine import one_group, vllm_config
from connector.vllm import CPUPrefixCacheConnector
from vllm.v1.core.block_pool import BlockPool
config = vllm_config(Path({str(tmp_path)!r}), cpu_bytes_to_use=2**30)
known = set(sys.modules)
connector = CPUPrefixCacheConnector(config, KVConnectorRole.SCHEDULER, one_group(80))
connector.bind_gpu_block_pool(BlockPool(80, enable_caching=True, hash_block_size=4))
"""
    assert outside(code + HEAVY) == "[]"


# Releases


@pytest.mark.parametrize("number", ["0.34.0", "1.0.0", "1.30.0", "dev"])
def test_a_release_after_the_tested_range_is_warned_of_once(tmp_path, log, monkeypatch, number):
    assert warnings_of(tmp_path, log, monkeypatch, number) == [
        f"CPUPrefixCacheConnector was tested with vLLM 0.30 to 0.33; this is {number}"
    ]


@pytest.mark.parametrize("number", ["0.30.0", "0.32.0+cpu", "0.33.4"])
def test_a_release_within_the_tested_range_is_not_warned_of(tmp_path, log, monkeypatch, number):
    assert warnings_of(tmp_path, log, monkeypatch, number) == []


def warnings_of(folder, log, monkeypatch, number):
    """Warnings of both halves of an engine when they begin with such a vLLM."""
    config = configure(folder)
    config.cache_config.num_gpu_blocks = BLOCKS
    monkeypatch.setattr(vllm, "__version__", number)
    for role in KVConnectorRole:
        CPUPrefixCacheConnector(config, role, one_group(BLOCKS))
    ours = [each for each in log.records if each.name.startswith("connector.vllm") and each.levelname == "WARNING"]
    return [each.getMessage() for each in ours]


# Several ranks


def test_the_ranks_of_a_tensor_parallel_group_get_the_region_from_it(tmp_path, monkeypatch):
    """Ranks that have KV of their own have a region each."""
    asked, made = [], []

    def region_of_the_group(num_bytes, **_):
        asked.append(num_bytes)
        return "shared"

    def arena(blocks, size, *, region, **_):
        made.append((blocks * size, region))
        return Mock()

    monkeypatch.setattr(regions, "HostArena", arena)
    monkeypatch.setattr(regions, "_shared_region", region_of_the_group)
    monkeypatch.setattr(ranks, "share_memory", lambda: True)
    monkeypatch.setattr(ranks, "agree", lambda problem: None)
    config = configure(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2, world_size=4)
    for group in latent(), full():
        settings = Settings.of(config, KVCacheConfig(BLOCKS, [], [group]))
        regions.arena_of(settings, config, settings.planner, torch.device("cpu"))
    assert [region for _, region in made] == ["shared", None] and asked == [made[0][0]]


@pytest.mark.parametrize("together", [[True, True], [True, False]])
def test_ranks_share_memory_only_if_none_of_them_is_elsewhere(monkeypatch, together):
    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(cpu_group="these"))
    monkeypatch.setattr(ranks, "in_the_same_node_as", {"these": together}.get)
    assert ranks.share_memory() == all(together)


def test_two_stages_of_a_machine_follow_the_first_and_share_memory(tmp_path):
    assert said_by(meets, tmp_path / "meeting") == {0: ([10, 7], True), 1: ([10, 7], True)}


def meets(rank, file, told):
    """In a process of its own, with vLLM's own group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    both = GroupCoordinator([[0, 1]], rank, "gloo", use_device_communicator=False)
    ranks.get_tp_group = ranks.get_pp_group = lambda: both
    told.put((rank, (ranks.as_on_the_first_stage([10 + rank, 7 + rank]), ranks.share_memory())))


# Refusals by name


@pytest.mark.parametrize("kind", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("caching", [True, False])
def test_half_of_the_work_is_refused_by_name(tmp_path, kind, caching):
    config = configure(tmp_path)
    config.kv_transfer_config.kv_role = kind
    config.cache_config.enable_prefix_caching = caching
    with pytest.raises(ConfigurationError, match=f"kv_role must be kv_both, got {kind}: the host cache serves"):
        CPUPrefixCacheConnector(config, KVConnectorRole.SCHEDULER, one_group(BLOCKS))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_are_kept_in_another_way_are_refused_by_name(tmp_path, mode):
    caches = KVCacheConfig(BLOCKS, [], [full(), state(mode=mode)])
    with pytest.raises(ConfigurationError, match=f'mamba_cache_mode "{mode}" is not supported; .*-mode align'):
        Settings.of(configure(tmp_path), caches)


def test_routed_experts_are_refused_because_vllm_has_none_of_what_the_device_has_lost(tmp_path):
    kept = BlockObjectStore(max_bytes=16, object_nbytes=8)
    for name in "abc":
        kept.put([BlockObject(name, bytes(8))])
    with pytest.raises(BlockObjectStoreError, match="may have been evicted"):
        kept.get_concatenated(["a"])  # which stops the engine
    config = configure(tmp_path)
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ConfigurationError, match="start it without --enable-return-routed-experts"):
        Settings.of(config, one_group(BLOCKS))


@pytest.mark.parametrize("are_returned", [True, False])
def test_before_031_the_model_has_the_switch_of_routed_experts(are_returned):
    config = SimpleNamespace(model_config=SimpleNamespace(enable_return_routed_experts=are_returned))
    assert versions.returns_routed_experts(config) is are_returned


# Settings that reach the cache and the worker


def test_no_host_block_is_used_before_every_rank_has_prepared_it(tmp_path):
    settings = Settings.of(configure(tmp_path), one_group(BLOCKS))
    cache = settings.build(SimpleNamespace(num_blocks=BLOCKS, null_block=0, blocks_per_chunk=None, handed_out=dict))
    assert cache.statistics().pool.ready == 0 < cache.statistics().pool.capacity


def test_a_report_is_expected_two_steps_later_where_steps_overlap(tmp_path):
    config = configure(tmp_path)
    for overlap, steps in ((False, 2), (True, 4)):
        config.scheduler_config.async_scheduling = overlap  # on CPUs vLLM turns it off itself
        assert Settings.of(config, one_group(BLOCKS)).steps.report_steps == steps


@pytest.mark.parametrize(
    ("drafter", "lookahead", "step"),
    [
        (drafting("eagle"), BLOCK, 4),
        (drafting("mtp"), BLOCK, 4),
        (drafting("eagle", disable_eagle_block_drop=True), 0, 4),
        (drafting("ngram"), 0, 4),
        (None, 0, 1),
    ],
)
def test_drafts_are_counted_and_what_vllm_drops_for_them(tmp_path, drafter, lookahead, step):
    config = configure(tmp_path)
    config.speculative_config = drafter
    settings = Settings.of(config, one_group(BLOCKS))
    (group,) = settings.planner.groups
    assert (group.lookahead_tokens, settings.steps.decode_tokens) == (lookahead, step)


def test_the_cache_knows_the_tokens_of_a_decoding_step(tmp_path, monkeypatch):
    monkeypatch.setattr("connector.tier.cache.CPUPrefixCache", lambda *args, **options: options)
    config = configure(tmp_path)
    config.speculative_config = drafting("eagle")
    assert Settings.of(config, one_group(BLOCKS)).build(None)["engine"].steps.decode_tokens == 4


def test_a_load_has_thirty_seconds(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(worker_module, "CopyWorker", lambda *args, **options: given.update(options))
    config = configure(tmp_path)
    config.cache_config.num_gpu_blocks = BLOCKS
    connector = CPUPrefixCacheConnector(config, KVConnectorRole.WORKER, one_group(BLOCKS))
    connector.register_kv_caches({f"layer.{at}": torch.zeros(BLOCKS, 2, BLOCK, 2, 16) for at in range(2)})
    assert given["load_seconds"] == 30


def test_a_wish_that_is_neither_true_nor_false_is_warned_of_once(log):
    def wants(said):
        return allows(said, LOAD)

    assert wants(None) and wants({}) and wants({LOAD: True})
    assert not wants({LOAD: False})
    assert not log.records
    assert wants({LOAD: "false"}) and wants({LOAD: "false"})
    assert [each.getMessage() for each in log.records] == [
        "cpu_prefix_cache_load in kv_transfer_params is true or false, got 'false': taken for true"
    ]


@pytest.mark.parametrize(("bad", "found"), [("source", 0), ("other", 0), ("none", 7)])
def test_chunks_in_flight_when_vllm_calls_blocks_invalid_are_not_found(tmp_path, bad, found):
    """Nor where nobody copies the wrong block: what is copied may have been computed over it."""
    engine = Engine(tmp_path, offload="eager", host_blocks=1000, slowest=1)
    engine.step()
    (rank,) = engine.ranks
    rank.pace = NEVER
    engine.submit(list(range(30)), max_tokens=1)
    while not rank.copies:
        engine.step()
    sources = {block for copy in rank.copies.values() for kind, block in copy.reads if kind == "device"}
    other = set(range(1, engine.pool.num_gpu_blocks)) - sources
    invalid = {"source": {min(sources)}, "other": {min(other)}, "none": set()}
    poll = rank.poll

    def complain():
        output = poll()
        output.invalid_block_ids = invalid[bad]
        return output

    rank.poll = complain
    engine.step()
    rank.poll, rank.pace = poll, AT_ONCE
    engine.drain()
    assert sum(engine.cache.pool.find(key) is not None for key in engine.keys(list(range(30)))) == found


def test_blocks_handed_out_are_noted_only_where_nobody_writes_them_first(tmp_path):
    """Not beside other connectors, and not where workers zero new blocks."""
    assert Engine(tmp_path).device.handed_out() is not None
    assert Engine(tmp_path, offload="eager").half.device._notes.are_taken is False  # nobody would ever take the notes
    assert versions.zeroes_new_blocks(SimpleNamespace(needs_kv_cache_zeroing=True))
    assert versions.zeroes_new_blocks(SimpleNamespace())  # a release without the field
    assert not versions.zeroes_new_blocks(SimpleNamespace(needs_kv_cache_zeroing=False))


@pytest.mark.parametrize(("asynchronous", "is_alone"), [(True, True), (True, False), (False, True)])
def test_copies_are_early_where_vllm_returns_blocks_after_the_steps_that_use_them(tmp_path, asynchronous, is_alone):
    """It does so where steps overlap; and nobody may write to the blocks before the ranks have the plan."""
    engine = Engine(tmp_path, asynchronous=asynchronous)
    assert engine.scheduler.defer_block_free is asynchronous
    device = VllmDevice(engine.half.device._pool, engine.half._planner, [0], is_alone=is_alone, overlaps=asynchronous)
    assert device.frees_after_use is (asynchronous and is_alone)
    assert engine.half.device.frees_after_use is asynchronous
