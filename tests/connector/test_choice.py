"""The choice of the hit to load, against a model that tries every answer that could still come, in exact numbers."""

import doctest
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.multi import choice, loads
from connector.multi.choice import Answer, Decision, Prompt, Speed, decide

seconds = st.fractions(0, 2, max_denominator=16)
prompts = st.builds(
    Prompt,
    most_tokens=st.integers(1, 40),
    bytes_per_token=st.integers(1, 4),
    prefill=st.fractions(1, 64, max_denominator=4).filter(bool),
)
speeds = st.builds(
    Speed, rate=st.fractions(Fraction(1, 4), 256, max_denominator=4), overhead=seconds, queue_bytes=st.integers(0, 200)
)


@st.composite
def questions(draw):
    prompt = draw(prompts)
    tokens = st.none() | st.integers(0, prompt.most_tokens)
    answers = draw(st.lists(st.builds(Answer, tokens=tokens, speed=speeds, patience=seconds), max_size=4))
    return answers, prompt, draw(seconds)


def saved(prompt, tokens, speed):
    """The formula of the docstring, once more."""
    return tokens / prompt.prefill - (speed.queue_bytes + tokens * prompt.bytes_per_token) / speed.rate - speed.overhead


def slow_decide(answers, prompt, waited):
    known = {at: saved(prompt, each.tokens, each.speed) for at, each in enumerate(answers) if each.tokens}
    known = {at: gain for at, gain in known.items() if gain > 0}
    best = max(known.values(), default=Fraction(0))
    winner = next((at for at, gain in known.items() if gain == best), None)
    waits_for = []
    for at, each in enumerate(answers):
        could = (saved(prompt, tokens, each.speed) - best > waited for tokens in range(1, prompt.most_tokens + 1))
        if each.tokens is None and waited < each.patience and any(could):
            waits_for.append(at)
    return Decision(winner, tuple(waits_for))


@pytest.mark.parametrize("module", [choice, loads])
def test_the_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


@given(questions())
def test_the_choice_is_that_of_a_model_that_tries_everything(question):
    assert decide(*question) == slow_decide(*question)


def test_the_model_sees_a_choice_by_tokens_or_by_order():
    """The control: the far cache has more, and the first comes first; neither is right."""
    near, far = Speed(rate=64, overhead=0), Speed(rate=1, overhead=0)
    prompt = Prompt(most_tokens=8, bytes_per_token=1, prefill=2)
    question = [Answer(8, far), Answer(6, near)], prompt, 0
    assert decide(*question) == slow_decide(*question) == Decision(1, ())
    assert slow_decide(*question) != Decision(0, ())


@given(questions())
def test_a_cache_that_has_nothing_changes_nothing(question):
    answers, prompt, waited = question
    idle = Answer(0, Speed(rate=1, overhead=0), patience=2)
    assert decide([*answers, idle], prompt, waited) == decide(answers, prompt, waited)


@given(questions(), st.data())
def test_a_cache_that_loads_faster_does_not_lose_by_it(question, data):
    answers, prompt, waited = question
    before = decide(answers, prompt, waited)
    if before.winner is not None:
        winner = answers[before.winner]
        faster = winner.speed._replace(rate=winner.speed.rate * data.draw(st.integers(1, 9)))
        answers[before.winner] = winner._replace(speed=faster)
        assert decide(answers, prompt, waited).winner == before.winner


@given(questions(), st.lists(seconds, min_size=4, max_size=4), st.fractions(Fraction(1, 16), 1, max_denominator=16))
def test_no_answer_that_comes_late_would_have_been_worth_its_wait(question, delays, step):
    """The caches answer after `delays`, and the engine queries once a step until it waits for none."""
    truth, prompt, _ = question
    waited = Fraction(0)
    while True:
        arrived = [
            each if waited >= delay else each._replace(tokens=None) for each, delay in zip(truth, delays, strict=False)
        ]
        now = decide(arrived, prompt, waited)
        if not now.waits_for:
            break
        waited += step
    patience = max((each.patience for each in truth), default=0)
    assert waited < patience + step
    best = 0 if now.winner is None else saved(prompt, truth[now.winner].tokens, truth[now.winner].speed)
    for each in arrived:
        if each.tokens is None:
            assert waited >= each.patience or saved(prompt, prompt.most_tokens, each.speed) - waited <= best
        else:
            assert saved(prompt, each.tokens, each.speed) <= best or each.tokens == 0
