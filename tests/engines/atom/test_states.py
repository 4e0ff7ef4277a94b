"""Models that keep a state in a slot of each request: stored from where ATOM keeps it, loaded to where ATOM resumes.

ATOM keeps a state every 16 tokens here, in three blocks.
"""

import os
from types import SimpleNamespace

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.model_engine.scheduler import Scheduler
from atom.model_engine.state_runtime import StateRuntime, StateTransfer

from connector.atom import geometry
from connector.atom.states import States
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing import CorruptingCopier, LateCopier
from tests.engines.atom import mends
from tests.engines.atom.engine import serve, transfer_config
from tests.engines.atom.simulation import CONTROL, simulate
from tests.engines.atom.state_engine import LAYOUT, StateEngine, spec_of, state_config
from tests.engines.atom.state_simulation import STATE_VARIANTS, StateSimulation
from tests.support.troubled_copiers import COPIERS, FailingLoads

REQUESTS, SEEDS = int(os.environ.get("ATOM_REQUESTS", "100")), int(os.environ.get("ATOM_SEEDS", "1"))
PROMPT = list(range(100, 140))  # ten blocks; ATOM keeps a state after 32 tokens
PAGES, STATES = 0, 1  # groups on the ranks

pytestmark = pytest.mark.usefixtures("quiet")


def engine_of(offload="eager", device_blocks=24, ranks=1, defers=False, **options):
    transfer = transfer_config(256, ranks, offload=offload, **options)
    config = state_config(kv_transfer_config=transfer, num_kvcache_blocks=device_blocks, tp_world_size=ranks)
    return StateEngine(config, defers)


def evict(engine):
    """A prompt that takes the whole device."""
    blocks = engine.config.num_kvcache_blocks
    serve(engine, range(500, 500 + 4 * blocks - 8))
    assert engine.connector._requests.device.find(keys(engine, PROMPT)[7]) is None


def evicted(**options):
    """An engine of which the host alone has the prompt."""
    engine = engine_of(**options)
    serve(engine, PROMPT)
    evict(engine)
    return engine


def serve_with_a_state_halfway(engine):
    """The device has the prompt and its state after 16 tokens, and not that after 32."""
    serve(engine, PROMPT)
    serve(engine, [*PROMPT[:16], *range(700, 703)])
    deepest = engine.connector._requests.device.block(keys(engine, PROMPT)[7])
    engine.manager.paged_state_checkpoints.store.unindex(engine.manager.kv.block(deepest).hash)


def keys(engine, tokens):
    return engine.connector._requests._hasher.keys(tokens)


def statistics(engine):
    return engine.connector.cache.statistics()


def check_at_rest(engine):
    """Only states that ATOM may evict are left, and nothing wrong was read."""
    manager, store = engine.manager, engine.manager.paged_state_checkpoints.store
    manager.complete_previous_state_batch()  # as the next step begins
    assert engine.is_idle and engine.counts.wrong == engine.wrong_states == 0
    assert manager.kv.num_used == len(engine.kept_units) == len(manager.kv._raw_unit_owner)
    assert not any(record.pin_count for record in store.records.values())
    assert len({record.prefix_hash for record in store.records.values()}) == len(store.records), "a state twice"
    assert {manager.kv.block(unit).ref_count for unit in engine.kept_units} <= {1}
    assert not store._queued_restores and manager.state.num_free() == manager.num_per_req_cache_groups
    assert not engine.connector._states._loading and not engine.connector._live
    engine.connector.cache.check_valid()


# There and back


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("defers", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_a_prompt_resumes_at_a_state_from_the_host(offload, defers, ranks):
    engine = engine_of(offload, defers=defers, ranks=ranks)
    first = serve(engine, PROMPT, 3)
    evict(engine)
    second = serve(engine, PROMPT, 3)
    assert engine.outputs[first.id] == engine.outputs[second.id]
    assert second.prefix_cache_hit_tokens == 32 and engine.restored == 1
    assert statistics(engine).chunks_loaded == 8
    check_at_rest(engine)


@pytest.mark.parametrize("group", [PAGES, STATES])
def test_a_damaged_load_is_seen(copies, group):
    """The control: what is read of the slot comes from the units of the load, and nothing else does."""
    copies(lambda copier, tensors: CorruptingCopier(copier, tensors, group=group))
    engine = engine_of()
    serve(engine, PROMPT, 3)
    evict(engine)
    serve(engine, PROMPT, 3)
    assert (engine.counts.wrong > 0, engine.wrong_states > 0) == (group == PAGES, group == STATES)


def test_a_loaded_state_is_on_the_device_for_others():
    engine = evicted()
    serve(engine, PROMPT)
    again = serve(engine, [*PROMPT, 5])
    assert statistics(engine).chunks_loaded == 8 and again.prefix_cache_hit_tokens == 32
    assert engine.restored == 2
    check_at_rest(engine)


def test_stored_chunks_are_not_stored_again():
    """S5.13: neither the prompt, nor what was loaded."""
    engine, prompt = engine_of(), PROMPT[:34]
    serve(engine, prompt)
    evict(engine)
    before = statistics(engine)
    for _ in range(2):
        serve(engine, prompt)
    after = statistics(engine)
    assert (after.chunks_stored, after.checkpoints_stored) == (before.chunks_stored, before.checkpoints_stored)
    check_at_rest(engine)


def test_a_state_that_is_being_kept_when_its_request_ends_is_stored():
    """The last step of the request carries the copy of the state at the end of its prompt."""
    engine = engine_of()
    serve(engine, PROMPT[:32], 2)
    evict(engine)
    assert serve(engine, PROMPT).prefix_cache_hit_tokens == 32
    check_at_rest(engine)


def test_a_state_that_somebody_missed_is_stored():
    """ATOM keeps a state where a second prompt leaves the first, which is between the boundaries of its interval."""
    engine = engine_of()
    serve(engine, PROMPT)
    shared = PROMPT[:24]
    serve(engine, [*shared, *range(700, 704)])
    evict(engine)
    third = serve(engine, [*shared, *range(800, 804)])
    assert third.prefix_cache_hit_tokens == 24
    check_at_rest(engine)


def test_a_load_goes_on_from_a_state_on_the_device(copies):
    """The state at the beginning of the load is restored first, and is not in the way of the one that is loaded."""
    engine = engine_of(device_blocks=40)
    serve_with_a_state_halfway(engine)
    again = serve(engine, PROMPT)
    assert statistics(engine).chunks_loaded == 4 and again.prefix_cache_hit_tokens == 32
    check_at_rest(engine)


def test_two_requests_load_the_same_prefix():
    engine = evicted(device_blocks=40)
    both = [engine.add([*PROMPT, each], 2) for each in (1, 2)]
    engine.run()
    assert [seq.prefix_cache_hit_tokens for seq in both] == [32, 32]
    assert engine.restored == 2
    check_at_rest(engine)


def test_a_state_waits_until_atom_has_taken_in_its_prefix():
    """The load ends while a long prompt takes all tokens of each step. Before ATOM goes on with the request, the blocks
    have no hash, and others would not find the state.
    """
    engine = evicted(device_blocks=60)
    seq, long = engine.add(PROMPT, 2), engine.add(range(1000, 1150))
    for _ in range(2):
        engine.step()
    assert long.is_partial_prefill and engine.manager.kv.block(seq.block_table[7]).hash == -1
    assert engine.connector._states._loaded
    engine.run()
    assert seq.prefix_cache_hit_tokens == 32
    serve(engine, [*PROMPT, 6])
    assert statistics(engine).chunks_loaded == 8
    check_at_rest(engine)


# Failures


def test_a_load_that_fails_is_computed_and_stored_anew(copies):
    """test_stateful_load_failure_evicts_committed_boundary_idempotently."""
    copies(FailingLoads)
    engine = engine_of()
    first = serve(engine, PROMPT, 3)
    evict(engine)
    before = statistics(engine)
    second = serve(engine, PROMPT, 3)
    after = statistics(engine)
    assert engine.outputs[first.id] == engine.outputs[second.id]
    assert after.loads_failed == 1 and engine.restored == 0
    assert after.chunks_stored - before.chunks_stored == 10
    assert after.checkpoints_stored - before.checkpoints_stored == 1
    check_at_rest(engine)


def test_a_load_that_fails_leaves_the_state_where_it_began(copies):
    copies(FailingLoads)
    engine = engine_of(device_blocks=40)
    serve_with_a_state_halfway(engine)
    again = serve(engine, PROMPT)
    assert statistics(engine).loads_failed == 1 and again.prefix_cache_hit_tokens == 16
    check_at_rest(engine)


@pytest.mark.parametrize("steps", range(1, 9))
def test_an_abort_leaves_nothing_behind(copies, steps):
    """S5.23: while its state is loaded, when it has ended, when it is restored, and later."""
    copies(COPIERS["late"])
    engine = evicted()
    seq = engine.add(PROMPT, 4)
    for _ in range(steps):
        engine.step()
    engine.abort(seq)
    engine.run()
    check_at_rest(engine)
    again = serve(engine, PROMPT)
    assert again.prefix_cache_hit_tokens == 32
    check_at_rest(engine)


def test_without_room_for_its_state_a_prompt_is_computed():
    engine = engine_of(device_blocks=12)
    serve(engine, PROMPT)
    serve(engine, range(500, 540))
    again = serve(engine, PROMPT)  # ten of twelve blocks
    assert statistics(engine).loads_failed == statistics(engine).chunks_loaded == 0
    assert again.prefix_cache_hit_tokens == 0
    check_at_rest(engine)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_reset_ends_a_load(copies, steps):
    copies(COPIERS["late"])
    engine = evicted()
    mends.chunks_computed_from_before_a_reset_are_not_found(engine)
    seq = engine.add(PROMPT, 3)
    for _ in range(steps):
        engine.step()
    engine.change_weights()
    engine.run()
    assert seq.leave_reason == "max_tokens"
    check_at_rest(engine)
    assert serve(engine, PROMPT).prefix_cache_hit_tokens == 0
    evict(engine)
    assert serve(engine, PROMPT).prefix_cache_hit_tokens == 32
    check_at_rest(engine)


def test_a_state_whose_load_has_ended_at_a_reset_is_not_restored():
    """The request goes on from the state that it has got from the device, after 16 tokens."""
    engine = engine_of(device_blocks=40)
    mends.chunks_computed_from_before_a_reset_are_not_found(engine)
    serve_with_a_state_halfway(engine)
    seq = engine.add(PROMPT, 3)
    while not engine.connector._states._loaded:
        engine.step()
    engine.change_weights()
    engine.run()
    assert seq.leave_reason == "max_tokens" and seq.offload_load_start_tokens is None
    check_at_rest(engine)


def test_units_are_not_handed_out_while_they_are_stored(copies):
    """S5.15: ATOM drops the state with its prefix, and the store that reads it goes on."""
    late = []
    copies(lambda copier, tensors: late.append(LateCopier(copier)) or late[-1])
    engine = engine_of()
    seq = engine.add(PROMPT, 6)
    while not any(len(copy.device_blocks) and copy.group == STATES for each in waiting(late) for copy in each.copies):
        engine.step()
    units = set(engine.kept_units)
    engine.manager.clear_cache()
    assert units and all(engine.manager.kv.is_used(unit) for unit in units)
    engine.abort(seq)
    engine.run()
    check_at_rest(engine)


def waiting(copiers):
    return [each for copier in copiers for each in copier.waiting]


# Reports to the cache


def test_a_state_waits_with_the_block_at_its_boundary():
    engine = engine_of("lazy")
    serve(engine, PROMPT)
    device, chunks = engine.connector._requests.device, keys(engine, PROMPT)
    order = list(device.soonest_evicted())
    block, at = device.block(chunks[7]), checkpoint_key(chunks[7])
    chunk = order.index((block, chunks[7]))
    behind = [place for place in device.evicted_after(block) if place not in order[: chunk + 1]]
    assert behind == order[chunk + 1 :] and behind[0] == (block, at)
    assert (block, chunks[7]) in order and (block, at) in order
    assert device.is_waiting(block, at) and not device.is_waiting(block, checkpoint_key(chunks[6]))
    hold = device.hold([block, *engine.kept_units])
    assert not device.is_waiting(block, at) and (block, at) not in device.soonest_evicted()
    assert not engine.manager.paged_state_checkpoints.has_available_units(engine.manager.kv.num_free + 1)
    device.release(hold)
    assert list(device.soonest_evicted()) == order
    check_at_rest(engine)


def test_a_chunk_is_not_reported_before_its_state_is():
    """Otherwise the cache would look for the state once, before ATOM has it, and never again."""
    engine = engine_of()
    seq = engine.add(PROMPT, 6)
    engine.step()
    assert engine.manager.kv.block(seq.block_table[7]).hash != -1
    assert engine.connector._requests.confirm(seq) == 28
    engine.step()
    assert engine.connector._requests.confirm(seq) == 40
    engine.run()
    assert statistics(engine).checkpoints_stored == 1


@pytest.mark.parametrize("page", [4096, 100_000, 977 * 1024])
@pytest.mark.parametrize("in_pages", [False, True], ids=["", "in pages"])
def test_ranks_need_not_know_how_many_units_a_state_takes(page, in_pages):
    config = state_config()
    on_ranks = geometry.planner(config, (page, 9 * page), in_pages=in_pages)
    for units in (1, 2, 7, 40):
        planner = geometry.planner(config, (page, 9 * page), units, in_pages=in_pages)
        assert planner.host_block_bytes == on_ranks.host_block_bytes
        assert {each.host_blocks for each in planner.pieces} == {on_ranks.pieces[0].host_blocks}


def test_units_go_to_ranks_as_one_group():
    copies = (GroupCopy(0, (1, 2), (3, 4)), GroupCopy(1, (5,), (9,)), GroupCopy(2, (6,), (8,)))
    plan = StepPlan(0, (TransferPlan(3, Direction.LOAD, copies, 5), TransferPlan(4, Direction.STORE, copies[:1], 2)))
    first, second = geometry.for_ranks(plan).transfers
    assert first.copies == (copies[0], GroupCopy(1, (5, 6), (9, 8))) and second.copies == copies[:1]


# Refusals


def refused(match, runtime=None, **said):
    transfer = transfer_config(64)
    config = state_config(kv_transfer_config=transfer, **said)
    with pytest.raises(ConfigurationError, match=match):
        Scheduler(config, state_runtime=runtime or StateRuntime(StateTransfer.copy(LAYOUT), spec_of(config)))


def test_states_at_no_boundaries_are_refused():
    refused("give --state-checkpoint-interval-tokens, a multiple of 4", interval=0)


def test_states_that_are_not_copied_into_blocks_are_refused():
    """Qwen3-Next and Kimi-K3, if the ranks have not refused them before."""
    refused("does not copy it into blocks", runtime=StateRuntime(StateTransfer.fork(8)))


@pytest.mark.parametrize("registered", [(128,), (96, 400), (128, 392)])
def test_bytes_that_atom_counts_and_does_not_register_are_refused(registered):
    """DeepSeek-V4 with an index of FP4: its scales are in no block region."""
    engine = engine_of()
    states = States.of(engine.manager)
    states.check_bytes((128, 400))
    with pytest.raises(ConfigurationError, match=r"counts \(128, 400\) bytes"):
        states.check_bytes(registered)


def test_a_model_without_states_has_none():
    manager = SimpleNamespace(kv=None, paged_state_checkpoints=None, num_per_req_cache_groups=0, hash_block_size=4)
    states = States.of(manager)
    assert states.units == 0 and states.reserve(SimpleNamespace(id=1)) == []
    states.check_bytes((128,))


# Thousands of requests


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
@pytest.mark.parametrize("name", STATE_VARIANTS)
def test_requests_resume_at_the_states_of_their_own_prefixes(name, seed):
    outcome = simulate(STATE_VARIANTS[name], REQUESTS, seed, StateSimulation)
    assert outcome.wrong == outcome.unwritten == 0
    assert not outcome.leaks
    assert outcome.cache.chunks_loaded and outcome.cache.checkpoints_stored, "nothing was tested"
    assert sum(outcome.finished.values()) == REQUESTS


def test_states_that_are_loaded_are_compared(monkeypatch):
    """The control: every load damages its units, and nothing else."""
    corrupts = lambda copier, tensors: CorruptingCopier(copier, tensors, group=STATES, loads=None)  # noqa: E731
    monkeypatch.setitem(COPIERS, CONTROL.copies, corrupts)
    assert simulate(CONTROL, REQUESTS, kind=StateSimulation).wrong
