"""Models and options with which nothing can be cached rightly are refused by name, before anything runs."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    EncodecConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MptConfig,
    MptForCausalLM,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
)

from builtin_models import build_model
from connector.transformers import HostPrefixCache
from cpu_prefix_cache import ConfigurationError

SMALL = dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


def a_state():
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2))


def an_encoder():
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    return BartForConditionalGeneration(BartConfig(vocab_size=320, **sizes))


def encoders_and_a_decoder():
    """Its configuration has three within it, and none of its own for text."""
    sizes = dict(vocab_size=320, hidden_size=32, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2)
    config = MusicgenConfig(
        text_encoder=T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2).to_dict(),
        audio_encoder=EncodecConfig(num_filters=4, hidden_size=8, codebook_size=16).to_dict(),
        decoder=MusicgenDecoderConfig(**sizes).to_dict(),
    )
    return MusicgenForConditionalGeneration(config)


def no_head():
    return LlamaModel(LlamaConfig(**SMALL))


def a_cache_of_its_own():
    return MiniMaxForCausalLM(MiniMaxConfig(**SMALL, num_key_value_heads=2, num_local_experts=2))


def no_cache_at_all():
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=320, n_embd=64, n_layer=2, n_head=2))


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
        (encoders_and_a_decoder, "MusicgenForConditionalGeneration has an encoder"),
        (no_head, "LlamaModel has no head to generate with: load it by AutoModelForCausalLM"),
        (a_cache_of_its_own, "MiniMaxForCausalLM fails in `generate` with transformers' Cache: ValueError"),
        (no_cache_at_all, "OpenAIGPTLMHeadModel fails in `generate` with transformers' Cache: ValueError"),
    ],
)
def test_a_model_whose_past_is_of_another_kind_is_refused(model, sentence):
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=sentence):
        HostPrefixCache(model(), host_bytes=1 << 22)


def test_a_model_that_generates_without_a_cache_is_refused():
    model = MptForCausalLM(MptConfig(vocab_size=320, d_model=64, n_heads=4, n_layers=2))
    with pytest.raises(ConfigurationError, match=r"use_cache=False, .*set model\.generation_config\.use_cache = True"):
        HostPrefixCache(model, host_bytes=1 << 22, max_model_len=64)


@pytest.mark.parametrize("implementation", ["static", "dynamic", "hybrid"])
def test_a_model_that_chooses_a_cache_is_refused_where_generate_would_take_no_past(implementation):
    """transformers leaves "hybrid" out, which Gemma's checkpoints have."""
    model, prompt = build_model("full", hidden=32, layers=1), torch.arange(20)[None]
    model.generation_config.cache_implementation = implementation
    if implementation != "hybrid":
        with pytest.raises(ConfigurationError, match="cache_implementation = None"):
            HostPrefixCache(model, host_bytes=1 << 22)
        return
    with HostPrefixCache(model, host_bytes=1 << 22) as cache, cache.past(prompt) as past:
        assert model.generate(prompt, past_key_values=past, max_new_tokens=2).shape == (1, 22)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_model_len": "500"}, "max_model_len must be a whole number of at least 1, got '500'"),
        ({"block_tokens": 8.5}, "block_tokens must be a whole number"),
        ({"host_bytes": 6e7}, 'host_bytes must be a whole number of bytes, or a text such as "2GiB"; got 60000000.0'),
        ({"host_bytes": "much"}, "64GiB or 500GB.*got 'much'"),
        ({"host_bytes": 100}, "host_bytes must hold at least one chunk"),
        ({"host_bytes": 1 << 60, "device_bytes": "1MiB"}, "ask for at most"),
        ({"device_bytes": 1 << 60}, "ask for at most"),
        ({"offload": "sometimes"}, "lazy, eager"),
        ({"policy": "random"}, "policy must be one of"),
    ],
)
def test_a_bad_configuration_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        HostPrefixCache(build_model("full", hidden=32, layers=1), **{"host_bytes": 1 << 22, **options})


def test_sizes_may_be_texts():
    model = build_model("full", hidden=32, layers=1)
    pools = []
    for size in ("4MiB", 4 << 20):
        with HostPrefixCache(model, host_bytes=size, device_bytes=size) as cache:
            pools.append((cache.statistics().cache.pool.capacity, cache._pool.statistics().capacity))
    assert pools[0] == pools[1] > (0, 0)
