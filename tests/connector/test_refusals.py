"""Models and prompts the generator cannot serve rightly are refused by name, before anything runs."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MptConfig,
    MptForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

from builtin_models import build_model
from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.testing import MeddlingCopier

SMALL = dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


def a_state():
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2))


def an_encoder():
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    return BartForConditionalGeneration(BartConfig(vocab_size=320, **sizes))


def no_head():
    return LlamaModel(LlamaConfig(**SMALL))


def a_cache_of_its_own():
    return MiniMaxForCausalLM(MiniMaxConfig(**SMALL, num_key_value_heads=2, num_local_experts=2))


def no_cache_at_all():
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=320, n_embd=64, n_layer=2, n_head=2))


def a_cache_that_is_off():
    return MptForCausalLM(MptConfig(vocab_size=320, d_model=64, n_heads=4, n_layers=2))


def factors_that_change_with_the_length():
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=8.0, rope_theta=1e4)
    rope["original_max_position_embeddings"] = 64
    config = Phi3Config(
        **SMALL, max_position_embeddings=512, original_max_position_embeddings=64, rope_parameters=rope, pad_token_id=0
    )
    return Phi3ForCausalLM(config)


def a_mask_that_looks_ahead():
    return BertLMHeadModel(BertConfig(**SMALL))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (a_state, "does not say how long a prompt may be"),
        (factors_that_change_with_the_length, "longrope"),
        (a_mask_that_looks_ahead, "cannot continue from its own cache"),
        (an_encoder, "BartForConditionalGeneration has an encoder"),
        (no_head, "LlamaModel has no head to generate with: load it by AutoModelForCausalLM"),
        (a_cache_of_its_own, "MiniMaxForCausalLM fails in a forward pass with transformers' Cache: ValueError"),
        (no_cache_at_all, "OpenAIGPTLMHeadModel keeps the past of its layer 0 outside transformers' Cache"),
        (a_cache_that_is_off, "MptForCausalLM says use_cache=False.*set model.generation_config.use_cache = True"),
    ],
)
def test_a_model_whose_past_is_of_another_kind_is_refused(model, sentence):
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=sentence):
        PrefixCachedGenerator(model(), device_blocks=8, host_bytes=1 << 22)


@pytest.fixture(scope="module")
def generator():
    return PrefixCachedGenerator(build_model("full", hidden=32, layers=1), device_blocks=4, host_bytes=1 << 22)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([320], "token ids from 0 to 319"),
        ([-1], "token ids from 0 to 319"),
        ([1.5], "token ids, which are integers; got 1.5"),
        ([torch.tensor(1)], r"shape \[tokens\] or \[prompts, tokens\], got \[\]"),
    ],
)
def test_tokens_that_are_none_of_the_models_are_refused(generator, prompt, sentence):
    with pytest.raises(PromptRefused, match=sentence):
        generator.answer(prompt, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device_blocks": 8.0}, "device_blocks must be a whole number, got 8.0"),
        ({"max_model_len": "500"}, "max_model_len must be a whole number, got '500'"),
        ({"batch_size": 2.0}, "batch_size must be a whole number"),
        ({"host_bytes": 6e7}, 'host_bytes must be a whole number of bytes, or a text such as "2GiB"; got 60000000.0'),
        ({"host_bytes": "much"}, "64GiB or 500GB.*got 'much'"),
    ],
)
def test_a_size_that_is_no_whole_number_is_refused(options, sentence):
    usual = {"device_blocks": 8, "host_bytes": 1 << 22}
    with pytest.raises(ConfigurationError, match=sentence):
        PrefixCachedGenerator(build_model("full", hidden=32, layers=1), **{**usual, **options})


def test_host_bytes_may_be_a_text():
    model = build_model("full", hidden=32, layers=1)
    pools = []
    for size in ("4MiB", 4 << 20):
        with PrefixCachedGenerator(model, device_blocks=8, host_bytes=size) as generator:
            pools.append(generator.statistics().pool.capacity)
    assert pools[0] == pools[1] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_beam": 3}, r"no setting num_beam \(did you mean num_beams\?\)"),
        ({"max_tokens": 5}, r"max_tokens \(did you mean max_new_tokens\?\)"),
        ({"stop": ["x"]}, r"stop \(did you mean stop_strings\?\)"),
        ({"xyzzy": 1}, "no setting xyzzy$"),
        ({"num_beams": 3}, "cannot carry out num_beams=3 in the options: leave it out there"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3 in generation_config"),
        ({"input_ids": [1], "attention_mask": [1]}, r"answer\(tokenizer\(text\)\) instead of answer\(\*\*tokenizer"),
        ({"seed": "x"}, "seed must be a whole number"),
    ],
)
def test_a_setting_that_is_none_is_refused_with_what_may_be_meant(generator, options, sentence):
    for ask in (generator.answer, generator.generate):
        with pytest.raises(ConfigurationError, match=sentence):
            ask(**options)


def test_settings_of_the_model_are_refused_with_their_place(generator, monkeypatch):
    monkeypatch.setattr(generator.model.generation_config, "num_beams", 2)
    with pytest.raises(ConfigurationError, match=r"num_beams=2 in model\.generation_config"):
        generator.answer([1, 2], 2)
    assert len(generator.answer([1, 2], 2, num_beams=1).tokens) == 2


def test_a_model_that_is_cast_under_a_generator_is_refused():
    model = build_model("full", hidden=32, layers=1)
    with PrefixCachedGenerator(model, device_blocks=8, host_bytes=1 << 22) as generator:
        generator.answer([1, 2, 3], 2)
        model.to(torch.bfloat16)
        with pytest.raises(MisuseError, match=r"cast to torch.bfloat16.*make another generator"):
            generator.answer([1, 2, 3], 2)


@pytest.mark.parametrize("cuts", [[], [20], [30, 20, 40], [20, 20, 40], [20, 41]])
def test_cuts_must_ascend_to_the_end_of_the_prompt(generator, cuts):
    with pytest.raises(PromptRefused, match="cuts must ascend"):
        generator.answer(list(range(40)), 2, cuts=cuts)


def test_a_prompt_may_fill_the_pool_to_the_last_block_again_and_again(generator):
    """The chunk that is computed again must not cost a second block; the last token's KV is never written."""
    for _ in range(3):
        assert len(generator.answer(list(range(48)), 17).tokens) == 17
    with pytest.raises(PromptRefused, match="5 device blocks"):
        generator.answer(list(range(48)), 18)


class Interrupted(MeddlingCopier):
    """A copier that is interrupted once."""

    def __init__(self, copier):
        super().__init__(copier)
        self.armed = False

    def copy(self, direction, copies):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return self.copier.copy(direction, copies)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_an_interrupted_copy_leaves_nothing_behind(offload):  # rule 10
    copiers = []

    def wrap(copier, tensors):
        copiers.append(Interrupted(copier))
        return copiers[0]

    model = build_model("full", hidden=32, layers=1)
    generator = PrefixCachedGenerator(model, device_blocks=8, host_bytes=1 << 22, offload=offload, wrap_copier=wrap)
    prompts = [[letter] * 100 for letter in range(4)]
    interrupts = 0
    for prompt in prompts * 3:
        copiers[0].armed = True
        try:
            generator.answer(prompt, 2)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 2
    copiers[0].armed = False
    for prompt in prompts:
        generator.answer(prompt, 2)
    statistics = generator.statistics()
    assert (statistics.storing, statistics.loading, statistics.running) == (0, 0, 0)
    assert statistics.pool.pinned == generator.pool.statistics().pinned == generator.pool.statistics().writing == 0
