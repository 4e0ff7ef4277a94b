"""Requests whose loads have ended are given to vLLM together while it computes, and at once while it does not."""

from unittest.mock import patch

import pytest

from connector.vllm import ended_loads
from connector.vllm.ended_loads import LONGEST_SECONDS, LONGEST_STEP_SECONDS, EndedLoads
from connector.vllm.messages import StepMetadata
from cpu_prefix_cache.deciding import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from tests.vllm.test_ranks import half, plain_caches

NONE = set(), set()


def test_all_come_when_no_other_is_in_flight():
    ended = EndedLoads(lambda: 0.0)
    ended.add("a", failed=False)
    assert ended.take(more=True) == NONE
    ended.add("b", failed=True)
    assert ended.take(more=False) == ({"a", "b"}, {"b"})
    assert ended.take(more=False) == NONE


def test_the_first_waits_for_a_bounded_time_and_so_does_the_next_first():
    now = 10.0
    ended = EndedLoads(lambda: now)
    for request in ("a", "b"):
        ended.add(request, failed=False)
        now += 0.9 * LONGEST_SECONDS
        ended.add(request + "'", failed=False)
        assert ended.take(more=True) == NONE
        now += 0.2 * LONGEST_SECONDS
        assert ended.take(more=True) == ({request, request + "'"}, set())


def test_nothing_waits_behind_a_long_step():
    """The next one would end much later than requests may wait."""
    now = 100.0
    ended = EndedLoads(lambda: now)
    ended.take(more=True)
    for seconds, given in ((LONGEST_STEP_SECONDS, {"a"}), (0.01, set())):
        now += seconds
        ended.add("a", failed=False)
        assert ended.take(more=True) == (given, set())


@pytest.mark.parametrize(("computes", "given"), [(True, [set(), {"a", "b"}]), (False, [{"a"}, {"b"}])])
def test_a_worker_gives_loads_together_in_a_step_that_computes(tmp_path, monkeypatch, computes, given):
    monkeypatch.setattr(ended_loads, "LONGEST_SECONDS", 3600.0)
    monkeypatch.setattr(ended_loads, "LONGEST_STEP_SECONDS", 3600.0)
    worker = half(tmp_path, None, 1)
    worker.register_kv_caches(plain_caches())
    loads = tuple(TransferPlan(at, Direction.LOAD, (GroupCopy(0, (at,), (at,)),), 1) for at in range(2))
    found = []
    with patch.object(worker._worker, "run"):
        worker.begin(StepMetadata(StepPlan(0, loads), {0: "a", 1: "b"}, computes))
        for done in ({0}, {0, 1}):
            with patch.object(worker._worker, "report", lambda done=done: RankReport(0, frozenset(done))):
                found.append(worker.results()[0])
    worker.close()
    assert found == given
