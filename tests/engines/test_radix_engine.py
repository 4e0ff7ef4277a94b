"""The radix engine with our host cache answers as it does alone, whatever happens to requests and copies."""

import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from cpu_prefix_cache import HostOptions
from radix_engine import engine, host
from tests.engines.glue import code_lines
from tests.support.poison import poison
from tests.support.troubled_copiers import COPIERS

HOME = Path(__file__).parents[2] / "examples" / "radix_engine"
DEVICE_TOKENS, PROMPTS = 512, 60


def story(**said):
    plain = {"page": 1, "seed": 1, "offload": "lazy", "host_tokens": 4096, "copies": "as it is", "aborts": 0.0}
    return {**plain, "policy": "lru", "reset": False} | said


BOTH = [(mode, page) for mode in ("lazy", "eager") for page in (1, 4)]
KINDS = {
    "plain": {},
    "aborts": dict(aborts=0.3, seed=2),
    "late, aborts": dict(copies="late", aborts=0.3, seed=3),
    "copies fail": dict(copies="fails", aborts=0.3, seed=4),
    "a host as small as the device": dict(host_tokens=DEVICE_TOKENS, policy="arc", seed=5),
    "a reset": dict(reset=True, copies="late", seed=6),
}
STORIES = {
    f"{mode}, pages of {page}, {name}": story(offload=mode, page=page, **kind)
    for mode, page in BOTH
    for name, kind in KINDS.items()
}


def prompts(seed):
    """Prompts that share prefixes of several lengths, each with how many tokens it is to be answered with."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(50) for _ in range(draw.randrange(16, 128))] for _ in range(8)]
    for _ in range(PROMPTS):
        prefix = draw.choice(prefixes)
        tail = [draw.randrange(50) for _ in range(draw.randrange(1, 40))]
        yield prefix[: draw.randrange(10, len(prefix) + 1)] + tail, draw.randrange(1, 20)


def new_engine(page):
    return engine.Engine(DEVICE_TOKENS // page, page)


def serve(made, seed, aborts=0.0, each_step=lambda todo: None):
    """Answers by the number of the prompt, and how many requests were aborted while they loaded."""
    draw = random.Random(seed)
    todo = list(enumerate(prompts(seed)))
    alive = {}
    answers = {}
    aborted_loading = 0
    while todo or not made.is_idle:
        for number, (prompt, num_output) in todo[:2]:
            alive[number] = engine.Request(number, prompt, num_output)
            made.queue.append(alive[number])
        del todo[:2]
        for request in made.step():
            answers[request.id] = alive.pop(request.id)
        for request in list(alive.values()):
            if draw.random() < (aborts if request.id in made.loading else aborts / 20):
                aborted_loading += request.id in made.loading
                made.end(alive.pop(request.id))
        each_step(todo)
    return answers, aborted_loading


def with_host(told):
    made = new_engine(told["page"])
    glue = host.Host(
        made,
        host_bytes=told["host_tokens"] * made.model.kv[:, :, 0, 0].numel() * 8,
        max_model_len=1024,
        max_step_tokens=6 * 24,
        options=HostOptions(
            offload=told["offload"],
            policy=told["policy"],
            strict=told["copies"] != "fails" and not told["reset"],
            wrap_copier=COPIERS[told["copies"]],
        ),
    )
    poison(made.cache, "allocate", glue, made.model.kv)
    return made, glue


@cache
def alone(page, seed):
    return serve(new_engine(page), seed)[0]


@cache
def served(name):
    told = STORIES.get(name) or story(copies="corrupts")
    made, glue = with_host(told)

    def each_step(todo):
        glue.cache.check_valid()
        if told["reset"] and len(todo) == PROMPTS // 2:
            glue.reset()

    answers, aborted_loading = serve(made, told["seed"], told["aborts"], each_step)
    return made, answers, aborted_loading, glue.statistics().cache


def differing(answers, truth):
    """The prompts that were answered with other tokens, or from other logits."""
    return [
        number
        for number, request in answers.items()
        if request.answer() != truth[number].answer()
        or not torch.allclose(torch.stack(request.logits), torch.stack(truth[number].logits), atol=1e-6)
    ]


@pytest.mark.parametrize("name", STORIES)
def test_answers_are_those_of_the_engine_alone(name):
    told = STORIES[name]
    made, answers, _, statistics = served(name)
    assert differing(answers, alone(told["page"], told["seed"])) == []
    assert len(answers) == PROMPTS or told["aborts"]
    assert statistics.hit_tokens > 0, "nothing came from the host: this compares nothing"
    assert len(made.cache.free_pages) + made.cache.evictable == made.cache.num_pages, "a page is lost, or locked"
    assert made.cache.promised == 0


def test_each_story_has_the_events_that_it_is_for():
    assert any(served(name)[2] for name in STORIES), "no request was aborted while it loaded"
    assert any(served(name)[3].loads_failed for name in STORIES), "no load failed"


def test_a_copier_that_damages_bytes_is_seen():
    _, answers, _, _ = served("corrupted")
    assert len(differing(answers, alone(1, 1))) > 3


def test_the_glue_is_short():
    subprocess.run([sys.executable, "-m", "ruff", "format", "--check", HOME], check=True)
    assert code_lines(HOME / "host.py") <= 55
