"""A fault of vLLM 0.32, without any load of ours: a hit that ends within a block copies what is not computed yet.

A prompt of 31 tokens ends its hits at token 28, within block 3 of attention; the state there has a block of its own.

    the first run        stops at 28 to keep the state
    it is preempted      and others take its blocks of attention, and not that state
    it resumes           with its answer it is longer, so the step does not stop at 28, and notes no state there
    the same prompt      in the same step: state 28 is old, so nothing shows that block 3 is being computed; it is
                         copied for the request before that
"""

import pytest

from tests.vllm.engine import Engine, full, state

PROMPT = list(range(31))
LONGER = 45  # tokens, with the answer so far


def resumed(tmp_path, monkeypatch, evicts=True):
    """An engine whose next step computes the prompt again, and what follows it. It loads nothing."""
    engine = Engine(
        tmp_path,
        groups=[full(block=8), state(block=8)],
        match_unit=4,
        retention=None,
        device_blocks=80,
        offload="eager",
    )
    monkeypatch.setattr(engine.half, "_may_load", lambda request: False)
    request = engine.requests[engine.submit(PROMPT, max_tokens=30)]
    while request.num_tokens < LONGER:
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    if evicts:
        engine.pool.evict_blocks({block for block, group in engine_blocks(engine) if group == 0})
    return engine


def engine_blocks(engine):
    """The cached blocks, and the group of each."""
    named = [block for block in engine.pool.blocks if block.block_hash is not None]
    return [(block.block_id, int.from_bytes(block.block_hash[-4:], "big")) for block in named]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="vLLM copies block 3 before it is computed")
def test_the_prompt_of_a_request_that_resumes_in_the_same_step_is_read_right(tmp_path, monkeypatch):
    engine = resumed(tmp_path, monkeypatch)
    engine.submit(PROMPT)
    engine.drain()


def test_control_a_step_later_it_is(tmp_path, monkeypatch):
    engine = resumed(tmp_path, monkeypatch)
    engine.step()
    engine.submit(PROMPT)
    engine.drain()
    assert engine.counts["blocks copied"] > 0


def test_control_with_blocks_that_are_computed_it_is(tmp_path, monkeypatch):
    engine = resumed(tmp_path, monkeypatch, evicts=False)
    engine.submit(PROMPT)
    engine.drain()
    assert engine.counts["blocks copied"] > 0
