"""Tokens that are no part of a prompt's key: padding, and placeholders of images and sound."""

import pytest
from transformers import GenerationConfig

from connector.transformers.inputs import padding_of, placeholders


def test_placeholders_are_found_under_the_names_that_models_give_them():
    names = ("img_context", "sound_context", "media_placeholder", "image", "video", "audio", "placeholder")
    found = {number: f"{name}_token_id" for number, name in enumerate(names)}
    ordinary = {"img_start_token_id": 20, "media_end_token_id": 21, "pad_token_id": 22, "timestamp_token_id": 23}
    assert placeholders({"inner": {name: number for number, name in found.items()}, **ordinary}) == found


@pytest.mark.parametrize(
    ("pad", "eos", "padding"), [(7, 5, 7), (7, [5, 6], 7), (5, 5, None), (5, [6, 5], None), (None, 5, None)]
)
def test_padding_is_what_generate_takes_for_it(pad, eos, padding):
    assert padding_of(GenerationConfig(pad_token_id=pad, eos_token_id=eos)) == padding
