"""A checkpoint shortly before the end of a prompt is taken when its past ends, not before it is handed out.

A document of 49 tokens has left a checkpoint at 48. One of 75 begins with it and needs one at 64: the 27 tokens that
are left are computed by `generate`, and then 16 of them again. In the control they are others.
"""

import pytest
import torch

from connector.transformers import host_prefix_cache
from connector.transformers.running import logits
from cpu_prefix_cache import OFFLOAD_MODES
from tests.connector.running import document
from tests.connector.serving import Pair, on_host

FAMILIES = ("gemma3", "gpt_oss", "qwen3_5", "falcon_h1", "lfm2")


def passes_of(pair, monkeypatch):
    """How many tokens each forward pass of the cache itself computes from now on."""
    passes = []

    def counted(of, ids, past, **others):
        passes.append(ids.shape[1] - past.get_seq_length())
        return logits(of, ids, past, **others)

    monkeypatch.setattr(host_prefix_cache, "logits", counted)
    return passes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", OFFLOAD_MODES)
def test_a_checkpoint_shortly_before_the_end_costs_the_first_token_no_forward_pass(family, mode, monkeypatch):
    pair, whole = Pair(family, mode), document(1, 75)
    pair.ask_right(whole[:49], 1)
    passes = passes_of(pair, monkeypatch)
    with pair.cache.past(whole):
        assert passes == []
    assert pair.ask_right(whole, 1).hit_tokens == 48
    assert passes == [16]
    assert pair.ask_right(whole, 1).hit_tokens == 64
    if mode == "eager":
        pair.cache.forget_device()
        assert on_host(pair.ask_right(whole)) == 64
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", FAMILIES)
def test_where_more_tokens_are_left_they_are_computed_up_to_the_checkpoint(family, monkeypatch):
    pair = Pair(family)
    passes = passes_of(pair, monkeypatch)
    assert pair.ask_right(document(3, 60), 1).hit_tokens == 0
    assert passes == [48]
    assert pair.ask_right(document(3, 60), 1).device_hit_tokens == 48


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_control_a_checkpoint_of_other_tokens_shows(family, monkeypatch):
    pair, shown = Pair(family), 0
    for seed in range(8):
        whole = document(seed, 75)
        pair.ask_right(whole[:49], 1)
        with monkeypatch.context() as patch:
            patch.setattr(host_prefix_cache, "logits", lambda of, ids, past: logits(of, torch.zeros_like(ids), past))
            pair.ask_right(whole, 1)
        past, off, _ = pair.ask(whole, 1)
        assert past.hit_tokens == 64
        shown += off > pair.tolerance
        pair.cache.reset()
    assert shown >= 7
