"""Whole engines on a HostCache: the two of `examples/`, one with a queue of free blocks and one with a radix tree.

Requests come, are preempted (only the first engine does that), aborted and answered, while copies end late, fail, or
are outlived by a reset. Every answer is that of the model alone, logit by logit; at the end no block is lost.
"""

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import batching_engine
from cpu_prefix_cache.messages.plan import Direction
from cpu_prefix_cache.testing import MeddlingCopier
from radix_engine import engine as radix_engine
from radix_engine import host as radix_host
from tests.support.host_options import with_options
from tests.support.poison import poison
from tiny_model import TinyModel, answer_alone

DEVICE_TOKENS, CHUNK_TOKENS = 160, 16
answer = cache(lambda prompt, num_output: answer_alone(prompt, num_output))


class CopiesWhenTold(MeddlingCopier):
    """Copies move, fail or are damaged when the story moves them, or when somebody waits for them; in any order."""

    def __init__(self, copier, damages=False):
        super().__init__(copier)
        self.waiting, self.damages = [], damages

    def submit(self, direction, copies, after):
        waiting = SimpleNamespace(direction=direction, copies=copies, error=None, unfit=tuple)
        waiting.passed = lambda: self.passed(waiting)
        waiting.until_passed = lambda: self.moves(waiting)
        waiting.reads = waiting
        self.waiting.append(waiting)
        return waiting

    def moves(self, waiting):
        if waiting in self.waiting:
            self.waiting.remove(waiting)
            self.copy(waiting.direction, waiting.copies)
            if self.damages and waiting.direction is Direction.LOAD:
                self.kv[:, :, list(waiting.copies[0].device_blocks)] = 0

    def fails(self, waiting):
        self.waiting.remove(waiting)
        waiting.error = RuntimeError("this copy fails")

    def passed(self, waiting):
        if waiting.error is not None:
            raise waiting.error
        return waiting not in self.waiting


class Queue:
    """The engine of batching_engine.py."""

    Request = batching_engine.Request

    def __init__(self, **options):
        self.engine = batching_engine.Engine(DEVICE_TOKENS // batching_engine.BLOCK_TOKENS, step_tokens=48, **options)
        self.host, self.kv = self.engine.host, self.engine.model.kv
        self.add, self.abort = self.engine.add, self.engine.abort
        poison(self.engine.blocks, "hand_out", self.host, self.kv)

    def is_whole(self):
        blocks = self.engine.blocks
        return sorted(blocks.queue) == list(range(len(blocks.users))) and not any(blocks.users)


class Radix:
    """The engine of radix_engine/. Two prompts often part within a page or a chunk of its tree."""

    Request = radix_engine.Request

    def __init__(self, page_tokens, **options):
        self.engine = radix_engine.Engine(DEVICE_TOKENS // page_tokens, page_tokens, chunk_tokens=20)
        self.host, self.kv = radix_host.Host(self.engine, max_step_tokens=120, **options), self.engine.model.kv
        self.abort = self.engine.end
        poison(self.engine.cache, "allocate", self.host, self.kv)

    def add(self, request):
        self.engine.queue.append(request)

    def is_whole(self):
        tree = self.engine.cache
        return not tree.promised and len(tree.free_pages) + tree.evictable == tree.num_pages


class Machine(RuleBasedStateMachine):
    damages = False

    @initialize(
        page_tokens=st.sampled_from([None, 1, 4]),
        offload=st.sampled_from(["lazy", "eager"]),
        host_chunks=st.sampled_from([6, 100]),
        policy=st.sampled_from(["lru", "arc"]),
    )
    def begin(self, page_tokens, **options):
        chunk_bytes = TinyModel(1, CHUNK_TOKENS).kv.nbytes
        options["host_bytes"] = options.pop("host_chunks") * chunk_bytes
        options |= dict(max_model_len=1000, strict=True, wrap_copier=self.wrap)
        options = with_options(**options)
        self.used = Queue(**options) if page_tokens is None else Radix(page_tokens, **options)
        self.copier.kv = self.used.kv
        self.requests = []
        self.arrived = 0
        self.answered = 0

    def wrap(self, copier, tensors):
        self.copier = CopiesWhenTold(copier, self.damages)
        return self.copier

    @rule(document=st.integers(0, 2), shared=st.integers(30, 120), own=st.integers(1, 30), number=st.integers(1, 3))
    def arrive(self, document, shared, own, number):
        """Requests that share tokens, and end with some of their own."""
        draw = random.Random(document)
        prefix = [draw.randrange(50) for _ in range(shared)]
        for at in range(number):
            prompt, num_output = prefix[: shared - 10 * at] + [own + at] * (own % 7 + 1), own % 11 + 1
            request = self.used.Request(f"request {self.arrived}", prompt, num_output)
            request.expected = answer(tuple(prompt), num_output)
            self.arrived += 1
            self.requests.append(request)
            self.used.add(request)

    more_arrive = arrive

    @rule(steps=st.integers(1, 20))
    def steps(self, steps):
        for _ in range(steps):
            for request in self.used.engine.step():
                self.requests.remove(request)
                self.check(request)

    steps_on = steps

    def check(self, request):
        tokens, logits = request.expected
        self.answered += 1
        assert request.tokens[request.num_prompt :] == tokens
        assert torch.allclose(torch.stack(request.logits), logits, atol=1e-6)

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 15))
    def is_aborted(self, at):
        self.used.abort(self.requests.pop(at % len(self.requests)))

    @precondition(lambda self: self.copier.waiting)
    @rule(at=st.integers(0, 15), well=st.integers(0, 3))
    def a_copy_ends(self, at, well):
        copy = self.copier.waiting[at % len(self.copier.waiting)]
        (self.copier.moves if well else self.copier.fails)(copy)

    @rule(often=st.integers(0, 4))
    def is_reset(self, often):
        if not often:
            self.used.host.reset()

    @invariant()
    def is_valid(self):
        self.used.host.cache.check_valid()

    def teardown(self):
        if "used" not in vars(self):
            return
        for _ in range(2_000):
            if self.used.engine.is_idle:
                break
            self.steps(1)
        assert not self.requests, "a request is never answered"
        assert self.used.is_whole(), "a device block is lost"
        self.used.host.close()


TestEngines = Machine.TestCase


class Damaged(Machine):
    damages = True


def test_a_copier_that_damages_bytes_is_seen():
    told = settings(derandomize=True, phases=[Phase.generate])
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Damaged, settings=told)
