"""Several connectors in a real engine: the one that saves the most time loads, and its loads are right.

Where answers are compared, they are those of an engine without a connector, by the logprobs of the whole vocabulary. In
the controls what is loaded is damaged, and the comparison fails.
"""

import random
import re
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from prometheus_client import REGISTRY, generate_latest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction
from tests.vllm.models import some_tokens
from tests.vllm.multi_children import LosingConnector, SavingConnector
from tests.vllm.multi_engine import BROKEN, FROZEN, SAVING, ChoosingEngine, Clock, example, of_tests
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, Copies, expected_of, folder_of, ours
from tests.vllm.real_engine import BLOCK, TOLERANCE, RealEngine, differences

ALL = BLOCKS * BLOCK
BUSY = {"llama": 60, "gemma3": 110}  # blocks of a device that is too small for eight prompts and their answers
ANSWER = 128  # tokens: at 64, an asynchronous run of gemma3 had one preemption or none

on_two_models = pytest.mark.parametrize("model", ["llama", "gemma3"])
both_schedulers = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


# The connector that loads


@both_schedulers
@on_two_models
def test_the_faster_of_two_connectors_loads_once_both_were_measured(model, asynchronous):
    with ChoosingEngine(folder_of(model), ours(), ours(), asynchronous=asynchronous) as engine:
        engine.slow_down(0, Clock(engine))
        answers = engine.answer(PROMPTS)
        engine.forget()
        answers += engine.answer(PROMPTS[:1])  # by the first, since nothing else was measured
        answers += engine.answer(PROMPTS[1:])
        engine.forget()
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        assert [engine.count(at).wins for at in (0, 1)] == [1, 15]
        assert [engine.count(at).tokens for at in (0, 1)] == [ALL, 15 * ALL]
        assert [engine.count(at).queries for at in (0, 1)] == [24, 24]
        assert [half.cache.statistics().chunks_loaded for half, _ in engine.halves] == [BLOCKS, 15 * BLOCKS]
    assert max(differences(answers, expected_of(model) * 3)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 8 + [ALL] * 16


@pytest.mark.parametrize(("model", "group"), [(model, group) for model in GROUPS for group in GROUPS[model]])
def test_one_damaged_block_of_a_load_shows(model, group):
    """The control: the first is the faster one, and what it loads is damaged."""
    with ChoosingEngine(folder_of(model), ours(), ours(), copies=Copies(damaged=group)) as engine:
        engine.slow_down(1, Clock(engine))
        engine.answer(PROMPTS)
        engine.forget()
        damaged = [answer for prompt in PROMPTS for answer in engine.answer([prompt])]
        assert engine.count(0).wins == 8
    assert [answer.loaded_tokens for answer in damaged] == [ALL] * 8
    assert sum(difference > TOLERANCE for difference in differences(damaged, expected_of(model))) >= 7


# Beside vLLM's example, which loads in the step

WHOLE = dict(step_tokens=4096)  # vLLM's example does not store prompts that are computed in parts


def test_beside_vllms_example_whoever_has_something_loads(tmp_path):
    with ChoosingEngine(folder_of("llama"), example(tmp_path), ours(), **WHOLE) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        engine.cache.reset()
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        assert [engine.count(at).wins for at in (0, 1)] == [8, 0]
        assert engine.count(0).seconds > 0
        engine.forget()
        for path in tmp_path.iterdir():
            path.rename(path.with_name(f"lost-{path.name}"))
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        assert [engine.count(at).wins for at in (0, 1)] == [8, 8]
    assert max(differences(answers, expected_of("llama") * 3)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 8 + [ALL] * 16


def test_a_damaged_file_of_the_example_shows(tmp_path):
    with ChoosingEngine(folder_of("llama"), example(tmp_path), ours(), **WHOLE) as engine:
        engine.answer(PROMPTS)
        engine.forget()
        engine.cache.reset()
        for path in tmp_path.rglob("*.safetensors"):
            kept = safetensors.torch.load_file(path)["kv_cache"]
            safetensors.torch.save_file({"kv_cache": torch.randn_like(kept)}, path)
        damaged = engine.answer(PROMPTS)
    assert [answer.loaded_tokens for answer in damaged] == [ALL] * 8
    assert sum(difference > TOLERANCE for difference in differences(damaged, expected_of("llama"))) >= 7


# Connectors that are no help


@both_schedulers
@on_two_models
def test_one_that_never_answers_costs_one_deadline(model, asynchronous):
    with ChoosingEngine(folder_of(model), FROZEN, ours(), asynchronous=asynchronous) as engine:
        clock = Clock(engine)
        name = engine.submit(PROMPTS[0])
        for _ in range(20):
            engine.step()
        assert engine.status(name) == "WAITING"
        assert engine.count(0).pending == 1
        clock.now += 0.6
        engine.rest()
        answers = [engine.finished.pop(name)]
        engine.forget()
        answers += engine.answer(PROMPTS)  # nobody waits any more, and the clock stands still
        engine.check_nothing_leaked()
        assert engine.count(0).misses["late"] == 9
        assert engine.count(1).wins == 1
    assert max(differences(answers, expected_of(model)[:1] + expected_of(model))) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0, ALL] + [0] * 7


def test_a_request_may_end_while_it_waits_for_an_answer():
    with ChoosingEngine(folder_of("llama"), FROZEN, ours()) as engine:
        Clock(engine)
        name = engine.submit(PROMPTS[0])
        engine.step()
        assert engine.count(0).pending == 1
        engine.abort(name)
        engine.check_nothing_leaked()


def test_one_that_raises_an_error_has_nothing(caplog):
    with ChoosingEngine(folder_of("llama"), BROKEN, ours()) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        assert engine.count(0).misses["error"] == 16
    assert max(differences(answers, expected_of("llama") * 2)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 8 + [ALL] * 8


@both_schedulers
@on_two_models
def test_a_prompt_that_one_connector_fails_to_load_the_other_loads(model, asynchronous):
    with ChoosingEngine(folder_of(model), ours(), ours(), asynchronous=asynchronous) as engine:
        answers = engine.answer(PROMPTS[:1])
        engine.forget()
        with engine.copies.failing(Direction.LOAD):
            answers += engine.answer(PROMPTS[:1])
        engine.check_nothing_leaked()
        assert (engine.count(0).misses["failed"], engine.count(0).wins) == (1, 0)
        assert engine.count(1).wins == 1
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE
    assert answers[1].loaded_tokens == ALL


def test_if_all_fail_to_load_the_prompt_is_computed():
    with ChoosingEngine(folder_of("llama"), ours()) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        with engine.copies.failing(Direction.LOAD):
            answers += engine.answer(PROMPTS[:1])
        engine.check_nothing_leaked()
    assert max(differences(answers, [*expected_of("llama"), expected_of("llama")[0]])) <= TOLERANCE
    assert answers[-1].loaded_tokens == 0


def test_blocks_that_one_reports_as_invalid_are_a_miss_of_it(tmp_path):
    """Loads in the step: vLLM computes these blocks again in the same request."""
    losing = example(tmp_path) | of_tests("LosingConnector")
    with ChoosingEngine(folder_of("llama"), losing, ours(), **WHOLE) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        engine.cache.reset()
        with patch.object(LosingConnector, "lost", 1):
            answers += engine.answer(PROMPTS[:1])
        assert (engine.count(0).misses["failed"], engine.count(0).wins) == (1, 0)
        answers += engine.answer(PROMPTS[1:])
        engine.check_nothing_leaked()
        assert engine.count(0).wins == 7
    assert max(differences(answers, expected_of("llama") * 2)) <= TOLERANCE


# All may store


def test_blocks_are_freed_when_all_have_saved_them():
    with ChoosingEngine(folder_of("llama"), SAVING, ours(), SAVING, blocks=100) as engine:
        first, second = SavingConnector.saved[-2:]
        name = engine.submit(PROMPTS[0])
        engine.step_until(lambda: name in engine.finished)
        (id,) = engine.scheduler.requests
        held = engine.pool.num_gpu_blocks - engine.pool.get_num_free_blocks()
        first.add(id)
        engine.step()
        assert engine.pool.num_gpu_blocks - engine.pool.get_num_free_blocks() == held > BLOCKS
        second.add(id)
        engine.check_nothing_leaked()


def test_a_reset_empties_all():
    with ChoosingEngine(folder_of("llama"), ours(), ours()) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget(host=True)
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of("llama") * 2)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 16


# Together


@pytest.mark.parametrize(("model", "asynchronous"), [("llama", False), ("gemma3", True)])
def test_many_requests_that_are_loaded_preempted_and_aborted(model, asynchronous):
    """On a device that is too small for them. For a while the first connector fails, the last one is frozen."""
    rng = random.Random(0)
    prompts = [some_tokens(rng.randrange(100, 400), ("many", number % 8)) for number in range(24)]
    with RealEngine(folder_of(model), blocks=2000) as engine:
        expected = engine.answer(prompts, max_tokens=ANSWER)
    connectors = ours(), ours(offload="lazy"), FROZEN
    with ChoosingEngine(folder_of(model), *connectors, blocks=BUSY[model], asynchronous=asynchronous) as engine:
        preempted, answers = engine.count_preemptions(), []
        for number in range(0, 24, 8):
            names = [engine.submit(prompt, max_tokens=ANSWER) for prompt in prompts[number : number + 8]]
            aborted = engine.submit(prompts[number], max_tokens=ANSWER)
            with engine.copies.failing(Direction.LOAD) if number == 8 else nullcontext():
                for _ in range(5):
                    engine.step()
            engine.abort(aborted)
            engine.rest()
            answers += [engine.finished.pop(name) for name in names]
        engine.check_nothing_leaked()
        assert preempted or asynchronous  # two there, mostly: how many run at once, the clock decides
        assert any(engine.count(at).wins for at in (0, 1))  # so is which of them is faster
    assert max(differences(answers, expected)) <= TOLERANCE


# Metrics


def shown(name: str) -> dict[str, float]:
    """In /metrics: the value for each connector, with the reason of misses."""
    found = {}
    for line in generate_latest(REGISTRY).decode().splitlines():
        if match := re.match(rf"vllm:cpu_prefix_cache_multi_{name}{{(.*)}} (\S+)", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
            found[" ".join(filter(None, (labels["connector"], labels.get("reason"))))] = float(match[2])
    return found


def test_each_connector_has_its_metrics(tmp_path):
    first, second = "0:ExampleConnector", "1:CPUPrefixCacheConnector"
    with ChoosingEngine(folder_of("llama"), example(tmp_path), ours(), **WHOLE) as engine:
        assert shown("queries_total") == shown("wins_total") == {first: 0, second: 0}
        assert len(shown("misses_total")) == 8
        engine.answer(PROMPTS)
        engine.forget()
        engine.cache.reset()
        engine.answer(PROMPTS)
        engine.rest()
        engine.answer(PROMPTS[:1])  # vLLM reports loads with the step that follows
        counts = [engine.count(at) for at in (0, 1)]
        assert shown("queries_total") == {first: 17, second: 17}
        assert shown("wins_total") == {first: 8, second: 0}
        assert shown("tokens_total") == {first: 8 * ALL, second: 0}
        assert shown("pending") == {first: 0, second: 0}
        assert shown("seconds_total") == pytest.approx({first: counts[0].seconds, second: 0})
        assert shown("misses_total")[f"{first} nothing"] == counts[0].misses["nothing"] == 9
        assert shown("misses_total")[f"{second} nothing"] == counts[1].misses["nothing"] == 17


# Refusals


@pytest.mark.parametrize(
    ("connectors", "said", "answer"),
    [
        ([], {}, "connectors is a list with the kv-transfer-config of each"),
        ([ours()], dict(speed=1), "unknown option 'speed'; known options are connectors, deadline_seconds, "),
        ([ours()], dict(deadline_seconds=-1), "deadline_seconds is a number from 0 on; got -1"),
        ([ours()], dict(load_bytes_per_second=0), "load_bytes_per_second is a number above 0; got 0"),
        (
            [ours(), ours()],
            dict(deadline_seconds=[1]),
            "deadline_seconds is one number, or one for each of 2 connectors",
        ),
        ([ours()], dict(prefill_tokens_per_second="fast"), "prefill_tokens_per_second is a number above 0; got 'fast'"),
        (
            [
                dict(
                    kv_connector="MultiConnector",
                    kv_role="kv_both",
                    kv_connector_extra_config=dict(connectors=[ours()]),
                )
            ],
            {},
            "MultiConnector cannot be one of several connectors: list its connectors instead",
        ),
    ],
)
def test_options_are_refused_with_a_sentence_that_helps(connectors, said, answer):
    with pytest.raises(ConfigurationError, match=answer):
        ChoosingEngine(folder_of("llama"), *connectors, said=said)


def test_one_that_knows_one_group_only_is_refused_by_name_for_a_hybrid(tmp_path):
    with pytest.raises(ConfigurationError, match=r"ExampleConnector does not support models with several KV cache"):
        ChoosingEngine(folder_of("gemma3"), example(tmp_path), ours(), **WHOLE)
