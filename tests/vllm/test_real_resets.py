"""After a reset nothing from before is found, whatever was in flight; running requests are answered all the same.

vLLM resets its own cache first, and refuses while requests have blocks. If it refuses by returning False, ours is reset
all the same; if it raises (`reset_running_requests`), ours is not called. Blocks that only our copies use are no reason
to refuse, but for a sleep. A caller that needs both empty repeats the call until it returns True.
"""

from contextlib import contextmanager

import pytest
from vllm.v1.core.sched.interface import PauseState

from cpu_prefix_cache.deciding import Direction
from tests.vllm.models import MODELS
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, cold_answers, differences

PROMPT = PROMPTS[0]
LOAD, STORE = Direction.LOAD, Direction.STORE
ALL = BLOCKS * BLOCK


on_two_models = pytest.mark.parametrize("model", ["llama", "gemma3"])
both_schedulers = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


class ResettableEngine(CachedEngine):
    def __init__(self, folder, asynchronous=False, **options):
        engine = dict(asynchronous=asynchronous, step_tokens=128)
        super().__init__(folder, **dict(offload="eager", copies=Copies(), engine=engine) | options)

    def reset(self) -> bool:
        """One attempt, whatever is going on. Ours is empty after it in any case."""
        epoch = self.cache.epoch
        went_well = self.core.reset_prefix_cache(reset_connector=True)
        assert self.cache.epoch == epoch + 1
        assert self.statistics.pool.cached == 0
        assert [self.on_host(prompt) for prompt in PROMPTS] == [0] * 8
        return went_well

    def check_that_nothing_is_found(self, prompts) -> list:
        """Once the caller has repeated the reset at rest. What the prompts are answered."""
        self.rest()
        assert self.reset()
        answers = self.answer(prompts)
        assert [answer.cached_tokens for answer in answers] == [0] * len(prompts)
        self.check_nothing_leaked()
        return answers


@both_schedulers
@on_two_models
def test_a_reset_during_a_load(model, asynchronous):  # S7.40
    with ResettableEngine(folder_of(model), asynchronous) as engine:
        engine.answer([PROMPT])
        engine.forget()
        with engine.copies.holding(LOAD):
            name = engine.submit(PROMPT)
            engine.step_until(lambda: LOAD in engine.copies.begun)
            assert not engine.reset()
            engine.step()
        engine.rest()
        answers = [engine.finished.pop(name), *engine.check_that_nothing_is_found([PROMPT])]
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE


@both_schedulers
def test_a_reset_before_a_load_has_begun(asynchronous):  # S7.41
    """The first of two loads is in the copier; the second waits for it, is called back, and is not waited for."""
    with ResettableEngine(folder_of("llama"), asynchronous) as engine:
        engine.answer(PROMPTS[:2])
        engine.forget()
        with engine.copies.blocking(LOAD):
            names = [engine.submit(prompt) for prompt in PROMPTS[:2]]
            engine.step_until(lambda: engine.statistics.loading == 2)
            engine.step_until(lambda: engine.copies.begun.count(LOAD) == 1)
            assert not engine.reset()
            engine.step()
        engine.rest()
        assert engine.copies.begun.count(LOAD) == 1
        answers = [engine.finished.pop(name) for name in names]
        answers += engine.check_that_nothing_is_found(PROMPTS[:2])
    assert max(differences(answers, expected_of("llama")[:2] * 2)) <= TOLERANCE


@both_schedulers
@on_two_models
def test_a_reset_during_a_store(model, asynchronous):  # S7.40
    with ResettableEngine(folder_of(model), asynchronous) as engine:
        with engine.copies.holding(STORE):
            answers = engine.answer([PROMPT])
            assert engine.statistics.storing
            assert not engine.reset()
        answers += engine.check_that_nothing_is_found([PROMPT])
        assert engine.on_host(PROMPT) == ALL  # it is stored anew
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE


@both_schedulers
@pytest.mark.parametrize("offload", ["lazy", "eager"])
@on_two_models
def test_requests_running_at_a_reset_are_answered_and_not_stored(model, offload, asynchronous):
    """It goes on from what was computed before, so none of it may be found afterwards (rule 13)."""
    with ResettableEngine(folder_of(model), asynchronous, offload=offload) as engine:
        names = [engine.submit(prompt) for prompt in PROMPTS[:3]]
        engine.step_until(lambda: engine.request(names[1]).num_computed_tokens > 0)
        assert not engine.reset()
        engine.rest()
        answers = [engine.finished.pop(name) for name in names]
        assert engine.on_host(PROMPTS[0]) == engine.on_host(PROMPTS[1]) == 0
        answers += engine.check_that_nothing_is_found(PROMPTS[:3])
    assert max(differences(answers, expected_of(model)[:3] * 2)) <= TOLERANCE


@both_schedulers
@on_two_models
def test_a_reset_that_preempts_what_is_running(model, asynchronous):
    """They begin anew, after the reset, and what they compute then is kept."""
    with ResettableEngine(folder_of(model), asynchronous, offload="lazy") as engine:
        names = [engine.submit(prompt) for prompt in PROMPTS[:2]]
        engine.step_until(lambda: engine.request(names[1]).num_computed_tokens > 0)
        engine.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        engine.step_until(lambda: not engine.core.batch_queue)
        assert len(engine.scheduler.running) == 2
        assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.core.resume_scheduler()
        engine.rest()
        answers = [engine.finished.pop(name) for name in names]
        engine.flood()
        assert [engine.on_host(prompt) for prompt in PROMPTS[:2]] == [ALL] * 2
        answers += engine.answer(PROMPTS[:2])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model)[:2] * 2)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers[2:]] == [ALL] * 2


def test_a_caller_repeats_a_reset_until_nothing_is_in_the_way():
    with ResettableEngine(folder_of("llama")) as engine:
        engine.answer(PROMPTS[:2])
        engine.forget()
        for prompt in PROMPTS[:4]:
            engine.submit(prompt)
        engine.step()
        attempts = 1
        while not engine.reset():
            engine.step()
            attempts += 1
        assert 1 < attempts < 100
        engine.check_nothing_leaked()


# Asleep, and with other weights


@on_two_models
def test_chunks_from_before_a_sleep_are_gone_after_it(model):  # S7.43
    """The CPU has nothing to put to sleep. The scheduler's part of it is a reset of both caches."""
    with ResettableEngine(folder_of(model)) as engine:
        engine.answer([PROMPT])
        engine.rest()
        engine.llm.sleep(level=1)
        assert engine.cache.epoch == 1
        assert engine.llm.wake_up()
        answers = engine.answer([PROMPT])
        assert answers[0].cached_tokens == 0
        engine.forget()
        answers += engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE
    assert answers[1].loaded_tokens == ALL


@pytest.mark.parametrize("mode", ["with_device", "with_connector", "never"])
def test_a_sleep_is_refused_while_blocks_are_lent_and_can_be_repeated(mode):
    """In one process vLLM would take the memory from under the copy. Where its engine has its own, it waits before
    until there are no transfers.
    """
    with ResettableEngine(folder_of("llama"), reset=mode) as engine:
        with engine.copies.holding(STORE):
            engine.answer([PROMPT])
            with pytest.raises(RuntimeError, match="Failed to reset the KV connector cache"):
                engine.llm.sleep(level=1)
            assert engine.statistics.storing
            assert not engine.cached(PROMPT), "the device is empty already"
        engine.rest()
        assert engine.on_host(PROMPT) == (ALL if mode == "never" else 0)
        engine.llm.sleep(level=1)
        assert engine.llm.wake_up()
        answers = engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of("llama")[:1])) <= TOLERANCE
    assert answers[0].cached_tokens == (ALL if mode == "never" else 0)


def load_weights(engine, folder) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(folder)))


@on_two_models
def test_with_new_weights_nothing_of_the_old_ones_is_found(tmp_path, model):
    """Also not what is being stored meanwhile. The control: who resets the device alone gets wrong answers."""
    new = MODELS[model](tmp_path, seed=1)
    expected = cold_answers(new, PROMPTS)
    with ResettableEngine(folder_of(model)) as engine:
        with engine.copies.holding(STORE):
            engine.answer(PROMPTS[:4])
            load_weights(engine, new)
            assert not engine.reset()
        answers = engine.check_that_nothing_is_found(PROMPTS)
        engine.forget()
        answers += engine.answer(PROMPTS)
    assert max(differences(answers, expected * 2)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers[8:]] == [ALL] * 8
    with ResettableEngine(folder_of(model)) as engine:
        engine.answer(PROMPTS)
        engine.forget(host=False)
        load_weights(engine, new)
        stale = engine.answer(PROMPTS)
    assert [answer.loaded_tokens for answer in stale] == [ALL] * 8
    assert sum(difference > TOLERANCE for difference in differences(stale, expected)) >= 7


@both_schedulers
@pytest.mark.parametrize("offload", ["lazy", "eager"])
@on_two_models
def test_a_trainer_resets_vllm_alone_and_gets_answers_of_the_new_weights(tmp_path, model, offload, asynchronous):
    """As trainers call it. The control is above: a host that vLLM's reset leaves as it is."""
    new = MODELS[model](tmp_path, seed=1)
    expected = cold_answers(new, PROMPTS)
    engine_options = dict(asynchronous=asynchronous, step_tokens=128)
    with CachedEngine(folder_of(model), offload=offload, reset="with_device", engine=engine_options) as engine:
        engine.answer(PROMPTS)
        engine.flood()
        assert engine.on_host(PROMPT) == ALL
        load_weights(engine, new)
        assert engine.core.reset_prefix_cache()
        answers = engine.answer(PROMPTS)
        engine.rest()
        assert engine.core.reset_prefix_cache(reset_connector=True)
        assert (engine.cache.epoch, engine.on_host(PROMPT)) == (2, 0), "one reset of ours for each of vLLM's"
        engine.step()
        assert engine.cache.epoch == 2
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected * 2)) <= TOLERANCE


@contextmanager
def trained_during_a_store(model, new, *, resets, offload="eager", asynchronous=False):
    """An engine that has got weights of `new` while stores held blocks of its device, and the first answer after it."""
    with ResettableEngine(folder_of(model), asynchronous, offload=offload, reset="with_device") as engine:
        engine.answer(PROMPTS[:6])
        engine.rest()
        with engine.copies.holding(STORE):
            engine.answer(PROMPTS[6:])
            engine.step_until(lambda: engine.statistics.storing and not engine.scheduler.requests)
            load_weights(engine, new)
            assert engine.core.reset_prefix_cache() if resets else True
            first = engine.answer([PROMPT])
        engine.rest()
        yield engine, first


@both_schedulers
@pytest.mark.parametrize(("model", "offload"), [("llama", "eager"), ("gemma3", "eager"), ("gemma3", "lazy")])
def test_a_trainer_need_not_check_for_stores_in_flight(tmp_path, model, offload, asynchronous):
    """vLLM resets its own cache as it would without us, and what was read of it then is found by nobody.

    Lazy stores nothing of llama while nobody runs.
    """
    new = MODELS[model](tmp_path, seed=1)
    expected = cold_answers(new, PROMPTS)
    how = dict(resets=True, offload=offload, asynchronous=asynchronous)
    with trained_during_a_store(model, new, **how) as (engine, answers):
        answers += engine.answer(PROMPTS)
        engine.flood()
        answers += engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected[:1] + expected + expected[:1])) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 9 + [ALL]
    assert not answers[0].cached_tokens


@on_two_models
def test_a_trainer_who_does_not_reset_gets_answers_of_the_old_weights(tmp_path, model):
    """The control."""
    new = MODELS[model](tmp_path, seed=1)
    expected = cold_answers(new, PROMPTS)
    with trained_during_a_store(model, new, resets=False) as (engine, answers):
        answers += engine.answer(PROMPTS)
    assert sum(difference > TOLERANCE for difference in differences(answers, expected[:1] + expected)) >= 4


@on_two_models
def test_a_host_that_is_never_emptied_is_there_after_a_sleep(model):
    """With the same weights, as a sleep at level 1 brings them back."""
    with CachedEngine(folder_of(model), offload="eager", reset="never") as engine:
        engine.answer([PROMPT])
        engine.rest()
        engine.llm.sleep(level=1)
        assert engine.llm.wake_up()
        answers = engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert answers[0].loaded_tokens == answers[0].cached_tokens == ALL
    assert max(differences(answers, expected_of(model)[:1])) <= TOLERANCE


def test_a_reset_that_preempts_what_runs_empties_the_host_too():
    """A request that ran before it has KV of before it, and stores nothing of that."""
    with CachedEngine(folder_of("llama"), offload="eager", reset="with_device") as engine:
        engine.answer(PROMPTS[:1])
        names = [engine.submit(prompt, max_tokens=40) for prompt in PROMPTS[:2]]
        engine.step_until(lambda: engine.request(names[1]).num_output_tokens > 2 and not engine.statistics.storing)
        assert engine.core.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        assert (engine.cache.epoch, engine.on_host(PROMPT)) == (1, 0)
        engine.rest()
        answers = [engine.finished.pop(name) for name in names]
        assert [answer.loaded_tokens for answer in answers] == [0, 0]
        assert engine.on_host(PROMPT) == ALL
        engine.check_nothing_leaked()
