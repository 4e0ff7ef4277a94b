"""Prompts with images from host memory, continued by `model.generate`, beside `generate` without a cache.

Placeholder tokens are the same for all images. In the controls the digests of images are equal, or a block is zeroed
while it is loaded, and the comparison fails.
"""

import gc
import weakref
from functools import cache
from unittest.mock import ANY

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

from connector.transformers import HostPrefixCache, PromptRefused
from connector.transformers.inputs import Images
from cpu_prefix_cache import ConfigurationError, MisuseError, MultimodalItem
from cpu_prefix_cache.testing import CorruptingCopier
from tests.connector.running import apart, document
from tests.connector.test_past import GREEDY, TOLERANCE, check_at_rest

IMAGE, TOKENS = 300, 16  # the placeholder, and how many stand for one image: the tokens of a block
TEXT = dict(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    image_size=56,
    patch_size=14,
)


def _llava():
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_index=IMAGE)
    )


def _gemma3():
    layers = dict(sliding_window=32, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SiglipVisionConfig(**VISION),
            text_config=Gemma3TextConfig(**TEXT, **layers),
            mm_tokens_per_image=TOKENS,
            image_token_index=IMAGE,
        )
    )


FAMILIES = {"llava": _llava, "gemma3": _gemma3}
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def model(family):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = FAMILIES[family]().eval()
    for weight in made.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return made


def cache_of(family, **options):
    return HostPrefixCache(model(family), host_bytes="8MiB", offload="eager", max_model_len=256, **options)


def picture(seed):
    return torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(seed))


def prompt(family, *pictures, before=10, behind=70, seed=1):
    """Text, pictures, text."""
    placeholders = [IMAGE] * TOKENS * len(pictures)
    ids = torch.tensor([document(7, before) + placeholders + document(seed, behind)])
    kinds = dict(token_type_ids=(ids == IMAGE).long()) if family == "gemma3" else {}
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.cat(pictures), **kinds)


def generated(family, inputs, **options):
    return model(family).generate(
        **inputs, **options, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **GREEDY
    )


def asked(cache, family, inputs):
    """A prompt answered with its past: that, and how far the logits are off."""
    with cache.past(**inputs) as past:
        ours = generated(family, past.inputs, past_key_values=past)
    return past, apart(ours, generated(family, inputs))[0]


def asked_right(cache, family, inputs):
    past, off = asked(cache, family, inputs)
    assert off <= TOLERANCE
    return past


@families
def test_a_picture_that_comes_again_is_not_computed(family):
    with cache_of(family) as cache:
        assert asked_right(cache, family, prompt(family, picture(1))).hit_tokens == 0
        cache.forget_device()
        past = asked_right(cache, family, prompt(family, picture(1)))
        assert past.hit_tokens == 80 > past.device_hit_tokens
        assert list(past.inputs) == ["input_ids", "attention_mask"]
        check_at_rest(cache)


def test_pixels_are_free_once_their_past_has_ended():
    inputs = prompt("llava", picture(1))
    pixels = weakref.ref(inputs["pixel_values"])
    with cache_of("llava") as cache:
        with cache.past(**inputs) as past:
            generated("llava", past.inputs, past_key_values=past)
        del past, inputs
        gc.collect()
        assert pixels() is None


@families
def test_other_questions_about_a_picture_begin_behind_it(family):
    with cache_of(family) as cache:
        for seed, hit in ((1, 0), (2, 0 if family == "gemma3" else 32), (3, 32)):
            inputs = prompt(family, picture(1), before=16, seed=seed)
            assert asked_right(cache, family, inputs).hit_tokens == hit


@families
def test_two_pictures_of_the_same_tokens_never_share(family):
    with cache_of(family) as cache:
        for seed in (1, 2, 3):
            assert asked_right(cache, family, prompt(family, picture(seed))).hit_tokens == 0
        asked_right(cache, family, prompt(family, picture(1), picture(2)))
        assert asked_right(cache, family, prompt(family, picture(2), picture(1))).hit_tokens == 0


@families
def test_equal_digests_would_show(family, monkeypatch):
    monkeypatch.setattr(Images, "item", lambda images: MultimodalItem(images.first, images.end, b"the same"))
    with cache_of(family) as cache:
        asked_right(cache, family, prompt(family, picture(1)))
        past, off = asked(cache, family, prompt(family, picture(2)))
        assert past.hit_tokens == 80 and off > TOLERANCE


@families
def test_a_damaged_block_shows(family):
    with cache_of(family, wrap_copier=lambda *args: CorruptingCopier(*args, loads=None)) as cache:
        asked_right(cache, family, prompt(family, picture(1)))
        cache.forget_device()
        assert asked(cache, family, prompt(family, picture(1)))[1] > TOLERANCE


@families
def test_a_beginning_that_ends_inside_a_picture_is_not_resumed(family):
    with cache_of(family) as cache:
        for _ in range(2):
            assert asked_right(cache, family, prompt(family, picture(1), behind=4)).hit_tokens == 0
        check_at_rest(cache)


@families
def test_a_model_that_goes_on_otherwise_behind_a_picture_is_refused(family, monkeypatch):
    monkeypatch.setattr(Images, "up_to", lambda images, end: {"pixel_values": torch.rand(1, 3, 56, 56)})
    with cache_of(family) as cache:
        refused = pytest.raises(PromptRefused, match="cannot continue from a past behind images")
        with refused, cache.past(**prompt(family, picture(1))):
            pass


def test_a_model_that_keeps_positions_in_itself_is_refused():
    text = TEXT | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
    vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2)
    made = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE))
    with pytest.raises(ConfigurationError, match="keeps positions of its latest prompt in itself"):
        HostPrefixCache(made, host_bytes="8MiB")


ODD = {
    "give that input, too": dict(pixel_values=None),
    "leave them out": dict(input_ids=torch.arange(96)[None]),
    "must be tensors": dict(pixel_values=[picture(1)]),
    "must be zeros behind": dict(token_type_ids=torch.ones(1, 96, dtype=torch.long)),
    "give prompts with images singly": dict(input_ids=ANY, attention_mask=ANY),
}


@pytest.mark.parametrize("why", ODD)
def test_other_inputs_are_refused(why):
    given = prompt("llava", picture(1))
    inputs = given | {name: given[name].repeat(2, 1) if value is ANY else value for name, value in ODD[why].items()}
    with cache_of("llava") as cache, pytest.raises(PromptRefused, match=why), cache.past(**inputs):
        pass


@families
def test_hidden_states_with_drafts_are_refused_where_the_past_has_the_images(family):
    """Computed anew without its pixels, a placeholder would be a token like any other, and be kept so."""
    inputs, drafts = prompt(family, picture(1)), dict(prompt_lookup_num_tokens=4, output_hidden_states=True)
    with cache_of(family) as cache:
        asked_right(cache, family, inputs)
        with cache.past(**inputs) as past, pytest.raises(MisuseError, match="lack its images"):
            generated(family, past.inputs, past_key_values=past, **drafts)
        asked_right(cache, family, inputs)
