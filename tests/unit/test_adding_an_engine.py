"""The batching engine of docs/adding_an_engine.md answers as its model does alone, whatever becomes of its requests."""

import inspect
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import batching_engine
from batching_engine import BLOCK_TOKENS, Blocks, BlocksDevice, Engine, Request
from cpu_prefix_cache import HostOptions, Pending
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.testing import check_device
from tests.support.poison import poison
from tests.support.troubled_copiers import COPIERS
from tiny_model import TinyModel, answer_alone

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_an_engine.md").read_text()
PROMPTS, DEVICE_BLOCKS = 40, 40
CHUNK_BYTES = TinyModel(1, BLOCK_TOKENS).kv[:, :, 0].nbytes


class Watched(Engine):
    """Poisons the blocks that it hands out, and counts the events that its stories are for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.preempted = self.waits = self.aborted_loading = 0
        poison(self.blocks, "hand_out", self.host, self.model.kv)
        start = self.host.start

        def watched(*arguments, **named):
            answer = start(*arguments, **named)
            self.waits += isinstance(answer, Pending)
            return answer

        self.host.start = watched

    def _end(self, request, preempted=False):
        self.preempted += preempted
        super()._end(request, preempted)

    def abort(self, request):
        self.aborted_loading += request.id in self.loading
        super().abort(request)


def story(**said):
    plain = {"seed": 1, "offload": "lazy", "host_chunks": 512, "policy": "lru", "threads": False}
    return {**plain, "copies": "as it is", "aborts": 0.0, "reset": False} | said


STORIES = {
    "lazy": story(),
    "eager": story(offload="eager"),
    "aborts": story(offload="eager", aborts=0.3, seed=2),
    "late, aborts": story(copies="late", aborts=0.3, seed=3),
    "copies fail": story(offload="eager", copies="fails", aborts=0.3, seed=4),
    "a host smaller than the device": story(host_chunks=30, policy="arc", seed=5),
    "a reset": story(offload="eager", reset=True, copies="late", seed=6),
    "threads": story(threads=True, aborts=0.3, seed=7),
}


@cache
def served(name):
    told = STORIES.get(name) or story(copies="corrupts")
    engine = Watched(
        DEVICE_BLOCKS,
        host_bytes=told["host_chunks"] * CHUNK_BYTES,
        max_model_len=1000,
        options=HostOptions(
            offload=told["offload"],
            policy=told["policy"],
            threads=told["threads"],
            strict=True,
            wrap_copier=COPIERS[told["copies"]],
        ),
    )
    draw = random.Random(told["seed"])
    todo = list(prompts(told["seed"]))
    alive = {}
    answers = []
    while todo or not engine.is_idle:
        for request in todo[:2]:
            alive[request.id] = request
            engine.add(request)
        del todo[:2]
        answers += [alive.pop(request.id) for request in engine.step()]
        engine.host.cache.check_valid()
        for request in list(alive.values()):
            if draw.random() < (told["aborts"] if request.id in engine.loading else told["aborts"] / 20):
                engine.abort(alive.pop(request.id))
        if told["reset"] and len(todo) == PROMPTS // 2:
            engine.host.reset()
    engine.host.close()
    return engine, answers


def prompts(seed):
    lengths = random.Random(seed)
    for id, prompt in enumerate(batching_engine.prompts(PROMPTS, seed)):
        yield Request(id, prompt, lengths.randrange(1, 40))


def differing(answers):
    for request in answers:
        tokens, logits = answer_alone(request.tokens[: request.num_prompt], request.end - request.num_prompt)
        if request.answer != tokens or not torch.allclose(torch.stack(request.logits), logits, atol=1e-6):
            yield request.id


@pytest.mark.parametrize("name", STORIES)
def test_answers_are_those_of_the_model_alone(name):
    engine, answers = served(name)
    assert list(differing(answers)) == []
    assert len(answers) == PROMPTS or STORIES[name]["aborts"]
    assert engine.host.statistics().cache.hit_tokens > 0, "nothing came from the host: this compares nothing"
    assert sorted(engine.blocks.queue) == list(range(DEVICE_BLOCKS)), "a block is lost, or twice in the queue"
    assert not any(engine.blocks.users)


def test_each_story_has_the_events_that_it_is_for():
    engines = [served(name)[0] for name in STORIES]
    assert all(sum(getattr(each, seen) for each in engines) for seen in ("preempted", "waits", "aborted_loading"))
    assert any(each.host.statistics().cache.loads_failed for each in engines)


def test_a_copier_that_damages_bytes_is_seen():
    assert len(list(differing(served("corrupted")[1]))) > 3


class Trial:
    """Answers to `check_device` about the engine's blocks, as docs/adding_an_engine.md shows it."""

    chunk_blocks = 1

    def __init__(self, num_blocks):
        self.manager = Blocks(num_blocks)
        self.device = BlocksDevice(self.manager)

    def take(self, keys, cached, tokens):
        found = self.manager.cached(keys[:cached])
        missing = len(keys) - cached
        if missing > len(self.manager.queue) - sum(not self.manager.users[block] for block in found):
            return None
        self.manager.use(found)
        return SimpleNamespace(keys=keys, table=found + [self.manager.hand_out() for _ in range(missing)])

    def blocks(self, request):
        return [[block] for block in request.table]

    def computed(self, request, chunks):
        for block, key in zip(request.table[:chunks], request.keys, strict=False):
            self.manager.computed(block, key)

    def free(self, request):
        self.manager.free(request.table)


def test_its_blocks_keep_the_contract_of_a_device():
    check_device(lambda: Trial(7))


# The page


def test_code_on_the_page_is_that_of_the_engine_and_of_this_file():
    code = inspect.getsource(batching_engine) + Path(__file__).read_text()
    shown = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "# sketch" not in block]
    assert len(shown) > 3
    for block in shown:
        for piece in re.split(r"\n *\.\.\.\n", block):
            assert _dedented(piece) in _dedented(code), f"not in the example:\n{piece}"


def _dedented(code):
    return "\n".join(line.strip() for line in code.strip().splitlines() if line.strip())


def test_the_page_names_the_members_of_a_device_that_are_required():
    def is_required(name):
        source = inspect.getsource(member.fget if isinstance(member := vars(Device)[name], property) else member)
        return "return" not in re.sub(r'""".*?"""', "", source, flags=re.DOTALL)

    members = [name for name in vars(Device) if not name.startswith("_")]
    [named] = re.findall(r"Seven members are required: (.*?); ten others have\s+defaults", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", named) == [name for name in members if is_required(name)]
    assert len(members) == 17


def test_the_example_runs():
    ran = subprocess.run([sys.executable, ROOT / "examples" / "batching_engine.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(r"\d+ tokens of prompts, [1-9]\d* of them loaded from the host\n.*loaded\n", ran.stdout)
