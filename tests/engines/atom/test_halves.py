"""Messages of the connector's halves to each other and to ATOM, without ATOM's scheduler: on the real classes of
messages or on their double.
"""

import doctest
from types import SimpleNamespace

import pytest
import torch
from atom.config import KVCacheTensor
from atom.kv_transfer.disaggregation.types import ConnectorMetadata, connector_metadata_has_work

import connector.atom.messages
from connector.atom import geometry
from connector.atom.messages import READY_PARTS, StepMetadata, ready_blocks_of, ready_operations
from connector.atom.requests import _computed_at_most
from connector.atom.settings import Settings
from connector.atom.worker import CPUPrefixCacheWorker
from connector.common.request_flags import LOAD, allows
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan

BLOCKS, BLOCK_BYTES = 8, 2 * 4 * 8
NOTHING = StepPlan(0, ())


def config_of(**said):
    options = {"cpu_bytes_to_use": 32 * BLOCK_BYTES}
    plain = dict(
        kv_cache_block_size=4,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        enable_rapidserve=False,
        runner_qualname="atom.model_engine.model_runner.ModelRunner",
        tp_world_size=1,
        max_model_len=256,
        max_num_batched_tokens=64,
        speculative_config=None,
        enable_prefix_caching=True,
        kv_transfer_config={"kv_connector": "cpu_prefix_cache", "kv_connector_extra_config": options},
    )
    return SimpleNamespace(**plain | said)


@pytest.fixture
def rank():
    """A rank's half, and its keys and values."""
    keys, values = (torch.randint(1, 2**60, (BLOCKS, 4)) for _ in "kv")
    worker = CPUPrefixCacheWorker(config_of())
    worker.register_kv_caches({"layer_0": KVCacheTensor(0, keys, values, None, None)}, None, num_blocks=BLOCKS)
    yield worker, keys, values
    worker.close()


def said(worker):
    return {each.operation_id: each.succeeded for each in worker.get_finished().connector_completions}


def plan_of(*transfers, **rest):
    return StepPlan(0, tuple(transfers), **rest)


def transfer(id, direction, host, device, **rest):
    return TransferPlan(id, direction, (GroupCopy(0, tuple(host), tuple(device)),), len(host) * BLOCK_BYTES, **rest)


def test_the_examples_in_messages():
    assert doctest.testmod(connector.atom.messages).failed == 0


def test_metadata_is_work_for_the_ranks():
    assert isinstance(StepMetadata(NOTHING, 0), ConnectorMetadata)
    assert connector_metadata_has_work(StepMetadata(NOTHING, 0))
    assert not connector_metadata_has_work(None)


@pytest.mark.parametrize("blocks", [1, 5, 16, 33, 4096])
def test_ranks_that_become_ready_at_different_times_report_the_same(blocks):
    """Reports common to all are those of the slowest, a part at a time."""
    slow, fast = blocks // 3, blocks
    both = set(ready_operations(0, slow, blocks)) & set(ready_operations(0, fast, blocks))
    agreed = max(map(ready_blocks_of, both), default=0)
    assert slow - blocks / READY_PARTS - 1 < agreed <= slow
    assert ready_blocks_of(list(ready_operations(0, blocks, blocks))[-1]) == blocks


def test_a_rank_reports_the_bytes_of_a_block_until_a_plan_has_come(rank):
    worker, _, _ = rank
    first = said(worker)
    assert first == said(worker) and geometry.as_operation([BLOCK_BYTES]) in first
    assert max(map(ready_blocks_of, first)) == 32
    worker.start_load_kv(StepMetadata(NOTHING, 20))
    assert max(map(ready_blocks_of, said(worker))) == 32 and geometry.as_operation([BLOCK_BYTES]) not in said(worker)
    worker.start_load_kv(StepMetadata(NOTHING, 32))
    assert not said(worker)


CODED = {"cpu_bytes_to_use": 8 * 1568, "codec": "exponent"}  # a block of 2 x 1,024 bytes takes 1,568


def coded_rank(dtype=torch.bfloat16, width=128, **said):
    keys, values = (torch.randn(BLOCKS, 4, width).to(dtype) for _ in "kv")
    worker = CPUPrefixCacheWorker(config_of(kv_transfer_config={"kv_connector_extra_config": CODED}, **said))
    worker.register_kv_caches({"layer_0": KVCacheTensor(0, keys, values, None, None)}, None, num_blocks=BLOCKS)
    return worker, keys, values


def test_coded_blocks_come_back_and_a_store_with_one_that_does_not_fit_has_failed():
    worker, keys, values = coded_rank()
    keys[2] = torch.randint(-32768, 32768, keys[2].shape).to(torch.int16).view(torch.bfloat16)
    before = keys[3].clone(), values[3].clone()
    stores = [transfer(at, Direction.STORE, [host], [block]) for at, (host, block) in enumerate([(7, 3), (6, 2)])]
    worker.start_load_kv(StepMetadata(plan_of(*stores), 8))
    keys[5], values[5] = -1, -1
    worker.start_load_kv(StepMetadata(plan_of(transfer(2, Direction.LOAD, [7], [5])), 8))
    assert torch.equal(keys[5], before[0]) and torch.equal(values[5], before[1])
    assert {id: ok for id, ok in said(worker).items() if isinstance(id, int)} == {0: True, 1: False, 2: True}
    worker.close()


@pytest.mark.parametrize(
    ("kv", "sentence"),
    [
        (dict(dtype=torch.float16), r"is for bfloat16, and the key of layer 0 is float16\[4, 128\]"),
        (dict(width=64), "takes whole units of 1024 bytes, got 512"),
    ],
)
def test_a_codec_that_is_not_for_this_kv_is_refused(kv, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        coded_rank(**kv)


def test_a_model_with_states_takes_no_codec():
    settings = Settings.of(config_of(kv_transfer_config={"kv_connector_extra_config": CODED}))
    with pytest.raises(ConfigurationError, match="keeps its states in the same blocks: leave it out"):
        settings.planner([2048, 4096])


def test_a_round_trip_is_reported_until_it_is_resolved(rank):
    worker, keys, values = rank
    before = keys[3].clone(), values[3].clone()
    worker.start_load_kv(StepMetadata(plan_of(transfer(0, Direction.STORE, [7], [3])), 32))
    keys[:], values[:] = -1, -1
    worker.start_load_kv(StepMetadata(plan_of(transfer(1, Direction.LOAD, [7], [5])), 32))
    assert torch.equal(keys[5], before[0]) and torch.equal(values[5], before[1])
    assert (keys[:5] == -1).all() and (values[6:] == -1).all()
    assert said(worker) == said(worker) == {0: True, 1: True}
    worker.start_load_kv(StepMetadata(plan_of(resolved_below=1), 32))
    assert said(worker) == {1: True}


def test_the_comparison_sees_another_host_block(rank):
    """The control of the round trip."""
    worker, keys, _ = rank
    before = keys[3].clone()
    worker.start_load_kv(StepMetadata(plan_of(transfer(0, Direction.STORE, [7], [3])), 32))
    worker.start_load_kv(StepMetadata(plan_of(transfer(1, Direction.LOAD, [8], [5])), 32))
    assert not torch.equal(keys[5], before)


def test_a_transfer_that_raises_has_failed(rank):
    """S5.32: a block that does not exist; S5.20: no byte is written before."""
    worker, keys, _ = rank
    before = keys.clone()
    bad = transfer(0, Direction.LOAD, [7, 8], [0, BLOCKS]), transfer(1, Direction.LOAD, [], [], failed=True)
    worker.start_load_kv(StepMetadata(plan_of(*bad), 32))
    assert said(worker) == {0: False, 1: False}
    assert torch.equal(keys, before)


def test_metadata_of_others_is_not_ours(rank):
    worker, _, _ = rank
    before = said(worker)
    worker.start_load_kv(ConnectorMetadata())
    assert said(worker) == before


def test_a_rank_without_kv_reports_nothing():
    assert CPUPrefixCacheWorker(config_of()).get_finished().is_empty()


def test_the_number_of_blocks_is_required():
    with pytest.raises(ConfigurationError, match="pass num_blocks"):
        CPUPrefixCacheWorker(config_of()).register_kv_caches({})


@pytest.mark.parametrize(
    ("num_tokens", "stand_ins", "drafts", "rejected", "at_most"),
    [
        (10, 0, 0, 0, 10),  # a prompt, or what is left of one: all of it
        (13, 0, 0, 0, 12),  # three answered: the last was sampled, and no step has read it
        (14, 1, 0, 0, 12),  # deferred tokens: of the four one stands in
        (20, 4, 3, 0, 12),  # three drafts a step, deferred: 3 + 1 stand in, and the drafts before them are verified
        (18, 2, 3, 0, 12),
        (18, 1, 3, 1, 12),
    ],
)
def test_the_last_known_token_of_an_answer_is_not_computed(num_tokens, stand_ins, drafts, rejected, at_most):
    seq = SimpleNamespace(num_tokens=num_tokens, num_prompt_tokens=10, num_rejected=rejected)
    seq.num_placeholder_tokens, seq.num_draft_tokens = stand_ins, drafts
    assert _computed_at_most(seq) == at_most


@pytest.mark.parametrize(("value", "counts_as"), [(True, True), (False, False), (0, True), ("no", True), (None, True)])
def test_a_parameter_of_a_request_counts_as_true_or_false(value, counts_as):
    """Any other value must not stop the engine."""
    assert allows({LOAD: value}, LOAD) is counts_as


def test_host_memory_is_shared_out_to_the_ranks():
    settings = Settings.of(config_of(tp_world_size=4))
    assert settings.host_bytes == 8 * BLOCK_BYTES
    assert settings.host_blocks(geometry.planner(config_of(), [BLOCK_BYTES])) == 8
    with pytest.raises(ConfigurationError, match=f"at least {4 * 9 * 8 * BLOCK_BYTES} bytes"):
        settings.host_blocks(geometry.planner(config_of(), [9 * 8 * BLOCK_BYTES]))


TRANSFER = config_of().kv_transfer_config


def with_options(**options):
    return dict(kv_transfer_config={"kv_connector_extra_config": {"cpu_bytes_to_use": 999, **options}})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (dict(enable_prefix_caching=False), "start with prefix caching"),
        (dict(pipeline_parallel_size=2), "pipeline_parallel_size 1"),
        (dict(prefill_context_parallel_size=2), "start with 1"),
        (dict(kv_transfer_config={"kv_connector": "cpu_prefix_cache"}), "needs cpu_bytes_to_use"),
        (dict(kv_transfer_config={"kv_connector_extra_config": ["cpu_bytes_to_use"]}), "needs cpu_bytes_to_use"),
        (with_options(ofload="lazy"), "unknown option 'ofload'"),
        (with_options(offload="never"), "one of lazy, eager"),
        (with_options(policy=["lru"]), "policy must be one of"),
        (with_options(min_load_tokens=True), "whole number of tokens"),
        (with_options(store_after=0), "at least 1"),
        (with_options(cpu_bytes_to_use=2.5), "whole number of bytes"),
        (dict(kv_transfer_config={**TRANSFER, "kv_role": "kv_producer"}), "kv_role must be one of"),
    ],
)
def test_impossible_configurations_are_refused(said, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        CPUPrefixCacheWorker(config_of(**said))
