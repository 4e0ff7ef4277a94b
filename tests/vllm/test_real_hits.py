"""Hits of the host give the answers of an engine that has no such cache, and are as many as they should be.

In each engine eight prompts are answered three times: computed, brought back from the host when the device has lost
them, and found on the device. Where they are compared, the control damages one block of one group after each load, and
the comparison fails.
"""

import random

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.offload.late import Late
from tests.vllm.models import MODELS, some_tokens
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, Answer, RealEngine, cold_answers, differences


def answer_in_pairs(engine: RealEngine, prompts: list[list[int]]) -> list[Answer]:
    pairs = [engine.answer(prompts[at : at + 2]) for at in range(0, len(prompts), 2)]
    return [answer for pair in pairs for answer in pair]


def on_any(*models: str):
    return pytest.mark.parametrize("model", models or list(MODELS))


# Cold, evicted, reloaded

WAYS = {
    "lazy": dict(offload="lazy"),
    "eager": dict(offload="eager"),
    "lazy arc": dict(offload="lazy", policy="arc"),
    "eager adaptive": dict(offload="eager", policy="adaptive"),
    "lazy asynchronous": dict(offload="lazy", engine=dict(asynchronous=True)),
    "eager asynchronous": dict(offload="eager", engine=dict(asynchronous=True)),
    "eager arc in small steps": dict(offload="eager", policy="arc", engine=dict(step_tokens=72)),
}


@pytest.mark.parametrize(
    ("model", "way"),
    [(model, way) for model in MODELS for way in WAYS if model != "qwen3" or way in ("lazy", "eager")],
)
def test_loaded_blocks_are_as_good_as_computed_ones(model, way):
    check_three_answers(model, way)


@on_any("llama", "qwen3")
@pytest.mark.parametrize("way", ["lazy", "lazy asynchronous"])
def test_blocks_that_were_stored_at_hand_out_are_as_good_as_computed_ones(model, way, monkeypatch):
    """As where the host has no room for all that the device holds."""
    monkeypatch.setattr(Late, "_store_computed", lambda *_: None)
    check_three_answers(model, way)


def check_three_answers(model, way):
    with CachedEngine(folder_of(model), **WAYS[way]) as engine:
        computed = answer_in_pairs(engine, PROMPTS)
        engine.flood()
        loaded = answer_in_pairs(engine, PROMPTS)
        found = engine.answer(PROMPTS[-2:])
        engine.check_nothing_leaked()
    assert max(differences(computed, expected_of(model))) <= TOLERANCE
    assert max(differences(loaded, expected_of(model))) <= TOLERANCE
    assert max(differences(found, expected_of(model)[-2:])) <= TOLERANCE
    assert [answer.cached_tokens for answer in computed] == [0] * 8
    assert [answer.loaded_tokens for answer in loaded] == [BLOCKS * BLOCK] * 8
    assert [(answer.loaded_tokens, answer.cached_tokens) for answer in found] == [(0, BLOCKS * BLOCK)] * 2


@pytest.mark.parametrize(("model", "group"), [(model, group) for model in MODELS for group in GROUPS[model]])
def test_one_damaged_block_of_a_load_shows(model, group):
    """The control of all comparisons in this file: one wrong block, of any group, would fail them."""
    with CachedEngine(folder_of(model), offload="eager", copies=Copies(damaged=group)) as engine:
        computed = answer_in_pairs(engine, PROMPTS)
        engine.flood()
        damaged = answer_in_pairs(engine, PROMPTS)
    assert max(differences(computed, expected_of(model))) <= TOLERANCE
    assert [answer.loaded_tokens for answer in damaged] == [BLOCKS * BLOCK] * 8
    assert sum(difference > TOLERANCE for difference in differences(damaged, expected_of(model))) >= 7


# How much


@on_any()
def test_all_but_the_last_block_of_any_prompt_comes_back(model):  # S7.27
    """One token of it is computed, for the logprobs. Prompts end before, on, and behind boundaries."""
    lengths = [1, 2] + [blocks * BLOCK + off for blocks in (1, 2, 3, 4, 11) for off in (-1, 0, 1)]
    prompts = [some_tokens(length, ("of length", length)) for length in lengths]
    expected = cold_answers(folder_of(model), prompts)
    with CachedEngine(folder_of(model), offload="eager", engine=dict(blocks=300)) as engine:
        computed = engine.answer(prompts)
        engine.forget()
        loaded = engine.answer(prompts)
        engine.check_nothing_leaked()
    assert max(differences(computed, expected)) <= TOLERANCE
    assert max(differences(loaded, expected)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in loaded] == [(length - 1) // BLOCK * BLOCK for length in lengths]


class Conversations:
    """16 people who take turns, two at a time; each goes on with the whole conversation. A long one begins anew.

    Five or six begin with the same words.
    """

    def __init__(self, engine: RealEngine) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._said = [self._beginning(person) for person in range(16)]

    def answers(self, turns: int) -> list[Answer]:
        return [answer for _ in range(turns) for answer in self._turn()]

    def _turn(self) -> list[Answer]:
        people = self._random.sample(range(16), 2)
        for person in people:
            if len(self._said[person]) > 900:
                self._said[person] = self._beginning(person)
            self._said[person] += some_tokens(self._random.randrange(20, 150), self._random.random())
        answers = self._engine.answer([self._said[person] for person in people])
        for person, answer in zip(people, answers, strict=True):
            self._said[person] += answer.tokens
        return answers

    def _beginning(self, person: int) -> list[int]:
        return some_tokens(100 + 60 * (person % 3), ("beginning", person % 3))


TURNS = 30
DEVICE_BLOCKS = {"llama": 60, "qwen3": 60, "gemma3": 120}


@pytest.fixture(scope="module")
def with_a_large_device():
    """Answers to the same people of an engine with ten times the blocks, and no connector."""

    def hear(model: str) -> list[Answer]:
        with RealEngine(folder_of(model), blocks=10 * DEVICE_BLOCKS[model]) as engine:
            return Conversations(engine).answers(TURNS)

    return {model: hear(model) for model in ("llama", "gemma3")}


@pytest.mark.parametrize("way", ["lazy", "eager", "lazy asynchronous"])
@on_any("llama", "gemma3")
def test_a_small_device_and_the_host_hit_what_a_device_ten_times_as_large_would(with_a_large_device, model, way):
    expected = with_a_large_device[model]
    options = WAYS[way] | dict(engine=dict(blocks=DEVICE_BLOCKS[model]) | WAYS[way].get("engine", {}))
    with CachedEngine(folder_of(model), **options) as engine:
        answers = Conversations(engine).answers(TURNS)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected)) <= TOLERANCE
    share = sum(answer.cached_tokens for answer in answers) / sum(answer.cached_tokens for answer in expected)
    print(f"{model}, {way}: {share:.3f} of the tokens")
    assert share >= 0.9
    assert sum(answer.loaded_tokens for answer in answers) >= 0.2 * sum(answer.cached_tokens for answer in answers)


# Lazy stores, which are in a hurry


LONG = [some_tokens(20 * BLOCK + 5, ("long", seed)) for seed in range(8)]
OTHERS = [some_tokens(10 * BLOCK + 5, ("other", seed)) for seed in range(10)]


@pytest.mark.parametrize("way", ["lazy", "lazy asynchronous"])
@on_any("llama", "gemma3")
def test_nothing_is_lost_of_prompts_that_push_each_other_out(model, way):
    with CachedEngine(folder_of(model), **WAYS[way]) as engine:
        answer_in_pairs(engine, LONG)
        engine.flood()
        assert [engine.on_host(prompt) // BLOCK for prompt in LONG] == [20] * 8


def test_hardly_anything_is_lost_of_prompts_that_loads_push_out():
    """A load allocates all of its blocks in one step, more than the walk has reckoned with."""
    with CachedEngine(folder_of("llama"), offload="lazy") as engine:
        answer_in_pairs(engine, LONG + OTHERS)
        assert sum(answer.loaded_tokens for answer in answer_in_pairs(engine, LONG)) > 100 * BLOCK
        engine.flood()
        assert sum(engine.on_host(prompt) // BLOCK for prompt in OTHERS) >= 90  # of 100


@pytest.mark.parametrize("way", ["lazy", "lazy asynchronous"])
def test_nearly_all_prompts_that_come_at_once_are_loaded(way):
    """Twelve for which the device has room for five: as many loads as it has room for would go out in one step."""
    prompts = [some_tokens(10 * BLOCK + 10, ("at once", seed)) for seed in range(12)]
    with CachedEngine(folder_of("llama"), **WAYS[way] | dict(engine=dict(blocks=60, step_tokens=128))) as engine:
        engine.end_copies_in_their_step()
        for _ in range(3):
            answers = engine.answer(prompts)
        print(engine.statistics.lost_before_store, [answer.cached_tokens for answer in answers])
        assert engine.statistics.lost_before_store <= 16  # of 360 that could have been; without waiting 32 and 52


# Checkpoints


def answers_one_by_one(engine: RealEngine, prompts: list[list[int]]) -> list[Answer]:
    """The device forgets between each and the next."""
    answers = []
    for prompt in prompts:
        answers += engine.answer([prompt])
        engine.forget()
    return answers


@pytest.fixture
def branches():
    """Three prompts that begin with the same ten blocks and go on differently."""
    return [PROMPTS[0][: 10 * BLOCK] + prompt for prompt in PROMPTS[1:4]]


@pytest.mark.parametrize(("interval", "resumed"), [(0, 0), (3 * BLOCK, 9 * BLOCK), (5 * BLOCK, 10 * BLOCK)])
def test_a_prompt_with_windows_is_resumed_at_configured_checkpoints(branches, interval, resumed):
    """At intervals vLLM keeps windows only if it is configured, too; by default at the end of prompts."""
    expected = cold_answers(folder_of("gemma3"), branches)
    options = dict(checkpoint_interval=interval) if interval else {}
    engine = dict(prefix_cache_retention_interval=interval)
    with CachedEngine(folder_of("gemma3"), offload="eager", engine=engine, **options) as engine:
        answers = answers_one_by_one(engine, branches)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0, resumed, 10 * BLOCK]  # the second one keeps its branch


def test_where_a_second_prompt_goes_on_differently_windows_are_kept(branches):
    first, second, third = branches
    expected = cold_answers(folder_of("gemma3"), branches)
    with CachedEngine(folder_of("gemma3"), offload="eager") as engine:
        answers = engine.answer([first]) + engine.answer([second])  # the device knows that they part
        engine.forget()
        answers += engine.answer([third])
        engine.check_nothing_leaked()
    assert max(differences(answers, expected)) <= TOLERANCE
    assert [answer.cached_tokens for answer in answers] == [0, 0, 10 * BLOCK]


def test_an_interval_that_vllm_does_not_keep_is_refused():
    with pytest.raises(ConfigurationError, match="prefix-cache-retention-interval"):
        CachedEngine(folder_of("gemma3"), checkpoint_interval=3 * BLOCK).close()
