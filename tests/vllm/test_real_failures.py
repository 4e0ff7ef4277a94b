"""Copies that fail, and copies that never end: everybody is answered right, nothing is tried for ever.

vLLM learns which requests' loads have failed, and computes them, from the device's prefix. The control of these prompts
is in test_real_hits.py.
"""

from contextlib import contextmanager
from unittest.mock import patch

import pytest

import connector.vllm.worker as worker_module
from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.prefix_cache import FAILURES_IN_A_ROW
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, differences

PROMPT = PROMPTS[0]
LOAD, STORE = Direction.LOAD, Direction.STORE
ALL = BLOCKS * BLOCK
NOT_STORED = dict(extra_args=dict(kv_transfer_params={"cpu_prefix_cache_store": False}))


on_two_models = pytest.mark.parametrize("model", ["llama", "gemma3"])
both_schedulers = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


@contextmanager
def engine_with(folder, asynchronous=False, prompts=PROMPTS, blocks=200, **options):
    """An engine that has the prompts on the host, and nothing on the device."""
    policy = options.pop("load_failure_policy", "recompute")
    engine = dict(asynchronous=asynchronous, blocks=blocks, load_failure_policy=policy)
    with CachedEngine(folder, **dict(offload="eager", copies=Copies(), engine=engine) | options) as engine:
        engine.answer(prompts)
        engine.forget()
        yield engine


@pytest.fixture
def short_deadline():
    with patch.object(worker_module, "LOAD_SECONDS", 0.05):
        yield


# Loads that fail


@both_schedulers
@on_two_models
def test_a_load_that_fails_is_computed_and_stored_anew(model, asynchronous):  # S7.24
    with engine_with(folder_of(model), asynchronous) as engine:
        with engine.copies.failing(LOAD):
            answers = engine.answer(PROMPTS[:2])
            assert engine.copies.count(LOAD) == 2, "a load was tried again"
        engine.forget()
        answers += engine.answer(PROMPTS[:2])
        engine.check_nothing_leaked()
        assert engine.statistics.loads_failed == 2
    assert max(differences(answers, expected_of(model)[:2] * 2)) <= TOLERANCE
    assert [answer.cached_tokens for answer in answers] == [0, 0, ALL, ALL]


@both_schedulers
@on_two_models
def test_chunks_that_could_not_be_loaded_are_withdrawn(model, asynchronous):
    with engine_with(folder_of(model), asynchronous) as engine:
        with engine.copies.failing(LOAD):
            name = engine.submit(PROMPT, **NOT_STORED)
            engine.step_until(lambda: name in engine.finished)
        assert [engine.on_host(prompt) for prompt in PROMPTS[:2]] == [0, ALL]
        engine.check_nothing_leaked()


def test_a_request_is_given_up_where_the_operator_wants_that():
    """vLLM's default policy. The next one with the same prompt is computed."""
    with engine_with(folder_of("llama"), load_failure_policy="fail") as engine:
        with engine.copies.failing(LOAD):
            name = engine.submit(PROMPT)
            engine.step_until(lambda: name in engine.finished)
        answers = engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert engine.finished[name] is None
    assert max(differences(answers, expected_of("llama")[:1])) <= TOLERANCE
    assert answers[0].cached_tokens == 0


@both_schedulers
def test_a_load_behind_what_the_device_has_is_computed_from_there(asynchronous):
    with engine_with(folder_of("llama"), asynchronous) as engine:
        engine.answer([PROMPT[: 4 * BLOCK + 1]])
        with engine.copies.failing(LOAD):
            answers = engine.answer([PROMPT])
        engine.check_nothing_leaked()
        assert engine.copies.count(LOAD) == 2  # the first went well
    assert max(differences(answers, expected_of("llama")[:1])) <= TOLERANCE
    assert answers[0].cached_tokens == 4 * BLOCK


def test_an_interrupted_copy_thread_goes_on():  # S7.45
    with engine_with(folder_of("llama")) as engine:
        with engine.copies.failing(LOAD, SystemExit):
            answers = engine.answer(PROMPTS[:1])
        answers += engine.answer(PROMPTS[1:2])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of("llama")[:2])) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0, ALL]


# Loads that never end


@both_schedulers
@on_two_models
def test_a_load_that_moves_for_ever_is_not_waited_for(short_deadline, model, asynchronous):
    """Its bytes come at the end, when the request has been answered: nobody else has its blocks until then."""
    others = PROMPTS[1:4]
    with engine_with(folder_of(model), asynchronous, PROMPTS[:1], blocks=76) as engine:
        with engine.copies.holding(LOAD):
            answers = engine.answer([PROMPT])
            assert engine.statistics.loading == 1
            for prompt in others:
                answers += engine.answer([prompt])
        engine.rest()
        answers += engine.answer(others)
        engine.check_nothing_leaked()
        assert engine.statistics.loads_failed == 1
    assert max(differences(answers, expected_of(model)[:4] + expected_of(model)[1:4])) <= TOLERANCE
    assert answers[0].cached_tokens == 0


@both_schedulers
@on_two_models
def test_loads_behind_one_that_is_stuck_never_begin(short_deadline, model, asynchronous):
    with engine_with(folder_of(model), asynchronous) as engine:
        with engine.copies.blocking(LOAD):
            answers = engine.answer(PROMPTS[:3])
            assert engine.statistics.loading == 1
        engine.rest()
        assert engine.copies.count(LOAD) == 1
        engine.forget()
        answers += engine.answer(PROMPTS[:3])  # the thread is well again
        engine.check_nothing_leaked()
        assert engine.statistics.loads_failed == 3
    assert max(differences(answers, expected_of(model)[:3] * 2)) <= TOLERANCE
    assert [answer.cached_tokens for answer in answers] == [0] * 3 + [ALL] * 3


def test_a_request_whose_load_is_late_can_be_aborted(short_deadline):
    expected = expected_of("llama")
    with engine_with(folder_of("llama")) as engine:
        with engine.copies.holding(LOAD):
            name = engine.submit(PROMPT, max_tokens=50)
            engine.step_until(lambda: engine.request(name).num_output_tokens)
            engine.abort(name)
        engine.check_nothing_leaked()
        assert max(differences(engine.answer(PROMPTS), expected)) <= TOLERANCE


def test_while_a_copy_is_with_the_copier_an_idle_engine_leaves_python_to_its_thread():
    """Most of a long load's time is spent there. An engine that steps as fast as it can slows it down many times."""
    with engine_with(folder_of("llama")) as engine:
        with engine.copies.blocking(LOAD):
            engine.submit(PROMPT)
            engine.step_until(lambda: LOAD in engine.copies.begun)
            is_busy = engine.connectors.worker.worker._worker.is_busy
        engine.rest()
        assert is_busy


# Loads that fail when they have been announced to vLLM as over


@pytest.mark.parametrize("computes_at_once", [True, False])
def test_a_load_that_fails_after_its_end_was_announced_to_vllm_stops_the_engine(computes_at_once):
    """Also if there is no room to compute what it was for, and many steps settle it and compute nothing."""
    with CachedEngine(folder_of("llama"), offload="eager", copies=Copies()) as engine:
        engine.answer(PROMPTS[:1])
        engine.forget()
        ((_, worker),) = engine.halves
        announces = patch.object(EarlyEnds, "ends_soon", lambda early, seconds: set(worker._waiting))
        with announces, engine.copies.failing(LOAD), engine.copies.blocking(LOAD):
            name = engine.submit(PROMPT)
            engine.step_until(lambda: worker._announced)
            if not computes_at_once:
                engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
            engine.copies.go_on()
            with pytest.raises(RuntimeError, match="it must stop, and be started again"):
                engine.step_until(lambda: name in engine.finished, seconds=5)


def test_no_end_is_announced_to_vllm_where_it_copies_blocks_itself():
    """It does so before it begins a step, so nothing could have it wait."""
    with engine_with(folder_of("gemma3")) as engine:
        ((_, worker),) = engine.halves
        with (
            patch.object(EarlyEnds, "ends_soon", lambda early, seconds: set(worker._waiting)),
            patch.object(EarlyEnds, "hold_compute", side_effect=AssertionError("vLLM was told")),
            engine.copies.holding(LOAD),
        ):
            name = engine.submit(PROMPT)
            engine.step_until(lambda: LOAD in engine.copies.begun)
            for _ in range(5):
                engine.step()
            assert engine.status(name) == "WAITING_FOR_REMOTE_KVS"
        engine.step_until(lambda: name in engine.finished)
        engine.check_nothing_leaked()
    assert max(differences([engine.finished[name]], expected_of("gemma3")[:1])) <= TOLERANCE


# Stores that fail


@both_schedulers
@on_two_models
def test_chunks_that_could_not_be_stored_are_stored_the_next_time(model, asynchronous):
    options = dict(asynchronous=asynchronous)
    with CachedEngine(folder_of(model), offload="eager", copies=Copies(), engine=options) as engine:
        with engine.copies.failing(STORE):
            answers = engine.answer([PROMPT])
            engine.rest()
        assert engine.on_host(PROMPT) == 0 and engine.statistics.stores_failed
        answers += engine.answer([PROMPT])
        engine.forget()
        answers += engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model)[:1] * 3)) <= TOLERANCE
    assert answers[2].loaded_tokens == ALL


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_one_store_that_fails_takes_those_behind_it_with_it(offload):
    """They hang below it. A request that is running mends the hole, and so does the lazy walk, as far as the device
    has not handed out the blocks meanwhile."""
    options = dict(step_tokens=2 * BLOCK)
    with CachedEngine(folder_of("llama"), offload=offload, copies=Copies(), engine=options) as engine:
        name = engine.submit(PROMPT)
        with engine.copies.failing(STORE):
            while STORE not in engine.copies.begun:
                engine.step() if name not in engine.finished else engine.flood(prompts=1, tokens=BLOCK)
        engine.flood()
        answers = [engine.finished.pop(name), *engine.answer(PROMPTS)]
        engine.check_nothing_leaked()
    assert max(differences(answers, [expected_of("llama")[0], *expected_of("llama")])) <= TOLERANCE
    assert answers[1].loaded_tokens >= (ALL if offload == "eager" else ALL // 2)


# Too many failures


def check_that_it_is_off(engine, expected, log):
    """It has logged it, once; it begins no copies any more, and all prompts are answered right."""
    message = f"{FAILURES_IN_A_ROW} copies have failed in a row: the host cache is off from now on"
    assert engine.cache.is_off and log.text.count(message) == 1
    engine.forget()
    begun = len(engine.copies.begun)
    answers = engine.answer(PROMPTS)
    engine.check_nothing_leaked()
    assert len(engine.copies.begun) == begun
    assert max(differences(answers, expected)) <= TOLERANCE
    assert [answer.cached_tokens for answer in answers] == [0] * 8


@both_schedulers
@on_two_models
def test_after_five_stores_that_failed_the_engine_serves_on_without(log, model, asynchronous):  # S7.45
    expected = expected_of(model)
    with engine_with(folder_of(model), asynchronous, prompts=[]) as engine:
        with engine.copies.failing(STORE):
            answers = [answer for prompt in PROMPTS for answer in engine.answer([prompt])]
        engine.rest()
        check_that_it_is_off(engine, expected, log)
    assert max(differences(answers, expected)) <= TOLERANCE


@both_schedulers
@on_two_models
def test_after_five_loads_that_failed_the_engine_serves_on_without(log, model, asynchronous):  # S7.45
    expected = expected_of(model)
    with engine_with(folder_of(model), asynchronous) as engine:
        with engine.copies.failing(LOAD):
            names = [engine.submit(prompt, **NOT_STORED) for prompt in PROMPTS]
            engine.rest()
        check_that_it_is_off(engine, expected, log)
    assert max(differences([engine.finished[name] for name in names], expected)) <= TOLERANCE


def test_loads_that_always_fail_turn_the_cache_off_though_stores_go_well(log):
    expected = expected_of("llama")
    with engine_with(folder_of("llama")) as engine:
        with engine.copies.failing(LOAD):
            for prompt in PROMPTS:
                engine.answer([prompt])
                engine.rest()
        check_that_it_is_off(engine, expected, log)
