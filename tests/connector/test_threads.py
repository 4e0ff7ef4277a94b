"""Threads share one generator: each gets its own answers, and each request has an id of its own."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from connector.transformers import PrefixCachedGenerator
from cpu_prefix_cache import FileTier
from random_models import build_family
from tests.connector.serving import document

THREADS, PROMPTS = 4, 6


@pytest.fixture
def quick_switches():
    """Python changes from thread to thread as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def prompts_of(thread):
    """Half of each prompt is the other threads' too."""
    return [[*document(number, 48), *document(100 * thread + number, 20)] for number in range(PROMPTS)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_four_threads_get_their_own_answers(family, batch_size, quick_switches):
    torch.set_num_threads(1)
    model = build_family(family, hidden=32, layers=2, window=32)
    usual = dict(device_blocks=30, host_bytes=1 << 22, offload="eager", batch_size=batch_size)
    with PrefixCachedGenerator(model, **usual) as alone:
        expected = [[each.tokens for each in alone.generate(prompts_of(thread), 8)] for thread in range(THREADS)]
    begin = threading.Barrier(THREADS)
    with PrefixCachedGenerator(model, **usual) as generator:

        def work(thread):
            begin.wait()
            if thread % 2:  # one by one
                return [generator.answer(prompt, 8).tokens for prompt in prompts_of(thread)]
            return [each.tokens for each in generator.generate(prompts_of(thread), 8)]

        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(work, range(THREADS), timeout=300))
        assert answers == expected
        statistics, device = generator.statistics(), generator.pool.statistics()
        assert (statistics.running, statistics.storing, statistics.loading) == (0, 0, 0)
        assert (device.pinned, device.writing) == (0, 0)
        assert generator._served == THREADS * PROMPTS or batch_size > 1  # a request that finds no room comes again


def test_a_processor_may_start_another_answer():
    model = build_family("llama", hidden=32, layers=2, window=32)
    with PrefixCachedGenerator(model, device_blocks=30, host_bytes=1 << 22) as generator:
        inner = []

        def ask(input_ids, scores):
            if not inner:
                inner.append(generator.answer(document(2, 30), 4, do_sample=False).tokens)
            return scores

        generator.answer(document(1, 30), 4, do_sample=False, logits_processor=[ask])
        assert inner == [generator.answer(document(2, 30), 4, do_sample=False).tokens]


def test_statistics_wait_for_no_batch(tmp_path):
    """A streamer's reader may take statistics while `put` waits for it."""
    model = build_family("llama", hidden=32, layers=2, window=32)
    answering, read = threading.Event(), threading.Event()

    class Waiting(BaseStreamer):
        def put(self, value):
            answering.set()
            read.wait(60)

        def end(self):
            pass

    below = FileTier(str(tmp_path), 1 << 24)
    with (
        PrefixCachedGenerator(model, device_blocks=30, host_bytes=1 << 22, below=below) as generator,
        ThreadPoolExecutor(2) as pool,
    ):
        answer = pool.submit(generator.answer, document(1, 30), 4, do_sample=False, streamer=Waiting())
        try:
            assert answering.wait(60)
            asked = pool.submit(lambda: (generator.statistics(), generator.tier_statistics()))
            statistics, tier = asked.result(timeout=20)
            assert not answer.done() and statistics is not None and tier is not None
        finally:
            read.set()
        assert len(answer.result(timeout=60).tokens) == 4
