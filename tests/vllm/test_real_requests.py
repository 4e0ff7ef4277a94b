"""Single requests: preempted, aborted, waiting for each other, with parameters of their own.

All answers are those of an engine without a connector. The control of these prompts is in test_real_hits.py.
"""

import threading
from contextlib import contextmanager
from unittest.mock import patch

import pytest

import connector.vllm.worker as worker_module
from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction
from tests.vllm.models import MODELS, save_long_llama, some_tokens
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, cold_answers, differences

PROMPT = PROMPTS[0]


def on_any(*models: str):
    return pytest.mark.parametrize("model", models or list(MODELS))


both_schedulers = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
LOADING = "WAITING_FOR_REMOTE_KVS"
LOAD, STORE = Direction.LOAD, Direction.STORE

both_offloads = pytest.mark.parametrize("offload", ["lazy", "eager"])

# Preempted


@both_schedulers
@both_offloads
@on_any("llama", "gemma3")
def test_preempted_requests_go_on_with_what_the_host_has(model, offload, asynchronous):  # S7.16, S7.25
    """Five requests begin, and what they decode does not fit: some lose their blocks and begin anew."""
    prompts = [prompt[: 4 * BLOCK - 5] for prompt in PROMPTS[:5]]
    expected = cold_answers(folder_of(model), prompts, max_tokens=40)
    blocks = {"llama": 25, "gemma3": 46}[model]
    engine = dict(blocks=blocks, step_tokens=128, asynchronous=asynchronous)
    with CachedEngine(folder_of(model), offload=offload, engine=engine) as engine:
        engine.end_copies_in_their_step()
        preempted = engine.count_preemptions()
        answers = engine.answer(prompts, max_tokens=40)
        engine.check_nothing_leaked()
        assert preempted
        assert engine.statistics.chunks_loaded > 0
    assert max(differences(answers, expected)) <= TOLERANCE


# Aborted


@contextmanager
def waiting(engine):
    yield engine.submit(PROMPT)


def stop_the_clock(engine, later=0.0):
    now = engine.half.clock() + later
    engine.half.clock = lambda: now


@contextmanager
def waiting_for_the_load_of_another(engine):
    stop_the_clock(engine)  # it does not wait too long
    with loading(engine):
        name = engine.submit(PROMPT)
        engine.step()
        assert engine.status(name) == "WAITING"
        yield name


@contextmanager
def loading(engine):
    with engine.copies.holding(LOAD):
        name, before = engine.submit(PROMPT), engine.copies.count(LOAD)
        engine.step_until(lambda: engine.copies.count(LOAD) > before)
        assert engine.status(name) == LOADING
        yield name


@contextmanager
def loaded_and_not_resumed(engine):
    name = engine.submit(PROMPT)
    engine.step_until(lambda: engine.scheduler.finished_recving_kv_req_ids)
    yield name


@contextmanager
def in_prefill(engine):
    name = engine.submit(PROMPTS[1])
    engine.step_until(lambda: 0 < engine.request(name).num_computed_tokens < len(PROMPTS[1]))
    yield name


@contextmanager
def decoding(engine):
    name = engine.submit(PROMPT, max_tokens=50)
    engine.step_until(lambda: engine.request(name).num_output_tokens > 3)
    yield name


@contextmanager
def decoding_and_being_stored(engine):
    with engine.copies.holding(STORE):
        name, before = engine.submit(PROMPTS[2], max_tokens=50), engine.copies.count(STORE)
        engine.step_until(lambda: engine.copies.count(STORE) > before)
        yield name


@contextmanager
def finished(engine):
    name = engine.submit(PROMPT)
    engine.step_until(lambda: name in engine.finished)
    engine.finished.clear()
    yield name


PHASES = (
    waiting,
    waiting_for_the_load_of_another,
    loading,
    loaded_and_not_resumed,
    in_prefill,
    decoding,
    decoding_and_being_stored,
    finished,
)


@both_schedulers
@on_any("llama", "gemma3")
def test_a_request_can_be_aborted_whatever_it_does(model, asynchronous):  # S7.11, S7.12, S7.22
    expected = expected_of(model)[:3]
    options = dict(step_tokens=72, asynchronous=asynchronous)
    with CachedEngine(folder_of(model), offload="eager", copies=Copies(), engine=options) as engine:
        for phase in PHASES:
            engine.answer([PROMPT])
            engine.forget()
            with phase(engine) as name:
                engine.abort(name)
            engine.rest()
            assert name not in engine.finished
            engine.check_nothing_leaked()
            assert max(differences(engine.answer(PROMPTS[:3]), expected)) <= TOLERANCE, phase.__name__
            engine.forget(host=True)
            engine.finished.clear()


@both_schedulers
@both_offloads
def test_a_request_can_be_aborted_when_it_has_been_preempted(offload, asynchronous):
    prompts = [prompt[: 4 * BLOCK - 5] for prompt in PROMPTS[:5]]
    expected = cold_answers(folder_of("llama"), prompts, max_tokens=10)
    options = dict(blocks=24, step_tokens=128, asynchronous=asynchronous)
    with CachedEngine(folder_of("llama"), offload=offload, engine=options) as engine:
        preempted = engine.count_preemptions()
        names = [engine.submit(prompt, max_tokens=10) for prompt in prompts]
        engine.step_until(lambda: preempted)
        loser = names.index(preempted[0].rsplit("-", 1)[0])
        assert engine.status(names[loser]) == "PREEMPTED"
        engine.abort(names[loser])
        engine.check_nothing_leaked()
    answers = [engine.finished[name] for name in names if name != names[loser]]
    assert max(differences(answers, expected[:loser] + expected[loser + 1 :])) <= TOLERANCE


@both_schedulers
def test_the_blocks_of_an_aborted_load_are_nobody_elses_until_its_bytes_have_come(  # S7.22, S7.13
    asynchronous,
):
    options = dict(blocks=60, asynchronous=asynchronous)
    with CachedEngine(folder_of("llama"), offload="eager", copies=Copies(), engine=options) as engine:
        engine.answer([PROMPT])
        engine.forget()
        with loading(engine) as name:
            engine.abort(name)
            computed = engine.answer(PROMPTS[1:4])
            assert engine.pool.get_num_free_blocks() == 59 - BLOCKS
        engine.rest()  # now the bytes of the load have come
        found = engine.answer(PROMPTS[1:4])
        engine.check_nothing_leaked()
    assert max(differences(computed + found, expected_of("llama")[1:4] * 2)) <= TOLERANCE
    assert [answer.cached_tokens - answer.loaded_tokens for answer in found] == [BLOCKS * BLOCK] * 3


@pytest.mark.parametrize(
    ("model", "interval"), [("llama", 0), ("qwen3", 0), pytest.param("gemma3", 256, id="gemma3, every 256 tokens")]
)
def test_chunks_of_an_aborted_request_are_kept_but_for_its_last_step(model, interval):
    """With windows, which vLLM keeps at the ends of prompts and at intervals alone, up to the last of those."""
    prompt, step_tokens = some_tokens(3000, "aborted"), 128
    options = dict(checkpoint_interval=interval) if interval else {}
    engine = dict(step_tokens=step_tokens, blocks=300, prefix_cache_retention_interval=interval)
    with CachedEngine(folder_of(model), offload="eager", host_bytes=2**26, engine=engine, **options) as engine:
        name = engine.submit(prompt)
        engine.step_until(lambda: engine.request(name).num_computed_tokens >= 0.75 * len(prompt))
        computed = engine.request(name).num_computed_tokens
        engine.abort(name)
        engine.rest()
        kept = engine.on_host(prompt)
        engine.forget()
        (answer,) = engine.answer([prompt])
        engine.check_nothing_leaked()
    assert 2250 <= computed < 2250 + step_tokens
    assert answer.loaded_tokens == kept > computed - max(step_tokens, interval)
    assert max(differences([answer], cold_answers(folder_of(model), [prompt]))) <= TOLERANCE


def test_64k_tokens_aborted_at_three_quarters_are_kept_but_for_the_last_step(tmp_path):
    prompt, step_tokens = some_tokens(2**16, "long"), 2**13
    engine = dict(step_tokens=step_tokens, blocks=2**16 // BLOCK + 10)
    with CachedEngine(save_long_llama(tmp_path), offload="eager", host_bytes=2**27, engine=engine) as engine:
        name = engine.submit(prompt)
        engine.step_until(lambda: engine.request(name).num_computed_tokens >= 0.75 * len(prompt))
        computed = engine.request(name).num_computed_tokens
        engine.abort(name)
        engine.rest()
        engine.forget()
        assert engine.on_host(prompt) >= computed - step_tokens
        (answer,) = engine.answer([prompt[: computed - step_tokens + 1]])
        engine.check_nothing_leaked()
    assert computed == 0.75 * len(prompt)
    assert answer.loaded_tokens == computed - step_tokens


# Two with one prefix


@both_schedulers
@on_any("llama", "gemma3")
def test_the_second_of_two_with_one_prefix_waits_and_then_finds_it(model, asynchronous):  # S7.26
    options = dict(asynchronous=asynchronous)
    with CachedEngine(folder_of(model), offload="eager", copies=Copies(), engine=options) as engine:
        engine.answer([PROMPT])
        engine.forget()
        stop_the_clock(engine)  # nobody waits too long
        with loading(engine) as first:
            second = engine.submit(PROMPT)
            for _ in range(20):
                engine.step()
            assert engine.status(second) == "WAITING"
            assert engine.copies.count(LOAD) == 1
        engine.rest()
        answers = [engine.finished.pop(name) for name in (first, second)]
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE
    assert [(answer.cached_tokens, answer.loaded_tokens) for answer in answers] == [
        (BLOCKS * BLOCK, BLOCKS * BLOCK),
        (BLOCKS * BLOCK, 0),
    ]


@on_any("llama", "gemma3")
def test_a_request_that_has_waited_long_enough_loads_a_copy_of_its_own(model):  # S7.26
    with CachedEngine(folder_of(model), offload="eager", copies=Copies()) as engine:
        engine.answer([PROMPT])
        engine.forget()
        with loading(engine) as first:
            second = engine.submit(PROMPT)
            stop_the_clock(engine, later=1e6)
            engine.step_until(lambda: engine.copies.count(LOAD) == 2)
            assert [engine.status(name) for name in (first, second)] == [LOADING, LOADING]
        engine.rest()
        answers = [engine.finished.pop(name) for name in (first, second)]
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [BLOCKS * BLOCK] * 2


# Wishes


def wish(**params: bool) -> dict[str, object]:
    return dict(
        extra_args=dict(kv_transfer_params={f"cpu_prefix_cache_{name}": value for name, value in params.items()})
    )


def answer_once(engine, prompt, **sampling):
    name = engine.submit(prompt, **sampling)
    engine.step_until(lambda: name in engine.finished)
    return engine.finished.pop(name)


@on_any()
def test_a_request_may_have_nothing_loaded_or_nothing_stored(model):
    with CachedEngine(folder_of(model), offload="eager") as engine:
        answers = []
        for wishes in (wish(store=False), wish(load=False), wish(load=False), wish(store=False, load=True), {}):
            answers.append(answer_once(engine, PROMPT, **wishes))
            engine.forget()
        engine.check_nothing_leaked()
        stored = engine.statistics.chunks_stored
    assert max(differences(answers, expected_of(model)[:1] * 5)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0, 0, 0, BLOCKS * BLOCK, BLOCKS * BLOCK]
    assert stored == BLOCKS


@on_any("llama", "gemma3")
def test_loads_that_are_too_short_are_not_made(model):
    with CachedEngine(folder_of(model), offload="eager", min_load_tokens=BLOCKS * BLOCK) as engine:
        short, long = PROMPT[: 5 * BLOCK + 1], PROMPTS[1]
        engine.answer([short, long])
        engine.forget()
        answers = engine.answer([short, long])
        engine.check_nothing_leaked()
    assert max(differences(answers, [*cold_answers(folder_of(model), [short]), expected_of(model)[1]])) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0, BLOCKS * BLOCK]


def test_by_default_loads_that_take_longer_than_computing_are_not_made():
    """Once both are known: how fast large loads were, and how fast the engine has computed."""

    class SlowLink(CopyWorker):
        def report(self):
            return super().report()._replace(load_bytes_per_second=1.0)

    with (
        patch.object(worker_module, "CopyWorker", SlowLink),
        patch("connector.vllm.scheduler.MIN_TIMED_TOKENS", 64),
        patch("cpu_prefix_cache.offload.prefill_rate.MIN_TIMED_TOKENS", 64),
        CachedEngine(folder_of("llama"), offload="eager") as engine,
    ):
        engine.answer([PROMPT])
        engine.forget()
        answers = engine.answer([PROMPT])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of("llama")[:1])) <= TOLERANCE
    assert answers[0].cached_tokens == 0


@on_any("llama", "gemma3")
def test_a_request_for_logprobs_of_its_prompt_has_all_of_it_computed(model):  # S7.28
    with CachedEngine(folder_of(model), offload="eager", copies=Copies()) as engine:
        engine.answer([PROMPT])
        engine.forget()
        answer = answer_once(engine, PROMPT, prompt_logprobs=1)
        engine.rest()
        assert engine.copies.count(LOAD) == 0
        engine.check_nothing_leaked()
    assert max(differences([answer], expected_of(model)[:1])) <= TOLERANCE
    assert (answer.cached_tokens, answer.loaded_tokens) == (0, 0)


# Partly on the device


@both_offloads
def test_the_host_adds_what_the_device_has_lost(offload):  # S7.28
    """A device of 40 blocks forgets the ends of prompts first."""
    with CachedEngine(folder_of("llama"), offload=offload, engine=dict(blocks=40)) as engine:
        engine.answer(PROMPTS[:1])
        engine.answer(PROMPTS[1:2])
        engine.answer([some_tokens(18 * BLOCK, "other")])
        engine.rest()
        kept = len(engine.cached(PROMPT))
        (answer,) = engine.answer(PROMPTS[:1])
        engine.check_nothing_leaked()
    assert max(differences([answer], expected_of("llama")[:1])) <= TOLERANCE
    assert 0 < kept < BLOCKS
    assert (answer.cached_tokens, answer.loaded_tokens) == (BLOCKS * BLOCK, (BLOCKS - kept) * BLOCK)


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_is_announced_to_vllm_before_its_end_and_the_rank_waits_where_it_computes(waits):
    """The control: without waiting vLLM computes with KV that is not there yet."""
    copies = Copies()
    with CachedEngine(folder_of("llama"), offload="eager", copies=copies) as engine:
        engine.answer(PROMPTS[:1])
        engine.forget()
        ((_, worker),) = engine.halves
        with patch.object(EarlyEnds, "ends_soon", lambda early, seconds: set(worker._waiting)):
            copies.held.add(LOAD)
            name = engine.submit(PROMPT)
            engine.step_until(lambda: worker._announced)
            assert engine.statistics.loading == 1
            if waits:
                threading.Timer(0.2, copies.go_on).start()
            else:
                worker._early.hold_compute = lambda ids: None
            engine.step_until(lambda: name in engine.finished)
        copies.go_on()
        engine.check_nothing_leaked()
        answer = engine.finished.pop(name)
    (difference,) = differences([answer], expected_of("llama")[:1])
    assert (difference <= TOLERANCE) == waits


# The control


@pytest.mark.xfail(strict=True, reason="vLLM takes blocks that a window has passed for blocks that a request holds")
@both_schedulers
def test_two_that_are_loaded_are_not_in_each_others_way(asynchronous):
    """A loaded request holds its blocks and cannot be preempted. Each of the two needs more, to go on: 4
    blocks in each of three groups. With 24 blocks for each, of 59, there are 11 left."""
    beginnings = [some_tokens(20 * BLOCK, ("parked", seed)) for seed in range(2)]
    prompts = [beginning + some_tokens(5 * BLOCK, "rest") for beginning in beginnings]
    engine = dict(blocks=60, step_tokens=4 * BLOCK, asynchronous=asynchronous)
    with CachedEngine(folder_of("gemma3"), offload="eager", engine=engine) as engine:
        for beginning in beginnings:
            engine.answer([[*beginning, 1]])
        engine.forget()
        names = [engine.submit(prompt) for prompt in prompts]
        engine.step_until(lambda: set(names) <= set(engine.finished), seconds=3)
        engine.check_nothing_leaked()
    answers = [engine.finished[name] for name in names]
    assert max(differences(answers, cold_answers(folder_of("gemma3"), prompts))) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [20 * BLOCK] * 2
