"""Nothing of a prompt is ignored: what is not token ids is refused by its name, and padding is what `generate` sees."""

import numpy as np
import pytest
import torch
from transformers import (
    BatchFeature,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from connector.transformers import PrefixCachedGenerator, PromptRefused
from connector.transformers.prompts import placeholders
from random_models import build_family, initialise
from tests.connector.serving import document

IMAGE, VIDEO = 301, 302
PATCH, MERGE = 14, 2
NEW_TOKENS = 6


def generator_of(model, **options):
    return PrefixCachedGenerator(model, device_blocks=48, host_bytes=1 << 22, max_model_len=256, **options)


@pytest.fixture(scope="module")
def sees():
    """A small Qwen2-VL."""
    torch.manual_seed(0)
    text = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]),
    )
    vision = dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=PATCH, spatial_merge_size=MERGE)
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=303, vision_end_token_id=304)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    initialise(model)
    return model.eval()


def with_an_image(tokens):
    """Result of a processor for one small image before these tokens."""
    ids = torch.tensor([[303, IMAGE, 304, *tokens]])
    patches = torch.randn(MERGE * MERGE, 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([[1, MERGE, MERGE]])
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": patches, "image_grid_thw": grid}
    return BatchFeature(data)


@pytest.mark.parametrize("nested", [False, True])
def test_images_are_refused_by_name(sees, nested):
    prompt = with_an_image(document(1, 40))
    with generator_of(sees) as generator:
        with pytest.raises(PromptRefused, match=r"has pixel_values, image_grid_thw: use model\.generate"):
            generator.answer(prompt, NEW_TOKENS)
        with pytest.raises(PromptRefused, match="pixel_values"):
            next(generator.generate([prompt, prompt] if nested else prompt, NEW_TOKENS))


@pytest.mark.parametrize(("token", "name"), [(IMAGE, "image_token_id"), (VIDEO, "video_token_id")])
def test_a_placeholder_without_its_pixels_is_refused(sees, token, name):
    with generator_of(sees) as generator:
        with pytest.raises(PromptRefused, match=name):
            generator.answer([*document(1, 20), token], NEW_TOKENS)
        with pytest.raises(PromptRefused, match=name):
            generator.answer({"input_ids": [token], "attention_mask": [1]}, NEW_TOKENS)


def test_a_model_that_sees_answers_what_is_text_alone(sees):
    ids = [303, 304, *document(1, 40)]  # what begins and ends an image is an ordinary token
    prompt = with_an_image(document(1, 40))
    seen = sees.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, -NEW_TOKENS:].tolist()
    with generator_of(sees) as generator:
        answers = [list(generator.answer(ids, NEW_TOKENS, do_sample=False).tokens) for _ in range(2)]
    expected = sees.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(ids) :].tolist()
    assert answers == [expected] * 2
    assert seen != expected  # the control: an image changes the answer


@pytest.fixture(scope="module")
def llama():
    return build_family("llama", hidden=32, layers=2, window=32)


def test_a_key_that_is_none_or_ignored_by_the_model_passes(llama):
    ids = document(1, 40)
    with generator_of(llama) as generator:
        plain = generator.answer(ids, NEW_TOKENS)
        zeros = np.zeros((1, 40), dtype=np.int64)
        same = generator.answer({"input_ids": ids, "token_type_ids": zeros, "pixel_values": None}, NEW_TOKENS)
        assert same.tokens == plain.tokens
        for value in (np.ones((1, 40), dtype=np.int64), [0] * 39, 0, "none"):
            with pytest.raises(PromptRefused, match="token_type_ids"):
                generator.answer({"input_ids": ids, "token_type_ids": value}, NEW_TOKENS)
        with pytest.raises(PromptRefused, match="position_ids"):
            generator.answer({"input_ids": ids, "position_ids": [0] * 40}, NEW_TOKENS)


def test_zeros_that_a_model_reads_are_refused():
    """GPT-2 adds the embedding of token 0 to each token where `token_type_ids` are zeros."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=256, n_embd=32, n_layer=1, n_head=2)).eval()
    with generator_of(model) as generator, pytest.raises(PromptRefused, match="token_type_ids"):
        generator.answer({"input_ids": [1, 2, 3], "token_type_ids": [0, 0, 0]}, NEW_TOKENS)


# --- padding without a mask --------------------------------------------------------------------------------------


PADDED = [[0] * 9 + document(2, 24), document(3, 33)]  # the second has a 0, too, which `generate` masks


def as_generate_answers(model, rows, **options):
    answers = model.generate(torch.tensor(rows), max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return [tuple(each) for each in answers[:, len(rows[0]) :].tolist()]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    "form", [torch.tensor, np.array, list, lambda rows: {"input_ids": rows}, lambda rows: iter([*rows])]
)
def test_padding_without_a_mask_is_what_generate_takes_for_it(llama, form, batch_size):
    with generator_of(llama, batch_size=batch_size) as generator:
        for options in ({"pad_token_id": 0}, {"pad_token_id": 0, "eos_token_id": [7, 9]}):
            got = list(generator.generate(form(PADDED), NEW_TOKENS, do_sample=False, **options))
            assert [each.tokens for each in got] == as_generate_answers(llama, PADDED, **options)
            assert [each.prompt_tokens for each in got] == [24, 32]


@pytest.mark.parametrize("options", [{}, {"pad_token_id": 5}, {"pad_token_id": 0, "eos_token_id": [0, 319]}])
def test_a_token_that_generate_does_not_take_for_padding_counts(llama, options):
    with generator_of(llama) as generator:
        got = list(generator.generate(torch.tensor(PADDED), NEW_TOKENS, do_sample=False, **options))
    assert [each.prompt_tokens for each in got] == [33, 33]
    rows = [as_generate_answers(llama, [row], **options)[0] for row in PADDED]
    assert [each.tokens for each in got] == rows
    assert rows[0] != as_generate_answers(llama, PADDED, pad_token_id=0)[0]  # the control: padding shows


def test_tokens_that_a_mask_keeps_count_whatever_they_are(llama):
    prompt = {"input_ids": PADDED, "attention_mask": [[1] * 33] * 2}
    with generator_of(llama) as generator:
        got = list(generator.generate(prompt, NEW_TOKENS, do_sample=False, pad_token_id=0))
    assert [each.prompt_tokens for each in got] == [33, 33]
    mask = torch.ones(2, 33, dtype=torch.long)
    expected = as_generate_answers(llama, PADDED, pad_token_id=0, attention_mask=mask)
    assert [each.tokens for each in got] == expected


# --- values that only look like token ids or a mask -------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([True, False]),
        np.array([True, False]),
        [True, 2],
        {"input_ids": [[True, False]]},
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        [b"abc", b"d"],
        {"input_ids": b"abc"},
        {"input_ids": [b"abc"]},
        np.array([b"a", b"b"]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_truth_values_and_bytes_are_no_token_ids(llama, ids):
    with (
        generator_of(llama) as generator,
        pytest.raises(PromptRefused, match="token ids, which are integers"),
    ):
        list(generator.generate(ids, NEW_TOKENS))


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.bool])
def test_a_mask_is_of_any_type_that_generate_takes(llama, dtype):
    mask = torch.tensor([[0] * 9 + [1] * 24, [1] * 33]).to(dtype)
    expected = as_generate_answers(llama, PADDED, attention_mask=mask)
    with generator_of(llama) as generator:
        for form in (mask, mask.numpy(), mask.tolist()):
            got = generator.generate({"input_ids": PADDED, "attention_mask": form}, NEW_TOKENS, do_sample=False)
            assert [each.tokens for each in got] == expected


@pytest.mark.parametrize("mask", [[0.5, 1], [0, -1], [0.0, float("-inf")], [1, 2], ["1", "1"], np.ones((1, 1, 2, 2))])
def test_another_mask_is_refused_as_a_mask(llama, mask):
    with generator_of(llama) as generator, pytest.raises(PromptRefused, match="attention_mask") as refused:
        generator.answer({"input_ids": [1, 2], "attention_mask": mask}, NEW_TOKENS)
    assert "token ids" not in str(refused.value)


def test_placeholders_are_found_under_the_names_that_models_give_them():
    names = ("img_context", "sound_context", "media_placeholder", "image", "video", "audio", "placeholder")
    found = {number: f"{name}_token_id" for number, name in enumerate(names)}
    ordinary = {"img_start_token_id": 20, "media_end_token_id": 21, "pad_token_id": 22, "timestamp_token_id": 23}
    assert placeholders({"inner": {name: number for number, name in found.items()}, **ordinary}) == found
