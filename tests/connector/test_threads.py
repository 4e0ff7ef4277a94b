"""Threads share one cache: each gets its own answers, and statistics wait for nobody's answer."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from connector.transformers import HostPrefixCache
from tests.connector.running import document
from tests.connector.serving import Pair, generated, model

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


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_four_threads_get_their_own_answers(family, quick_switches):
    expected = [[generated(model(family), ids, new_tokens=8)[1] for ids in prompts_of(at)] for at in range(THREADS)]
    pair, begin = Pair(family, "eager"), threading.Barrier(THREADS)

    def work(thread):
        begin.wait()
        answers = []
        for ids in prompts_of(thread):
            with pair.cache.past(ids) as past:
                answers.append(generated(pair.cache.model, ids, past, new_tokens=8)[1])
        return answers

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, range(THREADS), timeout=300)) == expected
    assert pair.is_at_rest()


def test_statistics_and_other_pasts_wait_for_no_answer():
    with (
        HostPrefixCache(model("llama"), host_bytes=1 << 22) as cache,
        ThreadPoolExecutor(1) as other,
        cache.past(document(1, 30)) as past,
    ):
        assert other.submit(cache.statistics).result(timeout=60) is not None
        other.submit(answered, cache, document(2, 30)).result(timeout=60)
        generated(cache.model, document(1, 30), past)


def answered(cache, ids):
    with cache.past(ids) as past:
        generated(cache.model, ids, past)
