"""ATOM's tests of its connector for DeepSeek-V4, written anew as in `test_peer_cases.py`: each names its originals.

Theirs saves a *sidecar*, the copy of a slot, beside the blocks of a prefix; ours saves the state that ATOM keeps in
blocks. ATOM keeps one after 16 tokens and their multiples here, and where a second prompt leaves a first.
"""

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.model_engine.sequence import SequenceStatus

from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import MeddlingCopier
from tests.engines.atom.engine import serve
from tests.engines.atom.test_peer_cases import Mute
from tests.engines.atom.test_states import (
    check_at_rest,
    engine_of,
    keys,
    statistics,
)

PROMPT = list(range(100, 135))  # a state after 32 tokens, and three more

pytestmark = pytest.mark.usefixtures("quiet")


def evict(engine):
    serve(engine, range(500, 500 + 4 * engine.config.num_kvcache_blocks - 8))


def hit(engine, prompt):
    """How much of a prompt comes from the host, when the device has nothing of it."""
    evict(engine)
    before = statistics(engine).hit_tokens
    serve(engine, prompt)
    check_at_rest(engine)
    return statistics(engine).hit_tokens - before


class FailingStores(MeddlingCopier):
    """Two stores of states fail: a request has one at its boundary, and again when it ends."""

    def __init__(self, copier, tensors):
        super().__init__(copier)
        self.left = 2

    def copy(self, direction, copies):
        if direction is Direction.STORE and self.left and any(copy.group for copy in copies):
            self.left -= 1
            raise RuntimeError("this store fails")
        return super().copy(direction, copies)


def test_a_hit_ends_at_a_state():
    """test_stateful_page_hit_shrinks_from_16k_to_committed_8k_sidecar,
    test_sidecar_save_emits_at_regular_checkpoint_boundary, test_off_interval_terminal_saves_page_without_slot,
    test_register_empty_kv_caches_with_page_regions_selects_page_codec.
    """
    engine = engine_of()
    serve(engine, [*PROMPT, *range(5)])
    assert statistics(engine).chunks_stored == 10 and statistics(engine).checkpoints_stored == 1
    assert hit(engine, [*PROMPT, *range(5), 9]) == 32


def test_a_hit_ends_at_the_last_state_before_the_prompt_ends_or_leaves_the_prefix():
    """test_stateful_page_hit_selects_newest_committed_boundary_not_after_page,
    test_stateful_page_hit_ignores_committed_slot_after_page_frontier.
    """
    engine = engine_of()
    serve(engine, PROMPT)
    serve(engine, PROMPT[:18])
    assert hit(engine, PROMPT) == 32
    assert hit(engine, [*PROMPT[:30], 7, 7, 7, 7]) == 16
    assert hit(engine, PROMPT[:31]) == 16


def test_a_state_of_another_prefix_is_no_hit():
    """test_stateful_page_hit_rejects_slot_from_different_prefix_hash."""
    engine = engine_of()
    serve(engine, PROMPT)
    assert hit(engine, [1, *PROMPT[1:]]) == 0


def test_blocks_without_a_state_are_no_hit():
    """test_stateful_page_hit_without_sidecar_is_rejected_and_lookup_cleared,
    test_stateful_lookup_fails_closed_after_commit_index_eviction.
    """
    engine = engine_of()
    serve(engine, PROMPT)
    pool = engine.connector.cache.pool
    (state,) = [node for node in pool.soonest_evicted() if node in pool.checkpoints]
    pool.withdraw(state)
    assert pool.find(keys(engine, PROMPT)[7]) is not None
    assert hit(engine, PROMPT) == 0


def test_a_new_engine_knows_nothing():
    """test_new_scheduler_session_fails_closed_without_rebuilt_slot_index."""
    serve(engine_of(), PROMPT)
    assert hit(engine_of(), PROMPT) == 0


def test_a_state_outlives_its_request():
    """test_request_cleanup_retains_recent_global_commit."""
    engine = engine_of()
    serve(engine, PROMPT)
    assert not engine.connector._live
    assert [hit(engine, PROMPT) for _ in range(2)] == [32, 32]


def test_a_load_fills_the_slot_of_its_request():
    """test_stateful_load_metadata_includes_slot_destination_group,
    test_stateful_load_tracks_identity_until_terminal_callback.
    """
    engine = engine_of()
    serve(engine, PROMPT)
    evict(engine)
    mute, seq = Mute(engine), engine.add(PROMPT, 2)
    for _ in range(5):
        engine.step()
    assert seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS and engine.restored == 0
    assert list(engine.connector._states._loading) == [seq.id]
    mute.speak()
    engine.run()
    assert engine.restored == 1
    check_at_rest(engine)


def test_a_state_is_stored_when_the_step_with_its_copy_was_launched():
    """test_slot_save_waits_until_post_allocation_state_copy_forward_completes,
    test_sidecar_save_waits_for_exact_completed_boundary.
    """
    engine = engine_of()
    seq = engine.add(PROMPT, 6)
    engine.step()
    assert seq.num_cached_tokens == 32 and engine.kept == 0
    assert not any(each.pieces for each in engine.connector.cache.edge.ledger.stores())
    engine.step()
    assert engine.kept == 1 and statistics(engine).checkpoints_stored == 0
    engine.run()
    assert statistics(engine).checkpoints_stored == 1
    check_at_rest(engine)


def test_a_state_alone_is_stored_where_the_blocks_are_there():
    """test_sidecar_only_save_emits_when_page_boundary_is_already_stored."""
    engine = engine_of()
    serve(engine, PROMPT)
    before = statistics(engine)
    serve(engine, PROMPT[:18])  # a state after 16 tokens
    after = statistics(engine)
    assert after.chunks_stored == before.chunks_stored
    assert after.checkpoints_stored == before.checkpoints_stored + 1
    check_at_rest(engine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_are_stored_while_other_stores_are_under_way(ranks):
    """test_page_save_inflight_still_cuts_and_emits_exact_sidecar_boundary,
    test_terminal_sidecar_is_emitted_after_earlier_inflight_boundary_completes,
    test_request_finish_retains_tracker_for_pending_and_inflight_sidecar,
    test_request_finish_retains_tracker_for_pending_page_save.
    """
    engine = engine_of(device_blocks=48, ranks=ranks)
    mute = Mute(engine)
    seq = engine.add(range(1000, 1120), 4)  # in two steps: states after 64 and 112 tokens
    while seq.id in engine.sequences:
        engine.step()
    assert statistics(engine).storing and not statistics(engine).checkpoints_stored
    mute.speak()
    engine.run()
    assert statistics(engine).checkpoints_stored == 2
    check_at_rest(engine)


def test_a_state_is_not_stored_twice():
    """test_sidecar_save_is_not_duplicated_while_inflight_or_after_commit."""
    engine = engine_of()
    mute = Mute(engine)
    for at in range(2):
        engine.add([*PROMPT, at], 2)
    for _ in range(12):
        engine.step()
    stores = [each for each in engine.connector.cache.edge.ledger.stores() if each.pieces]
    assert len(stores) == 1
    mute.speak()
    engine.run()
    serve(engine, [*PROMPT, 5])
    assert statistics(engine).checkpoints_stored == 1
    check_at_rest(engine)


def test_a_store_that_failed_is_no_hit_and_is_tried_again(copies):
    """test_sidecar_save_failure_clears_inflight_without_committing,
    test_failed_terminal_sidecar_does_not_pin_or_retry_finished_request.
    """
    copies(FailingStores)
    engine = engine_of()
    serve(engine, PROMPT)
    assert statistics(engine).checkpoints_stored == 0 and statistics(engine).stores_failed == 2
    assert hit(engine, PROMPT) == 0
    assert statistics(engine).checkpoints_stored == 1 and hit(engine, PROMPT) == 32


def test_a_state_is_there_when_all_ranks_have_it():
    """test_tp_partial_sidecar_completion_never_commits."""
    engine = engine_of(ranks=2)
    mute = Mute(engine, engine.ranks[1])
    seq = engine.add(PROMPT, 2)
    while seq.id in engine.sequences:
        engine.step()
    for _ in range(5):
        engine.step()
    assert statistics(engine).checkpoints_stored == 0
    mute.speak()
    engine.run()
    assert hit(engine, PROMPT) == 32


def test_one_rank_that_fails_is_enough(copies):
    """test_tp_sidecar_failure_prevents_commit_after_all_workers_terminal."""
    ranks = []
    copies(lambda copier, tensors: ranks.append(0) or (FailingStores(copier, tensors) if len(ranks) == 2 else copier))
    engine = engine_of(ranks=2)
    serve(engine, PROMPT)
    assert statistics(engine).checkpoints_stored == 0 and statistics(engine).stores_failed == 2
    assert hit(engine, PROMPT) == 0
