"""Messages between the processes of vLLM when there are several connectors: times of steps, and statistics."""

import msgspec
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from connector.multi.choice import Speed
from connector.multi.chooser import Chooser
from connector.vllm.messages import WorkerReports
from connector.vllm.multi import CPUPrefixCacheMultiConnector
from connector.vllm.multi.messages import TimedWorkerMetadata
from connector.vllm.multi.metrics import OWN, ChoiceCounts, ChoiceStats
from connector.vllm.multi.steps import Steps
from cpu_prefix_cache.deciding import RankReport
from cpu_prefix_cache.offload.prefill_rate import PrefillRate
from cpu_prefix_cache_vllm import register
from tests.vllm.contract import members, methods
from tests.vllm.test_contract import RELEASES, parameters_of, without_self


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Watched:
    """Steps of two connectors, with a clock that the test sets."""

    def __init__(self):
        self.clock = Clock()
        self.prefill = PrefillRate()
        speed = Speed(rate=1e9, overhead=0.0)
        self.chooser = Chooser([0.5] * 2, [speed] * 2, 1000.0, lambda: 1000.0, self.clock)
        self.steps = Steps(self.chooser, self.prefill, self.clock)

    def load(self, id, *tokens, is_async, blocks=()):
        choice = self.chooser.answered(id, tokens, 1000)
        load = self.chooser.admitted(id, tokens[choice.winner], blocks)
        self.steps.begins(load, is_async)

    def step(self, tokens, seconds=0.1, waits=(0.0, 0.0)):
        number = self.steps.begin(tokens)
        self.clock.now += seconds
        if number is not None:
            self.steps.end(number, waits)


@pytest.fixture
def watched():
    return Watched()


# Steps


def test_long_steps_measure_how_fast_prompts_are_computed(watched):
    watched.step(2000, seconds=0.5)
    watched.step(100, seconds=0.5)  # too short to measure
    watched.load("a", 500, 0, is_async=False)
    watched.step(2000, seconds=0.01)  # with a load in it
    assert watched.prefill.tokens_per_second is None
    watched.step(2000, seconds=0.4)
    assert watched.prefill.tokens_per_second == 4000


def test_a_load_in_a_step_takes_as_long_as_the_step_has_waited_for_it(watched):
    watched.load("a", 500, 0, is_async=False)
    watched.step(100, seconds=5.0, waits=(0.3, 0.0))
    assert watched.chooser.counts[0].seconds == pytest.approx(0.3)


def test_a_load_beside_steps_takes_until_its_request_is_received(watched):
    watched.load("a", 0, 500, is_async=True)
    watched.step(2000)
    watched.clock.now += 0.2
    watched.steps.received({"a", "of another"}, set(), set())
    assert watched.chooser.counts[1].seconds == pytest.approx(0.3)


def test_a_step_whose_output_vllm_has_dropped_has_ended_with_the_next(watched):
    watched.load("a", 500, 0, is_async=False)
    watched.steps.begin(100)
    watched.step(2000)
    assert watched.chooser.counts[0].wins == 1
    assert not watched.steps._begun


@pytest.mark.parametrize("is_async", [True, False])
def test_a_load_has_failed_if_one_of_its_blocks_is_invalid(watched, is_async):
    watched.load("good", 500, 0, is_async=is_async, blocks=[1, 2])
    watched.load("bad", 500, 0, is_async=is_async, blocks=[3, 4])
    number = watched.steps.begin(100)
    watched.steps.received({"good", "bad"} if is_async else (), (), {4, 9})
    watched.steps.end(number or 0, (0.1, 0.1))
    assert (watched.chooser.counts[0].wins, watched.chooser.counts[0].misses["failed"]) == (1, 1)


def test_a_load_has_failed_if_its_request_is_reported_as_failed(watched):
    watched.load("good", 500, 0, is_async=True)
    watched.load("bad", 500, 0, is_async=True)
    watched.steps.received({"good", "bad"}, {"bad"}, ())
    assert (watched.chooser.counts[0].wins, watched.chooser.counts[0].misses["failed"]) == (1, 1)


# From the ranks


def test_the_slowest_rank_counts_and_parts_are_aggregated_by_those_that_sent_them():
    first = WorkerReports((RankReport(0),))
    second = WorkerReports((RankReport(1),))
    outputs = [
        rank_output(TimedWorkerMetadata((None, first), 7, [0.1, 0.4])),
        rank_output(TimedWorkerMetadata((None, second), 7, [0.3, 0.2])),
    ]
    merged = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_worker_meta
    assert (merged.step, merged.seconds) == (7, [0.3, 0.4])
    assert merged.metadata[0] is None
    assert [report.rank for report in merged.metadata[1].reports] == [0, 1]


def rank_output(metadata: KVConnectorWorkerMetadata) -> ModelRunnerOutput:
    return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=metadata))


# Statistics

NAMES = ("0:SilentConnector", "1:SilentConnector")


def test_a_report_has_what_has_changed(watched):
    counts = ChoiceCounts(NAMES, watched.chooser.counts)
    assert counts.take() is not None  # all that is at 0, once
    assert counts.take() is None
    watched.load("a", 500, 0, is_async=True)
    watched.steps.received({"a"}, (), ())
    told = counts.take().data
    assert told["wins:0:SilentConnector"] == 1
    assert told["misses:nothing:1:SilentConnector"] == 1
    assert counts.take() is None


def test_reports_survive_the_way_to_the_frontend(watched):
    counts = ChoiceCounts(NAMES, watched.chooser.counts)
    total = CPUPrefixCacheMultiConnector.build_kv_connector_stats(None)
    for id in "abc":
        watched.load(id, 500, 0, is_async=True)
        watched.steps.received({id}, (), ())
        watched.chooser.answered("waits", [None, None], 1000)
        stats = MultiKVConnectorStats({OWN: counts.take()})
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
        total = total.aggregate(CPUPrefixCacheMultiConnector.build_kv_connector_stats(sent))
    assert isinstance(total[OWN], ChoiceStats)
    assert total[OWN].data["wins:0:SilentConnector"] == 3
    assert total[OWN].data["pending:1:SilentConnector"] == 1  # the latest one, not the sum
    assert total.reduce()[OWN]["tokens:0:SilentConnector"] == 1500
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


# vLLM


@pytest.mark.parametrize("number", RELEASES)
def test_overridden_and_used_members_of_vllms_class_exist(number):
    theirs = methods(RELEASES[number], "MultiConnector")
    for name in vars(CPUPrefixCacheMultiConnector):
        if not name.startswith("_"):
            ours = parameters_of(getattr(CPUPrefixCacheMultiConnector, name))
            assert ours == without_self(theirs[name]), name
    assert "_get_connector_classes_and_configs" in theirs
    assert {"_connectors", "_requests_to_connector"} <= members(RELEASES[number], "MultiConnector")


@pytest.mark.parametrize("module", [None, "connector.vllm.multi"])
def test_vllm_finds_the_connector_by_its_name_and_by_its_module(module):
    register()
    config = KVTransferConfig(kv_connector=OWN, kv_connector_module_path=module, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is CPUPrefixCacheMultiConnector
    assert KVConnectorFactory.supports_hma_config(config)
