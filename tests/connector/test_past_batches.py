"""Batches of prompts from host memory, padded on the left, continued by `model.generate` beside `generate` alone.

Logits of every step and row are equal within 1e-4 of their deviation, tokens are equal. In the controls one block of a
group is zeroed while it is loaded, and the comparison fails.
"""

from functools import cache

import pytest
import torch

from connector.transformers import ModelPast, Past, PromptRefused
from cpu_prefix_cache.testing import CorruptingCopier
from random_models import FAMILIES
from tests.connector.running import BLOCK, apart, document, error
from tests.connector.test_past import GREEDY, TOLERANCE, asked_right, cache_of, check_at_rest, evict_all, model

PAD = 319
SEEN = 7  # of 8 damaged batches
families = pytest.mark.parametrize("family", FAMILIES)
MIXED = (100, 33, 1, 81)  # tokens of the rows: a short one has no token where a long one hits


def padded(prompts):
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[PAD] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    return dict(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))


def generated(family, inputs, **options):
    options = dict(return_dict_in_generate=True, output_logits=True, pad_token_id=PAD) | GREEDY | options
    return model(family).generate(**inputs, **options)


@cache
def plain(family, prompts):
    return generated(family, padded(prompts))


def asked(cache, family, prompts):
    """A batch answered with its past: that, how far the logits are off, and whether the tokens are equal."""
    with cache.past(**padded(prompts)) as past:
        ours = generated(family, past.inputs, past_key_values=past)
    return past, *apart(ours, plain(family, tuple(map(tuple, prompts))))


def batch_right(cache, family, prompts):
    past, off, is_same = asked(cache, family, prompts)
    assert off <= TOLERANCE and is_same
    return past


def of_lengths(*lengths, seed=0):
    return [document(100 * seed + length, length) for length in lengths]


@families
def test_rows_of_all_lengths_come_back_from_the_host(family):
    with cache_of(family) as cache:
        prompts = of_lengths(*MIXED)
        assert batch_right(cache, family, prompts).hit_tokens == 0
        evict_all(cache)
        past = batch_right(cache, family, prompts)
        assert past.hit_tokens == 96 + 32 + 0 + 80 > past.device_hit_tokens
        check_at_rest(cache)


def test_ids_and_mask_may_be_lists():
    prompts = of_lengths(100, 64)
    inputs = padded(prompts)
    with cache_of("llama") as cache:
        for hit in (0, 96 + 48):
            with cache.past(**{name: value.tolist() for name, value in inputs.items()}) as past:
                ours = generated("llama", past.inputs, past_key_values=past)
            off, is_same = apart(ours, generated("llama", inputs))
            assert past.hit_tokens == hit and off <= TOLERANCE and is_same
        with cache.past(prompts[0], [1] * 100) as past:
            assert past.hit_tokens == 96 and past.inputs["attention_mask"].shape == (1, 100)
        with pytest.raises(PromptRefused, match="pad on the left"), cache.past(prompts[0], [[1], [1, 1]]):
            pass


@families
def test_a_row_and_its_prompt_alone_are_one(family):
    with cache_of(family) as cache:
        prompts = of_lengths(100, 64, 49)
        asked_right(cache, family, prompts[0])
        assert batch_right(cache, family, prompts).hit_tokens == 96
        for prompt, hit in zip(prompts, (96, 48, 48), strict=True):
            assert asked_right(cache, family, prompt).hit_tokens == hit
        check_at_rest(cache)


@pytest.mark.parametrize(
    ("family", "group"),
    [(family, group) for family in FAMILIES for group in range(len(ModelPast(model(family), BLOCK).groups))],
)
def test_a_damaged_block_of_each_group_shows(family, group):
    with cache_of(family, wrap_copier=lambda *args: CorruptingCopier(*args, group=group, loads=None)) as cache:
        batches = [of_lengths(113, 100, seed=seed) for seed in range(8)]
        for prompts in batches:
            batch_right(cache, family, prompts)
        evict_all(cache)
        assert sum(asked(cache, family, prompts)[1] > TOLERANCE for prompts in batches) >= SEEN


@pytest.mark.parametrize(("option", "value"), [("eos_token_id", 0), ("eos_token_id", 2), ("max_time", 1e-9)])
def test_the_first_batch_is_tried_whatever_ends_answers(option, value, monkeypatch):
    monkeypatch.setattr(model("llama").generation_config, option, value)
    monkeypatch.setitem(globals(), "plain", plain.__wrapped__)  # its answers are others
    with cache_of("llama") as cache:
        batch_right(cache, "llama", of_lengths(100, 64))


def test_a_model_that_answers_otherwise_in_a_batch_is_refused(monkeypatch):
    joined = Past.joined
    monkeypatch.setattr(Past, "joined", lambda pasts, pads, room: joined(pasts[::-1], pads, room))
    with cache_of("llama") as cache:
        with pytest.raises(PromptRefused, match="cannot continue from a past in a batch with padding"):
            asked(cache, "llama", of_lengths(90, 70))
        check_at_rest(cache)


def test_a_batch_without_padding_needs_no_mask():
    ids = torch.tensor(of_lengths(64, seed=1) + of_lengths(64, seed=2))
    with cache_of("qwen3_next") as cache:
        for hit in (0, 96):
            with cache.past(ids) as past:
                ours = generated("qwen3_next", past.inputs, past_key_values=past)
            assert past.hit_tokens == hit
        wanted = generated("qwen3_next", dict(input_ids=ids))
        assert error(ours.logits[-1], wanted.logits[-1]) <= TOLERANCE and torch.equal(ours.sequences, wanted.sequences)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_of_each_row_keep_its_prompt(family):
    options = dict(num_beams=3, num_return_sequences=2, output_logits=False)
    prompts = of_lengths(100, 33)
    with cache_of(family) as cache:
        for hit in (0, 128):
            with cache.past(**padded(prompts)) as past:
                ours = generated(family, past.inputs, past_key_values=past, **options)
            assert past.hit_tokens == hit
            assert torch.equal(ours.sequences, generated(family, padded(prompts), **options).sequences)
        for prompt, hit in zip(prompts, (96, 32), strict=True):
            assert asked_right(cache, family, prompt).hit_tokens == hit


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ([[1, 1, 0], [1, 1, 1]], "pad on the left"),
        ([[0, 1, 2], [1, 1, 1]], "a 1 for each token"),
        ([[1, 1, 1]], "the shape of input_ids"),
        ([[0, 0, 0], [1, 1, 1]], "at least one token"),
    ],
)
def test_other_masks_are_refused(mask, why):
    with (
        cache_of("llama") as cache,
        pytest.raises(PromptRefused, match=why),
        cache.past(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor(mask)),
    ):
        pass
