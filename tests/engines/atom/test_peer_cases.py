"""ATOM's tests of its own offload connector, as far as they speak of behaviour, demanded of ours.

Two are run as they are written. The others set their connector's private fields, so they are written anew on ATOM's
real scheduler and block manager around ranks with our connector; each names its originals.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from cpu_prefix_cache.testing import MeddlingCopier
from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.kv_transfer.disaggregation.types import (
    ConnectorCompletion,
    KVConnectorOutput,
    LoadOperationId,
    SaveOperationId,
    connector_metadata_has_work,
)
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.sequence import SequenceStatus

from connector.atom import geometry, worker
from connector.atom.scheduler import CPUPrefixCacheScheduler
from connector.atom.worker import CPUPrefixCacheWorker
from cpu_prefix_cache.copier.events import Passed
from cpu_prefix_cache.deciding import Direction
from tests.engines.atom.engine import Engine, config_of, transfer_config
from tests.engines.atom.peer import cases, their

PROMPT = list(range(100, 119))  # 19 tokens: four blocks of 4, and three tokens
OTHERS = [[200 + 40 * at + each for each in range(39)] for at in range(4)]  # they fill the device, not the host


def engine_of(ranks=1, num_blocks=24, **options):
    options = {"offload": "eager", **options}
    transfer = transfer_config(64, ranks, **options)
    return Engine(config_of(num_kvcache_blocks=num_blocks, kv_transfer_config=transfer, tp_world_size=ranks))


def run(engine, *prompts, **said):
    """Compute these prompts one after the other, and let all copies end."""
    for prompt in prompts:
        engine.add(prompt, **said)
        engine.run()


def on_the_host_alone(engine):
    """PROMPT is stored, and the device has forgotten it."""
    run(engine, PROMPT, *OTHERS)
    before = engine.connector.cache.statistics()
    assert before.chunks_stored and not before.chunks_loaded
    return before


def load(engine, prompt=PROMPT):
    """Add a prompt, and step until it waits for its load. Its sequence."""
    seq = engine.add(prompt)
    while not seq.block_table:
        engine.step()
    assert seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
    return seq


def counted(engine, before, *names):
    """By how much these statistics have grown."""
    now = engine.connector.cache.statistics()
    return tuple(getattr(now, name) - getattr(before, name) for name in names)


def check_nothing_is_lost(engine):
    """Every block waits, nothing is deferred, and no sequence has read a wrong byte, nor do two more."""
    engine.run()
    run(engine, PROMPT, PROMPT)
    pool, scheduler = engine.manager.kv, engine.scheduler
    assert pool.num_free == pool.num_blocks and not scheduler.deferred_free_blocks
    assert scheduler._num_parked_remote_kv == 0 and not engine.connector.has_pending_work()
    assert engine.counts.wrong == 0 and engine.counts.compared > 0
    engine.connector.cache.check_valid()


class Mute:
    """Ranks whose reports do not come, until `speak`."""

    def __init__(self, engine, *ranks):
        self.ranks = [rank.connector for rank in (ranks or engine.ranks)]
        self.said = [rank.get_finished for rank in self.ranks]
        for rank in self.ranks:
            rank.get_finished = KVConnectorOutput

    def speak(self):
        for rank, said in zip(self.ranks, self.said, strict=True):
            rank.get_finished = said


class Troubled(MeddlingCopier):
    """Loads raise, before or after their bytes have moved, or damage the blocks they load, according to `trouble`."""

    trouble = None

    def copy(self, direction, copies):
        loads = direction is Direction.LOAD
        if loads and Troubled.trouble == "before":
            raise RuntimeError("this load fails before it begins")
        event = super().copy(direction, copies)
        if loads and Troubled.trouble == "after":
            raise RuntimeError("this load fails when it has ended")
        if loads and Troubled.trouble == "damage":
            part = self.copier._binding.groups[0].parts[0]
            part[list(copies[0].device_blocks)] ^= 1
        return event


def copy_with(monkeypatch, around):
    """Ranks made from now on copy with this class around their copier."""
    choose = worker.choose_copier

    def choose_and_wrap(*arguments, **options):
        choice = choose(*arguments, **options)
        return replace(choice, copier=around(choice.copier))

    monkeypatch.setattr(worker, "choose_copier", choose_and_wrap)


@pytest.fixture
def trouble(monkeypatch):
    """A function that sets the trouble of loads from now on."""
    copy_with(monkeypatch, Troubled)
    monkeypatch.setattr(Troubled, "trouble", None)
    return lambda kind: monkeypatch.setattr(Troubled, "trouble", kind)


def test_the_comparison_of_these_stories_sees_a_damaged_load(trouble):
    """The control of all that follow."""
    engine = engine_of()
    on_the_host_alone(engine)
    trouble("damage")
    run(engine, PROMPT)
    assert engine.counts.wrong > 0


# As they are written


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tests/test_dense_offload_connector.py", "test_dense_backend_rejects_unknown_role"),
        ("tests/test_lmcache_offload_connector.py", "test_unknown_kv_role_fails_fast"),
    ],
)
def test_roles_that_they_refuse_we_refuse(monkeypatch, file, name):
    ours = {
        **dict.fromkeys(("DenseOffloadConnector", "LMCacheOffloadConnector"), CPUPrefixCacheWorker),
        **dict.fromkeys(("DenseOffloadScheduler", "LMCacheOffloadConnectorScheduler"), CPUPrefixCacheScheduler),
    }
    helper = ["_config"] if "dense" in file else []
    settings = SimpleNamespace(build_lmcache_config=None)
    test = vars(their(file, name, *helper, offcfg=settings, **ours))[name]
    for arguments in cases(test).values():
        test(*[monkeypatch] * bool(helper), **arguments)


# Geometry


def test_a_block_has_the_tokens_of_atoms_hash_block():
    """test_dense_worker_resolves_virtual_dcp_block_size, test_lmcache_connector_maps_dcp_ranges_on_virtual_block_grid,
    test_chained_prefix_hashes_match_block_manager_with_dcp_hash_size"""
    for ranks in (1, 2):
        config = config_of(decode_context_parallel_size=ranks)
        assert geometry.block_tokens(config) == BlockManager(config).hash_block_size == 4 * ranks


# Loads


def test_a_prompt_that_the_host_has_is_loaded_from_where_the_device_ends():
    """test_aligned_large_hit_parks_and_emits_load_metadata,
    test_scheduler_consumer_role_only_emits_loads_without_save_deferral"""
    engine = engine_of()
    before = on_the_host_alone(engine)
    run(engine, PROMPT[:6])  # its first block is on the device again
    assert counted(engine, before, "chunks_loaded") == (1,)
    seq = load(engine)
    assert (seq.num_cached_tokens, seq.offload_load_start_tokens, seq.offload_loaded_tokens) == (4, 4, 16)
    engine.run()
    assert counted(engine, before, "chunks_loaded", "loads_failed") == (4, 0)
    check_nothing_is_lost(engine)


def test_a_load_has_ended_when_every_rank_has_reported_it():
    """test_dense_worker_exact_save_generations_do_not_form_cross_tp_quorum,
    test_tp_cross_generation_reports_do_not_clear_or_commit_until_matched: S5.27"""
    engine = engine_of(ranks=2)
    on_the_host_alone(engine)
    mute = Mute(engine, engine.ranks[1])
    seq = load(engine)
    for _ in range(5):
        engine.step()
    assert seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
    mute.speak()
    check_nothing_is_lost(engine)


# Ends count once


def test_completions_that_are_unknown_late_or_of_another_kind_change_nothing():
    """test_dense_stale_or_raw_save_completion_cannot_clear_exact_lifecycle,
    test_dense_stale_load_generation_does_not_clear_active_operation,
    test_raw_callbacks_cannot_retire_exact_active_operations,
    test_save_callbacks_clear_only_matching_operation_generation,
    test_worker_load_terminal_paths_report_exact_operation_once,
    test_offload_completion_processing_calls_load_terminal_once: S5.15"""
    engine = engine_of()
    on_the_host_alone(engine)
    mute = Mute(engine)
    seq = load(engine)
    ids = {*range(-1, 4), 10_000, LoadOperationId(seq.id, 0), SaveOperationId(seq.id, 0), str(seq.id), "ready blocks 1"}
    (current,) = engine.connector._loading
    heard = KVConnectorOutput(
        finished_saving={seq.id, SaveOperationId(seq.id, 0)},
        connector_completions={
            ConnectorCompletion(geometry.CHANNEL, id, ok) for id in ids - {current} for ok in (0 == 1, True)
        },
    )
    engine.scheduler._update_from_kv_xfer_finished(heard)
    assert seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS and engine.connector._loading[current].seq is seq
    others = {ConnectorCompletion("another connector", current, False)}
    kept = engine.connector.process_completions(KVConnectorOutput(connector_completions=set(others)))
    assert kept.connector_completions == others and not kept.failed_loading
    mute.speak()
    check_nothing_is_lost(engine)


def test_no_transfer_has_the_number_of_another():
    """test_dense_build_load_metadata_uses_increasing_exact_generations,
    test_dense_build_save_metadata_uses_increasing_exact_generations,
    test_save_nonce_is_never_reused_after_request_id_cleanup: S5.15"""
    engine = engine_of()
    seen = []
    send = engine._to_ranks
    engine._to_ranks = lambda meta: (seen.extend(each.id for each in meta.plan.transfers), send(meta))
    run(engine, PROMPT, *OTHERS, PROMPT, *OTHERS, PROMPT)
    assert len(seen) > 10 and seen == sorted(set(seen))
    check_nothing_is_lost(engine)


def test_a_request_with_the_id_of_an_earlier_one_has_a_life_of_its_own():
    """test_dense_reused_request_id_resets_save_frontier,
    test_save_tracker_resets_when_raw_req_id_gets_new_sequence_lifecycle,
    test_load_metadata_uses_scheduler_lifetime_generation_on_reused_req_id: S5.15"""
    engine = engine_of()
    run(engine, PROMPT, id=7)
    before = engine.connector.cache.statistics()
    run(engine, OTHERS[0], id=7)
    assert counted(engine, before, "chunks_stored") == (len(OTHERS[0]) // 4,)
    run(engine, *OTHERS[1:])
    run(engine, PROMPT, id=7)
    assert counted(engine, before, "chunks_loaded") == (4,)
    check_nothing_is_lost(engine)


# Blocks that a copy needs


@pytest.mark.parametrize("end", ["done", "failed"])
@pytest.mark.parametrize("when", ["while it is copied", "when it has ended", "when its request knows"])
def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_has_ended(trouble, when, end):
    """test_aborted_parked_load_defers_owned_resources_until_terminal,
    test_aborted_parked_load_consumes_already_queued_terminal,
    test_abort_cleans_load_whose_terminal_was_already_consumed: S5.23"""
    engine = engine_of()
    on_the_host_alone(engine)
    trouble("after" if end == "failed" else None)
    mute = Mute(engine)
    seq = load(engine)
    if when == "while it is copied":
        engine.abort(seq)
        engine.step()
        assert seq.block_table
        mute.speak()
    else:
        mute.speak()
        engine._poll()
        if when == "when its request knows":
            engine.scheduler._resolve_waiting_remote_kv(seq, [])
        engine.abort(seq)
    trouble(None)
    engine.run()
    assert engine.counts.finished["aborted"] == 1 and not seq.block_table
    check_nothing_is_lost(engine)


# Stores


def test_a_prompt_computed_in_pieces_is_stored_as_far_as_it_is_computed():
    """test_chunked_prefill_save_uses_computed_frontier_and_serializes_inflight,
    test_dense_producer_role_tracks_only_saves, test_worker_save_uses_lmcache_engine_store: S5.13"""
    engine = Engine(config_of(max_num_batched_tokens=8, kv_transfer_config=transfer_config(64, offload="eager")))
    sizes = []
    send = engine._to_ranks

    def note(meta):
        for transfer in meta.plan.transfers:
            blocks = [block for copy in transfer.copies for block in copy.device_blocks]
            assert all(engine.manager.kv.block(block).hash != -1 for block in blocks)  # a finished step computed them
            sizes.append(len(blocks))
        send(meta)

    engine._to_ranks = note
    run(engine, PROMPT)
    assert sum(sizes) == 4 and len(sizes) > 1
    check_nothing_is_lost(engine)


@dataclass
class Launched(Passed):
    """All passes up to this number."""

    number: int


@pytest.mark.parametrize("sees", ["what was launched before", "nothing"])
def test_a_store_waits_for_the_pass_that_wrote_its_blocks(monkeypatch, sees):
    """test_worker_save_waits_for_forward_event_before_store. Their dense layout has no such event: S5.16.
    The control is a copier that sees nothing of what was launched: its stores are torn"""
    launched = [0]
    written = {}
    torn = []

    class Ordered(MeddlingCopier):
        def here(self):
            return Launched(launched[0] if sees == "what was launched before" else 0)

        def submit(self, direction, copies, after):
            if direction is Direction.STORE:
                torn.extend(block for copy in copies for block in copy.device_blocks if written[block] > after.number)
            return super().submit(direction, copies, after)

    def compute(engine, seq, start, stop, *rest):
        written.update(dict.fromkeys(seq.block_table[start // 4 : -(-stop // 4)], launched[0]))
        return compute_as_it_is(engine, seq, start, stop, *rest)

    def forward(engine, batch, seqs):
        launched[0] += 1
        return forward_as_it_is(engine, batch, seqs)

    compute_as_it_is, forward_as_it_is = Engine._compute, Engine._forward
    monkeypatch.setattr(Engine, "_compute", compute)
    monkeypatch.setattr(Engine, "_forward", forward)
    copy_with(monkeypatch, Ordered)
    engine = engine_of()
    run(engine, PROMPT, *OTHERS)
    assert engine.connector.cache.statistics().chunks_stored > 30
    assert bool(torn) == (sees == "nothing")


# An idle engine


def test_an_idle_engine_goes_on_until_nothing_is_in_flight():
    """test_pending_work_tracks_undispatched_loads_and_unreported_saves,
    test_engine_core_dispatches_idle_lookup_unpin_metadata, test_idle_offload_dispatch_delivers_unpin_only_metadata,
    test_dispatch_skips_metadata_with_no_work_at_all: S5.22"""
    engine = engine_of()
    assert not engine.connector.has_pending_work()
    assert not connector_metadata_has_work(engine.connector.build_connector_meta())
    mute = Mute(engine)
    engine.add(PROMPT)
    while not engine.scheduler.is_finished():
        engine.step()
    assert engine.connector.has_pending_work() and not engine.is_idle
    mute.speak()
    engine.run()
    assert not engine.connector.has_pending_work()
    for _ in range(3):
        engine.idle()  # the end reaches the ranks; it would also go with the next steps
    assert not connector_metadata_has_work(engine.connector.build_connector_meta())


def test_counts_grow_and_a_load_counts_when_it_has_ended(trouble):
    """test_scheduler_offload_statistics_are_cumulative, test_request_cleanup_drops_abandoned_load_statistics"""
    engine = engine_of()
    before = on_the_host_alone(engine)
    mute = Mute(engine)
    seq = load(engine)
    assert counted(engine, before, "loading", "chunks_loaded") == (1, 0)
    engine.abort(seq)
    mute.speak()
    engine.run()
    run(engine, *OTHERS, PROMPT)
    assert counted(engine, before, "loading", "loads_failed") == (0, 0)
    assert counted(engine, before, "chunks_loaded")[0] >= 8
    check_nothing_is_lost(engine)
