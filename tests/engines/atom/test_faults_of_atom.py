"""Faults of ATOM's scheduler. Most are there without any connector, and `mends.py` mends them for the simulation.

When a test here fails, ATOM has mended one.
"""

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from connector.atom.requests import KnownRequests
from connector.atom.scheduler import CPUPrefixCacheScheduler
from cpu_prefix_cache import MisuseError
from tests.engines.atom import mends
from tests.engines.atom.engine import EOS, Engine, config_of, transfer_config

MENDED = pytest.mark.parametrize("is_mended", [False, True], ids=["as it is", "mended"])


def alone(defers=False, **said):
    return Engine(config_of(kv_transfer_config={}, **said), defers)


def preempt(engine, seq):
    engine.scheduler.running.remove(seq)
    engine.scheduler.preempt(seq)


@MENDED
def test_a_preempted_request_goes_on_over_unwritten_kv(is_mended):
    """68 tokens are computed again in steps of 64, the prompt has 60: after the first it is taken for complete."""
    engine = alone(enable_prefix_caching=False)
    if is_mended:
        mends.answers_of_preempted_requests_are_prompt(engine)
    seq = engine.add(range(60), 12)
    while len(seq.output_tokens) < 8:
        engine.step()
    preempt(engine, seq)
    engine.run()
    assert (engine.counts.wrong > 0) is not is_mended


@MENDED
def test_a_preempted_request_keeps_what_stands_in_for_its_last_token(is_mended):
    engine = alone(defers=True)
    if is_mended:
        mends.answers_of_preempted_requests_are_prompt(engine)
    engine.add(range(500, 510), 20)
    seq = engine.add(range(20), 9)
    while len(seq.output_tokens) < 4:
        engine.step()
    preempt(engine, seq)
    engine.scheduler.waiting.remove(seq)  # as if there was no room for it in the next two steps
    engine.step()
    engine.step()
    engine.scheduler.waiting.append(seq)
    engine.run()
    assert (EOS in seq.token_ids) is not is_mended


@MENDED
def test_a_block_has_its_hash_before_its_last_token_is_computed(is_mended):
    """A prefill of another request comes between the step that samples the token and the one that computes its KV."""
    engine = alone(defers=True)
    if is_mended:
        mends.hashes_of_answers_wait_for_a_token(engine)
    seq = engine.add(range(37), 9)
    while len(seq.output_tokens) < 3:
        engine.step()
    other = engine.add(range(500, 504))
    engine.abort(seq)
    engine.step()
    assert seq.leave_reason == "aborted" and seq.num_tokens == 40
    while other.id in engine.sequences:
        engine.step()
    engine.add([*seq.token_ids, 1, 2])
    engine.run()
    assert (engine.counts.wrong > 0) is not is_mended


@MENDED
def test_an_aborted_request_overwrites_the_end_of_its_prompt(is_mended):
    """The prompt is whole blocks and is computed in two steps; it is aborted before the second."""
    engine = alone(defers=True)
    if is_mended:
        mends.aborted_requests_compute_what_they_have(engine)
    seq = engine.add(range(68))
    engine.step()
    engine.abort(seq)
    engine.run()
    engine.add(range(69))
    engine.run()
    assert (engine.counts.wrong > 0) is not is_mended


@MENDED
def test_a_request_of_before_a_reset_gives_others_what_it_computes_after_it(is_mended):
    """The first blocks of its prompt are computed once more by the first that has the same, and those after them are
    found.
    """
    engine = alone()
    if is_mended:
        mends.chunks_computed_from_before_a_reset_are_not_found(engine)
    seq = engine.add(range(90))
    engine.step()
    assert seq.is_partial_prefill
    first = engine.add(range(64))
    engine.change_weights()
    engine.run()
    engine.add([*seq.token_ids, 1])
    engine.run()
    assert first.leave_reason == "max_tokens"
    assert (engine.counts.wrong > 0) is not is_mended


@MENDED
def test_an_aborted_request_keeps_its_blocks_while_it_is_not_the_head(is_mended, monkeypatch):
    """It waits for its load when it is aborted, and the head of the queue waits for its blocks: nothing moves any more.
    The connector mends this.
    """
    if not is_mended:
        monkeypatch.setattr(CPUPrefixCacheScheduler, "_free_aborted", lambda self: None)
    transfer = transfer_config(256, offload="eager")
    engine = Engine(config_of(kv_transfer_config=transfer, num_kvcache_blocks=16))
    for tokens in (range(40), range(500, 560)):  # the second evicts the first
        engine.add(tokens)
        engine.run()
    seq, head = engine.add(range(40)), engine.add(range(700, 760))
    while not seq.block_table:
        engine.step()
    engine.abort(seq)
    for _ in range(50):
        engine.step()
    assert list(engine.scheduler.waiting) == ([] if is_mended else [head, seq])
    assert len(seq.block_table) == (0 if is_mended else 10)
    engine.abort(head)
    engine.run()
    assert engine.manager.kv.num_free == 16 and engine.counts.wrong == 0
    assert head.leave_reason == ("max_tokens" if is_mended else "aborted")


def preempted_and_evicted():
    """A preempted request that has an answer to compute again, while the host has more than its prompt."""
    engine = Engine(config_of(kv_transfer_config=transfer_config(256, offload="eager"), num_kvcache_blocks=16))
    seq = engine.add(range(38), 12)
    while len(seq.output_tokens) < 7:
        engine.step()
    preempt(engine, seq)
    engine.scheduler.waiting.remove(seq)
    engine.add(range(500, 560))
    engine.run()
    engine.scheduler.waiting.append(seq)
    return engine


def test_after_a_load_a_prefill_ends_with_the_prompt(monkeypatch):
    """So such a request must not be loaded. Not mended."""
    monkeypatch.setattr(KnownRequests, "may_load", lambda self, seq: True)
    with pytest.raises(AssertionError, match="chunk must be positive: chunk=-6"):
        preempted_and_evicted().run()


def test_a_preempted_request_with_an_answer_is_not_loaded():
    engine = preempted_and_evicted()
    engine.run()
    assert engine.counts.wrong == 0 and engine.connector.cache.statistics().chunks_loaded == 0


def with_one_id(engine):
    """Two live requests, one of which has got the other's id."""
    first = engine.add(range(30), 6)
    engine.step()
    second = engine.add(range(100, 140), 8)
    engine.truths.pop(second.id)
    second.id = first.id
    return first, second


def test_one_of_two_live_requests_with_one_id_is_lost():
    engine = alone()
    both = with_one_id(engine)
    engine._forget = list  # by their ids, it would forget both
    for _ in range(200):
        engine.step()
    assert engine.scheduler.is_finished() and not all(seq.is_finished for seq in both)


def test_the_connector_refuses_a_second_live_request_with_one_id():
    engine = Engine(config_of(kv_transfer_config=transfer_config(200)))
    first, _ = with_one_id(engine)
    with pytest.raises(MisuseError, match=f"two live requests have the id {first.id}: give each an id of its own"):
        engine.run()
