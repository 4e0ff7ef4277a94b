"""From the beginning to the end of a cache: memory given back, resets, a cast, and a processor that interferes."""

import weakref

import pytest
import torch
from transformers import LogitsProcessor

from connector.transformers import HostPrefixCache
from connector.transformers.changes import Weights
from cpu_prefix_cache import MisuseError
from random_models import build_family
from tests.connector.running import document, error
from tests.connector.serving import Pair, generated

IDS = document(1, 61)


def own(seed=0):
    torch.set_num_threads(1)
    return build_family("llama", hidden=32, layers=2, window=32, seed=seed)


def answered(cache):
    """The past, and how far its logits are from those without it."""
    with cache.past(IDS) as past:
        logits, _ = generated(cache.model, IDS, past)
    wanted, _ = generated(cache.model, IDS)
    return past, max(error(*both) for both in zip(logits, wanted, strict=True))


def test_a_closed_cache_gives_its_memory_back():
    with HostPrefixCache(own(), host_bytes=1 << 22) as cache:
        answered(cache)
        memories = [weakref.ref(each.untyped_storage()) for each in (cache._kv.region, cache._host._arena.blocks)]
        assert all(each() is not None for each in memories)
    assert [each() for each in memories] == [None, None]
    assert cache.statistics().host_bytes > 0  # what was counted is still there
    for call in (lambda: answered(cache), cache.reset, cache.forget_device):
        with pytest.raises(MisuseError, match="the cache is closed"):
            call()


def test_a_cache_that_is_closed_while_a_past_is_open_keeps_nothing_of_it():
    cache = HostPrefixCache(own(), host_bytes=1 << 22)
    with cache.past(IDS) as past:
        cache.close()
        assert generated(cache.model, IDS, past)[1] == generated(cache.model, IDS)[1]


@pytest.mark.parametrize("resets", [True, False])
def test_after_a_reset_nothing_from_before_is_used(resets, monkeypatch, caplog):
    """New weights and no reset is the control: what the old ones computed shows."""
    if not resets:
        monkeypatch.setattr(Weights, "follow", lambda weights: None)
    with HostPrefixCache(own(), host_bytes=1 << 22, offload="eager") as cache:
        answered(cache)
        cache.model.load_state_dict(own(seed=1).state_dict())
        if resets:
            cache.reset()
        past, off = answered(cache)
        assert past.hit_tokens == (0 if resets else 48)
        assert (off <= 1e-4) is resets
        assert not caplog.records, "a caller that resets gets no warning of new weights"
        cache.reset()
        assert answered(cache)[0].hit_tokens == 0
        cache.forget_device()
        past, off = answered(cache)
        assert (past.device_hit_tokens, past.hit_tokens) == (0, 48) and off <= 1e-4


class Resetting(LogitsProcessor):
    """Resets a cache in the middle of an answer."""

    def __init__(self, cache):
        self.cache = cache

    def __call__(self, ids, scores):
        self.cache.reset()
        return scores


def test_a_processor_that_resets_the_cache_costs_the_prompt_its_caching_and_no_block():
    pair = Pair("gemma3")
    for _ in range(3):
        with pair.cache.past(IDS) as past:
            generated(pair.cache.model, IDS, past, logits_processor=[Resetting(pair.cache)])
        assert past.hit_tokens == 0 and pair.is_at_rest()
    pair.ask_right(IDS)


def test_a_model_that_is_cast_needs_another_cache():
    with HostPrefixCache(own(), host_bytes=1 << 22) as cache:
        answered(cache)
        cache.model.to(torch.bfloat16)
        with pytest.raises(MisuseError, match=r"computes in torch.bfloat16, .*make another cache"):
            answered(cache)


@pytest.mark.parametrize("hits", [False, True])
def test_a_model_that_computes_in_another_dtype_keeps_nothing(hits):
    with HostPrefixCache(own(), host_bytes=1 << 22) as cache:
        if hits:
            answered(cache)
        refused = pytest.raises(MisuseError, match=r"computes in torch\.bfloat16")
        with refused, cache.past(IDS) as past, torch.autocast("cpu", torch.bfloat16):
            generated(cache.model, IDS, past)
        past, off = answered(cache)
        assert bool(past.hit_tokens) == hits and off < 1e-4
