"""Stories of single requests in ATOM's real scheduler: what comes from the host, when, and what is left behind."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.kv_transfer.disaggregation.types import KVConnectorOutput

import connector.atom.worker
from connector.atom.scheduler import CPUPrefixCacheScheduler
from connector.atom.worker import CPUPrefixCacheWorker
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.copier.events import Stored
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import LateCopier, MeddlingCopier
from tests.engines.atom import mends
from tests.engines.atom.engine import EOS, POISON, Engine, config_of, serve, transfer_config
from tests.support.troubled_copiers import COPIERS, FailingLoads

PROMPT = list(range(100, 140))  # ten blocks
DEVICE = 16  # blocks


def engine_of(offload="eager", device_blocks=DEVICE, ranks=1, defers=False, **options):
    transfer = transfer_config(256, ranks, offload=offload, **options)
    config = config_of(kv_transfer_config=transfer, num_kvcache_blocks=device_blocks, tp_world_size=ranks)
    return Engine(config, defers=defers)


def evict(engine):
    """A prompt that takes the whole device, and is evicted by whatever comes next."""
    serve(engine, range(500, 500 + 4 * engine.config.num_kvcache_blocks - 4))


def evicted(**options):
    """An engine of which the host alone has the prompt."""
    engine = engine_of(**options)
    serve(engine, PROMPT)
    evict(engine)
    return engine


def statistics(engine):
    return engine.connector.cache.statistics()


def check_at_rest(engine):
    pool = engine.manager.kv
    assert engine.is_idle and pool.num_free == pool.num_blocks
    assert not engine.connector._live and not engine.connector._loading
    assert engine.counts.wrong == 0
    engine.connector.cache.check_valid()


@pytest.mark.parametrize("defers", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_a_prompt_comes_back_from_the_host(offload, defers):
    engine = engine_of(offload, defers=defers)
    first = serve(engine, PROMPT, 3)
    evict(engine)
    second = serve(engine, PROMPT, 3)
    assert engine.outputs[first.id] == engine.outputs[second.id]
    assert second.prefix_cache_hit_tokens == 36 and statistics(engine).hit_tokens >= 32
    check_at_rest(engine)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_a_damaged_load_is_seen(copies, offload):
    copies(COPIERS["corrupts"])
    engine = engine_of(offload)
    first = serve(engine, PROMPT, 3)
    evict(engine)
    serve(engine, PROMPT, 3)
    assert engine.counts.wrong > 0
    assert first.id in engine.outputs


@pytest.mark.parametrize("length", range(1, 42))
def test_every_length_of_prompt_is_loaded_up_to_its_last_block(length):
    """S5.6: at least one token is computed, and a prompt that ends with a block is loaded, too; S5.12: short ones.
    test_full_prompt_hit_is_clamped_before_load_spec, test_stateful_full_prompt_hit_uses_prior_aligned_sidecar,
    test_stateless_page_lookup_remains_unchanged. Theirs requests a token less, and the load of the dense layout fails.
    """
    engine = engine_of()
    serve(engine, [*PROMPT, 7, 8])
    evict(engine)
    seq = serve(engine, [*PROMPT, 7, 8][:length])
    assert seq.prefix_cache_hit_tokens == (length - 1) // 4 * 4
    assert statistics(engine).loads_failed == 0
    check_at_rest(engine)


def test_stored_chunks_are_not_stored_again():
    """S5.13, S5.14: neither by a second request, nor what was loaded, nor the beginning of the next turn.
    test_load_is_skipped_if_hbm_satisfies_after_allocation, test_worker_completes_noop_load_when_hbm_satisfies,
    test_loaded_prefix_is_not_saved_again_after_success, test_worker_load_uses_lmcache_engine_retrieve_and_marks_done.
    """
    engine = engine_of()
    serve(engine, PROMPT)
    assert statistics(engine).chunks_stored == 10
    serve(engine, PROMPT)
    assert statistics(engine).hit_tokens == 0  # the device has it
    evict(engine)
    before = statistics(engine).chunks_stored
    serve(engine, PROMPT)
    serve(engine, [*PROMPT, 1, 2, 3, 4])
    assert statistics(engine).chunks_stored == before + 1
    check_at_rest(engine)


def test_a_loaded_prefix_is_on_the_device_for_others():
    """S5.21."""
    engine = evicted()
    serve(engine, PROMPT)
    loaded = statistics(engine).chunks_loaded
    again = serve(engine, [*PROMPT, 5])
    assert statistics(engine).chunks_loaded == loaded
    assert again.prefix_cache_hit_tokens == 40
    check_at_rest(engine)


def test_a_failed_load_is_computed_into_the_same_blocks_and_stored_again(copies):
    """S5.14: what has failed is withdrawn and stored anew. S5.20: nothing of it is found before.
    test_dense_worker_load_failure_reports_exact_operation, test_dense_exact_load_failure_rolls_back_save_frontier,
    test_load_failure_allows_recomputed_hit_range_to_be_saved, test_worker_load_partial_retrieve_marks_failed,
    test_load_exception_is_reported_as_failed_recving, test_consume_failed_remote_kv_does_not_repeat_terminal_callback.
    """
    copies(partial(FailingLoads, times=1))
    engine = engine_of()
    first = serve(engine, PROMPT, 3)
    evict(engine)
    second = serve(engine, PROMPT, 3)
    assert statistics(engine).loads_failed == 1 and second.offload_load_failed
    evict(engine)
    third = serve(engine, PROMPT, 3)
    assert statistics(engine).loads_failed == 1 and third.prefix_cache_hit_tokens == 36
    assert engine.outputs[first.id] == engine.outputs[second.id] == engine.outputs[third.id]
    check_at_rest(engine)


def test_one_failed_rank_fails_the_load(copies):
    """S5.27, S5.30: and the request goes on only when the other rank, which is late, has ended too.
    test_aggregator_emits_failed_recving_if_any_worker_failed, test_aggregator_failure_overrides_late_success.
    """
    made = []

    def wrap(copier, tensors):
        made.append(FailingLoads(copier, tensors, times=1) if not made else LateCopier(copier))
        return made[-1]

    copies(wrap)
    engine = engine_of(ranks=2)
    serve(engine, PROMPT, 3)
    evict(engine)
    seq = engine.add(PROMPT, 3)
    while not engine.connector._loading:
        engine.step()
    while made[1].waiting:
        assert seq.num_cached_tokens == 4 and not engine.scheduler.failed_recving_kv_req_ids
        engine.step()
    engine.run()
    assert seq.offload_load_failed
    check_at_rest(engine)


def test_the_blocks_of_a_store_are_not_handed_out_before_it_has_ended(copies):
    """S5.17: the request that wrote them has ended long before. Theirs keeps the request; ours has references.
    test_save_inflight_defers_free_until_save_finishes, test_dense_active_load_defers_only_its_concrete_lifecycle,
    test_finished_saving_releases_deferred_free_with_string_req_id.
    """
    late = []
    copies(lambda copier, tensors: late.append(LateCopier(copier)) or late[-1])
    engine = engine_of()
    seq = engine.add(PROMPT)
    while seq.id in engine.sequences:
        engine.step()
    engine.step()
    assert late[0].waiting
    held = {block for waiting in late[0].waiting for block in waiting.copies[0].device_blocks}
    assert len(held) == 10 and all(engine.manager.kv.is_used(block) for block in held)
    other = engine.add(range(500, 530))
    engine.step()
    assert not other.block_table or not held & set(other.block_table)
    engine.run()
    check_at_rest(engine)


def parked(engine):
    """A request whose load is in flight."""
    serve(engine, PROMPT)
    evict(engine)
    seq = engine.add(PROMPT, 3)
    while not engine.connector._loading:
        engine.step()
    return seq


def loading(engine, seq):
    pass


def loaded(engine, seq):
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.step()


def decoding(engine, seq):
    while not seq.output_tokens:
        engine.step()


@pytest.mark.parametrize("when", [loading, loaded, decoding])
def test_a_request_is_aborted(copies, when):
    """S5.23: in each phase of a load. S5.24: its blocks are nobody else's until the load has ended."""
    copies(COPIERS["late"])
    engine = engine_of()
    seq = parked(engine)
    when(engine, seq)
    blocks = list(seq.block_table)
    engine.abort(seq)
    engine.step()
    if when is loading:
        assert all(engine.manager.kv.is_used(block) for block in blocks)
    engine.run()
    assert seq.leave_reason == "aborted"
    check_at_rest(engine)


def test_a_request_is_aborted_before_it_was_admitted():
    engine = engine_of()
    seq = engine.add(PROMPT)
    engine.abort(seq)
    engine.run()
    assert statistics(engine).running == 0
    check_at_rest(engine)


def test_a_request_is_preempted_and_what_it_computed_is_stored():
    engine = engine_of()
    seq = engine.add(PROMPT, 9)
    while len(seq.output_tokens) < 4:
        engine.step()
    engine.scheduler.running.remove(seq)
    engine.scheduler.preempt(seq)
    assert seq.id not in engine.connector._live
    engine.run()
    assert statistics(engine).chunks_stored == 12  # 49 tokens, the last of which was not computed
    check_at_rest(engine)


def test_a_late_load_is_reported_when_it_has_ended(copies, monkeypatch):
    """S5.24: ATOM computes into the blocks of a failed load, so that is not reported while they are written."""
    monkeypatch.setattr(connector.atom.worker, "LOAD_SECONDS", 0.0)
    late = []
    copies(lambda copier, tensors: late.append(LateCopier(copier)) or late[-1])
    engine = engine_of()
    parked(engine)
    (load,) = engine.connector._loading
    operations = {each.operation_id for each in engine.ranks[0].connector.get_finished().connector_completions}
    assert late[0].waiting and load not in operations
    assert engine.ranks[0].connector._worker.report().late == {load}
    engine.run()
    assert statistics(engine).loads_failed == 1
    check_at_rest(engine)


def test_reports_that_atom_drops_come_again(monkeypatch):
    """ATOM drops the reports of all ranks when one of them takes too long."""
    engine = engine_of(ranks=2)
    aggregate = engine.aggregator.aggregate
    dropped = []

    def sometimes(outputs):
        if len(dropped) % 3:
            dropped.append(outputs)
            return KVConnectorOutput()
        dropped.append(None)
        return aggregate(outputs)

    monkeypatch.setattr(engine.aggregator, "aggregate", sometimes)
    for _ in range(2):
        serve(engine, PROMPT)
        evict(engine)
    assert statistics(engine).chunks_loaded
    check_at_rest(engine)


def test_the_ranks_forget_what_is_resolved():
    engine = engine_of()
    serve(engine, PROMPT)
    engine.idle()
    engine.idle()
    assert not engine.ranks[0].connector.get_finished().connector_completions


def test_when_atom_clears_its_cache_ours_is_reset():
    engine = engine_of()
    serve(engine, PROMPT)
    engine.manager.clear_cache()
    seq = serve(engine, PROMPT)
    assert seq.prefix_cache_hit_tokens == 0 and statistics(engine).hit_tokens == 0
    check_at_rest(engine)


def prefilling(engine, seq):
    """Its prompt is computed in two steps, of which one has ended."""
    while not seq.num_cached_tokens:
        engine.step()


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("when", [prefilling, decoding], ids=["in its prompt", "in its answer"])
def test_blocks_of_a_request_running_at_a_reset_are_not_stored_after_it(offload, when):
    """ATOM leaves their hashes to its blocks. The same prompt, computed anew, has the same keys."""
    engine, prompt = engine_of(offload, device_blocks=64), list(range(100, 200))
    mends.chunks_computed_from_before_a_reset_are_not_found(engine)
    seq = engine.add(prompt, 20)
    when(engine, seq)
    engine.change_weights()
    fresh = [engine.add(prompt)]
    engine.run()
    fresh += [serve(engine, prompt + seq.output_tokens[:8])]
    evict(engine)
    fresh += [serve(engine, prompt), serve(engine, prompt + seq.output_tokens)]
    assert all(each.prefix_cache_hit_tokens >= 96 for each in fresh[2:])
    assert statistics(engine).chunks_loaded
    check_at_rest(engine)


def test_a_load_that_has_ended_at_a_reset_is_not_taken():
    """Its end was reported to ATOM, which has not gone on with the request: its blocks are from before the reset."""
    engine = engine_of(device_blocks=24)
    mends.chunks_computed_from_before_a_reset_are_not_found(engine)
    for tokens in (PROMPT, range(500, 588), range(700, 788)):  # not even the first block is left
        serve(engine, tokens)
    seq = engine.add(PROMPT, 3)
    loaded(engine, seq)
    engine.change_weights()
    engine.run()
    assert seq.leave_reason == "max_tokens"
    assert serve(engine, PROMPT).prefix_cache_hit_tokens == 0
    check_at_rest(engine)


@pytest.mark.parametrize("said", [{"cpu_prefix_cache_load": False}, {"cpu_prefix_cache_store": False}])
def test_a_request_may_opt_out(said):
    engine = engine_of()
    opts_out_of_stores = "cpu_prefix_cache_store" in said
    serve(engine, PROMPT, kv_transfer_params=said if opts_out_of_stores else None)
    assert statistics(engine).chunks_stored == (0 if opts_out_of_stores else 10)
    evict(engine)
    serve(engine, PROMPT, kv_transfer_params=said)
    assert statistics(engine).hit_tokens == 0
    check_at_rest(engine)


def test_a_request_with_images_is_not_cached():
    """S5.3: ATOM has the same tokens for all images."""
    engine = engine_of()
    serve(engine, PROMPT, multimodal_data={"pixels": 1})
    assert statistics(engine).chunks_stored == 0
    serve(engine, PROMPT)
    evict(engine)
    serve(engine, PROMPT, multimodal_data={"pixels": 1})
    assert statistics(engine).hit_tokens == 0
    check_at_rest(engine)


def test_a_request_with_images_from_before_there_is_a_cache_is_not_cached(monkeypatch):
    """It is in the first step, in which the ranks report. ATOM drops the images when it has computed them, and then the
    request is preempted.
    """
    with monkeypatch.context() as patch:
        patch.setattr(CPUPrefixCacheScheduler, "has_pending_work", lambda self: False)
        engine = engine_of()
    assert engine.connector.cache is None
    seq = engine.add(PROMPT[:20], 6, multimodal_data={"pixels": 1})
    while not seq.output_tokens:
        engine.step()
    assert engine.connector.cache is not None and seq.multimodal_data is None
    engine.scheduler.running.remove(seq)
    engine.scheduler.preempt(seq)
    engine.run()
    assert statistics(engine).chunks_stored == 0
    serve(engine, PROMPT)
    assert statistics(engine).chunks_stored == 10
    check_at_rest(engine)


def test_a_block_that_atom_publishes_too_early_is_not_stored():
    """Where tokens are deferred, ATOM may give a block of an answer its hash before the last token of it is computed:
    if a prefill comes between. The request ends then, so it will never be computed.
    """
    engine = engine_of(defers=True)
    seq = engine.add(PROMPT[:37], 9)
    while len(seq.output_tokens) < 3:  # two that are known, and one that stands in
        engine.step()
    engine.add(range(500, 504))
    engine.abort(seq)
    engine.step()
    assert seq.leave_reason == "aborted" and seq.num_tokens == 40
    engine.run()
    (early,) = [block for block in engine.manager.kv.blocks if block.token_ids == seq.token_ids[36:40]]
    assert (engine.ranks[0].planes[0][0][early.block_id] == POISON).any(), "ATOM does not publish too early any more"
    assert statistics(engine).chunks_stored == 9 + 1


def test_a_block_whose_token_changed_after_it_was_computed_is_not_stored():
    """Where tokens are deferred, ATOM computes what stands in for the last token of a preempted request like a real
    one, and then puts the real one in its place.
    """
    engine = engine_of(defers=True)
    seq = engine.add(PROMPT[:20], 9)
    while seq.num_tokens < 24:
        engine.step()
    assert seq.token_ids[23] == EOS
    engine.scheduler.running.remove(seq)
    engine.scheduler.preempt(seq)
    engine.run()
    assert seq.token_ids[23] != EOS and seq.num_tokens > 28
    evict(engine)
    engine.counts.wrong = 0  # what ATOM itself has read
    again = serve(engine, [*seq.token_ids[:28], 1])
    assert again.prefix_cache_hit_tokens == 20 and statistics(engine).chunks_loaded
    assert engine.counts.wrong == 0


def test_two_requests_with_a_prefix_load_a_copy_each(copies):
    """ATOM has given the second one its blocks before it could be made to wait for the first (rule 12)."""
    copies(COPIERS["late"])
    engine = evicted(device_blocks=24)
    seqs = [engine.add(PROMPT), engine.add(PROMPT)]
    engine.step()
    assert len(engine.connector._loading) == 2
    engine.run()
    assert [seq.prefix_cache_hit_tokens for seq in seqs] == [36, 36]
    check_at_rest(engine)


def test_a_short_hit_is_computed():
    """S5.11: a hit of `min_load_tokens` beyond the device's prefix is loaded, and one of a token less is not.
    test_load_is_skipped_if_aligned_hit_is_below_threshold,
    test_unaligned_handoff_skips_if_boundary_remainder_is_too_small.
    """
    for least, loaded in ((32, 8), (33, 0)):
        engine = engine_of(min_load_tokens=least)
        serve(engine, PROMPT)
        evict(engine)
        serve(engine, PROMPT)
        assert statistics(engine).chunks_loaded == loaded
        check_at_rest(engine)


def test_lazy_loses_hardly_anything_of_prompts_that_are_longer_than_a_step():
    """ATOM takes the blocks of a whole prompt at once, and computes it in many steps. Of some 3,000 blocks 20 are lost
    here, because ATOM looks up again when it has handed out the blocks, and a load saves nothing then; with whole
    prompts, where loads wait for each other, it was one. 737 where lazy counts with the tokens of a step alone.
    """
    transfer = transfer_config(6000, block_tokens=16, offload="lazy")
    sizes = dict(kv_cache_block_size=16, num_kvcache_blocks=512, max_num_batched_tokens=256, max_model_len=4096)
    engine, draw = Engine(config_of(kv_transfer_config=transfer, **sizes), defers=True), random.Random(1)
    prompts = [[draw.randrange(900) for _ in range(draw.randrange(200, 2000))] for _ in range(40)]
    left = 150
    while left or not engine.is_idle:
        if left and len(engine.sequences) < 4:
            left -= 1
            engine.add([*draw.choice(prompts), left], 8)
        engine.step()
    assert statistics(engine).lost_before_store < 30 and statistics(engine).chunks_stored > 2000
    check_at_rest(engine)


@pytest.mark.parametrize("defers", [False, True])
def test_chunks_that_left_the_device_are_loaded_behind_those_still_there(defers):
    transfer = transfer_config(6000, block_tokens=16, offload="lazy")
    sizes = dict(kv_cache_block_size=16, num_kvcache_blocks=512, max_num_batched_tokens=64, max_model_len=700)
    engine = Engine(config_of(kv_transfer_config=transfer, **sizes), defers=defers)
    shared = list(range(320))  # twenty blocks, which others keep on the device
    prompt = [*shared, *range(320, 641)]
    serve(engine, prompt)
    for first in range(1000, 1000 + 60 * 160, 160):  # ten blocks each, of 512
        serve(engine, [*shared, *range(first, first + 160)])
    hit_tokens = statistics(engine).hit_tokens
    again = serve(engine, prompt)
    assert again.prefix_cache_hit_tokens == 640, "something of it was computed again"
    assert statistics(engine).hit_tokens - hit_tokens == 320
    check_at_rest(engine)


def test_atom_shows_what_was_stored_and_loaded():
    engine = evicted()
    serve(engine, PROMPT)
    said = engine.connector.get_statistics()
    assert said["loaded_tokens"] == 32 and said["saved_tokens"] == 4 * statistics(engine).chunks_stored
    assert said["load_failures"] == said["loads_pending"] == said["saves_pending"] == said["unpinned_bytes"] == 0


def test_memory_that_a_rank_could_not_pin_is_reported(monkeypatch, caplog):
    """Two ranks of a GPU, whose driver pins nothing of the second one's memory."""
    made = []

    class Arena(connector.atom.worker.HostArena):
        def __init__(self, *said, **more):
            super().__init__(*said, **more)
            self.registration = SimpleNamespace(wait=lambda seconds: True, ready_bytes=self.blocks.nbytes)
            self.registration.num_bytes = 0 if made else self.blocks.nbytes
            self.registration.start = self._closing = lambda: None
            made.append(self)

    monkeypatch.setattr(connector.atom.worker, "HostArena", Arena)
    monkeypatch.setattr(connector.atom.worker, "rank_here", lambda config: len(made) - 1)
    with caplog.at_level("WARNING", "connector.atom"):
        engine = engine_of(ranks=2)
    num_bytes = made[1].blocks.nbytes
    assert engine.connector.get_statistics() == {"unpinned_bytes": num_bytes} | {
        **dict.fromkeys(("loaded_tokens", "load_failures", "saved_tokens", "loads_pending", "saves_pending"), 0)
    }
    assert f"rank 1 could not pin {num_bytes} bytes" in caplog.text
    serve(engine, PROMPT)
    assert statistics(engine).chunks_stored == 10


def test_without_the_block_pool_there_is_no_cache():
    engine = engine_of()
    unbound = CPUPrefixCacheScheduler(engine.config)
    output = KVConnectorOutput()
    engine.ranks[0].connector._told = None
    output.connector_completions |= engine.ranks[0].connector.get_finished().connector_completions
    with pytest.raises(MisuseError, match=r"call connector\.atom\.plugin\.register"):
        unbound.process_completions(output)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (dict(enable_prefix_caching=False), "start with prefix caching"),
        (dict(enable_rapidserve=True), "start without enable_rapidserve"),
        (dict(runner_qualname="atom.rollout.model_runner_ext.RLHFModelRunner"), "replaces weights and KV"),
    ],
)
def test_impossible_configurations_are_refused_in_the_engine_and_on_the_ranks(said, sentence):
    config = config_of(kv_transfer_config=transfer_config(9), **said)
    for half in (CPUPrefixCacheScheduler, CPUPrefixCacheWorker):
        with pytest.raises(ConfigurationError, match=sentence):
            half(config)


def test_kv_that_is_registered_a_second_time_is_refused():
    """ATOM does so when it wakes from sleep: the tensors are others, and hold nothing."""
    engine = engine_of()
    serve(engine, PROMPT)
    (rank,) = engine.ranks
    with pytest.raises(ConfigurationError, match=r"a second time, .*: start it again"):
        rank.connector.register_kv_caches(*rank.registered(), num_blocks=DEVICE)


def test_a_host_without_room_for_a_block_is_refused_on_the_rank():
    transfer = transfer_config(1)
    transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] -= 1
    with pytest.raises(ConfigurationError, match=r"a block of 4 tokens on all ranks, at least 128 bytes"):
        Engine(config_of(kv_transfer_config=transfer))


class Unfitting(MeddlingCopier):
    """Reports the first piece of each store as unfit."""

    def submit(self, direction, copies, after):
        event = super().submit(direction, copies, after)
        is_store = direction is Direction.STORE
        return Stored(event, event.reads, lambda: [copy.host_blocks[0] for copy in copies]) if is_store else event


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_stores_that_do_not_fit_do_not_turn_the_cache_off(copies, offload):
    """None of such a store is kept, and it is not copied again while its request goes on."""
    copies(lambda copier, tensors: Unfitting(copier))
    engine = engine_of(device_blocks=32, offload=offload)
    for at in range(8):
        serve(engine, range(100 * at, 100 * at + 60), 8)
    cache = engine.connector.cache
    assert cache.statistics().chunks_stored == 0 and cache.statistics().store_cancelled > 0
    assert not cache.is_off
    check_at_rest(engine)
