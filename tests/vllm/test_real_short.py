"""Short hits, for whose loads compute waits and no request: all hits of these prompts, by default.

Where answers are compared, two controls fail: one with a damaged block in each load, and one in which compute does not
wait for what it reads.
"""

from unittest.mock import patch

import pytest

from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.deciding import Direction
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, SHOWN, TOLERANCE, differences
from tests.vllm.test_real_hits import answer_in_pairs

LOAD = Direction.LOAD
ALL = BLOCKS * BLOCK
ANY = 2**40  # bytes
PROMPT = PROMPTS[0]
WAYS = {
    "lazy": dict(offload="lazy"),
    "eager": dict(offload="eager"),
    "lazy arc": dict(offload="lazy", policy="arc"),
    "lazy asynchronous": dict(offload="lazy", engine=dict(asynchronous=True)),
    "eager asynchronous": dict(offload="eager", engine=dict(asynchronous=True)),
    "eager in small steps": dict(offload="eager", engine=dict(step_tokens=72)),
}


@pytest.fixture
def start():
    """An engine that has all prompts on the host, and nothing on the device."""
    with CachedEngine(folder_of("llama"), offload="eager", sync_load_bytes=ANY, copies=Copies()) as engine:
        engine.answer(PROMPTS)
        engine.forget()
        yield engine


def parked(engine: CachedEngine) -> list[object]:
    """A list of the requests that are given a load which they wait for, from now on."""
    found = []
    asked = engine.connectors.scheduler.get_num_new_matched_tokens

    def noted(request, *arguments):
        answer = asked(request, *arguments)
        found.extend([request] if answer[1] else [])
        return answer

    engine.connectors.scheduler.get_num_new_matched_tokens = noted
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_answers_are_the_same_and_nobody_waits(model, way):
    with CachedEngine(folder_of(model), **WAYS[way]) as engine:
        computed = answer_in_pairs(engine, PROMPTS)
        engine.flood()
        waited = parked(engine)
        loaded = answer_in_pairs(engine, PROMPTS)
        found = engine.answer(PROMPTS[-2:])
        engine.check_nothing_leaked()
    assert not waited
    assert max(differences(computed, expected_of(model))) <= TOLERANCE
    assert max(differences(loaded, expected_of(model))) <= TOLERANCE
    assert max(differences(found, expected_of(model)[-2:])) <= TOLERANCE
    assert [answer.loaded_tokens for answer in loaded] == [ALL] * 8
    assert [(answer.loaded_tokens, answer.cached_tokens) for answer in found] == [(0, ALL)] * 2


def test_control_one_damaged_block_of_a_load_shows():
    (group,) = GROUPS["llama"]
    damaging = dict(offload="lazy", sync_load_bytes=ANY, copies=Copies(damaged=group))
    with CachedEngine(folder_of("llama"), **damaging) as engine:
        answer_in_pairs(engine, PROMPTS)
        engine.flood()
        damaged = answer_in_pairs(engine, PROMPTS)
    assert [answer.loaded_tokens for answer in damaged] == [ALL] * 8
    assert sum(difference > TOLERANCE for difference in differences(damaged, expected_of("llama"))) >= 7


def test_control_compute_that_does_not_wait_for_the_load_shows(start):
    with start.copies.holding(LOAD), patch.object(EarlyEnds, "hold_compute", lambda *_: None):
        answers = start.answer([PROMPT])
    assert answers[0].loaded_tokens == ALL
    assert max(differences(answers, expected_of("llama")[:1])) > SHOWN


def test_an_engine_stops_where_such_a_load_fails(start):
    """It has promised vLLM the blocks for this step, and what vLLM would compute again others could read first."""
    start.submit(PROMPT)
    with start.copies.failing(LOAD), pytest.raises(RuntimeError, match="it must stop, and be started again"):
        start.rest()


def test_two_prompts_with_one_beginning_load_it_once(start):
    """The second finds on the device what the first loads in the same step."""
    waited = parked(start)
    answers = start.answer([PROMPT, PROMPT])
    start.check_nothing_leaked()
    assert not waited
    assert start.copies.count(LOAD) == 1
    assert [answer.loaded_tokens for answer in answers] == [ALL, 0]
    assert max(differences(answers, expected_of("llama")[:1] * 2)) <= TOLERANCE


def test_a_request_may_be_aborted_in_its_step(start):
    name = start.submit(PROMPT)
    start.step()
    start.abort(name)
    answers = start.answer(PROMPTS[:2])
    start.check_nothing_leaked()
    assert max(differences(answers, expected_of("llama")[:2])) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("llama", {"sync_load_bytes": 1}, id="beyond the bytes of a step"),
        pytest.param("gemma3", {}, id="windows"),
    ],
)
def test_the_request_of_another_hit_waits(model, options):
    with CachedEngine(folder_of(model), offload="eager", **options) as engine:
        engine.answer(PROMPTS)
        engine.forget()
        waited = parked(engine)
        answers = engine.answer(PROMPTS[:2])
        engine.check_nothing_leaked()
    assert len(waited) == 2
    assert max(differences(answers, expected_of(model)[:2])) <= TOLERANCE
