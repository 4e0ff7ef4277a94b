"""Before 0.28 vLLM takes, in a model with states and with any connector, the longest hit of a group for the hit of all.

    a prompt of 30 tokens     attention x---x---x---x---x---x---x       state x at 28
    another that parts at 20  attention has 20 tokens of it, and there is no state: all of it is to be computed

Its scheduler is put in the place of this release's here. (tests_gpu/vllm_equality.py has a real 0.26.)
"""

from unittest.mock import patch

import pytest
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched.scheduler import Scheduler

from connector.vllm import versions
from tests_vllm.engine import full, state
from tests_vllm.test_groups import start  # noqa: F401 a fixture

PROMPT = list(range(30))
PARTED = [*PROMPT[:20], *range(100, 110)]


def longest_hit(scheduler, request):
    """As it was found before 0.28."""
    manager = scheduler.kv_cache_manager
    computed, hits = manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens - 1)
    return manager.create_kv_cache_blocks(computed), max(hits), 0, False


@pytest.fixture
def old_scheduler():
    search = "find_longest_cache_hit_per_group"
    with (
        patch.object(Scheduler, "_get_local_prefix_cache_hit", longest_hit),
        patch.object(HybridKVCacheCoordinator, search, vars(HybridKVCacheCoordinator)[search]),
    ):
        yield


def test_without_the_joint_search_a_state_is_read_from_the_null_block(old_scheduler, start):  # noqa: F811
    engine = start([full(), state()])
    engine.run(PROMPT)
    with pytest.raises(AssertionError, match="null"):
        engine.run(PARTED)


def test_with_it_a_request_resumes_where_all_groups_can(old_scheduler, start):  # noqa: F811
    versions.patch_joint_hits()
    engine = start([full(), state()])
    engine.run(PROMPT)
    engine.run(PARTED)
    engine.run(PROMPT)
    assert [on_device for on_device, _ in engine.admitted] == [0, 0, 28]
    engine.check_nothing_leaked()


def test_where_it_is_needed():
    def needed(has_mamba, search=longest_hit, must_ask=False):
        with patch.object(versions, "_per_group", search), patch.object(versions, "_is_opt_in", lambda: must_ask):
            return versions.needs_joint_hits(has_mamba)

    assert needed(has_mamba=True)
    assert not needed(has_mamba=False)
    assert not needed(has_mamba=True, search=None)
    assert not needed(has_mamba=True, must_ask=True)
