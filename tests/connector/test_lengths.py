"""Models that give the longest prompt under another name, or not at all: GPT-2, Bloom, Mamba, Mamba 2.

Their answers from host memory are those of `model.generate`. The control: a damaged piece shows.
"""

from functools import cache

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.testing import CorruptingCopier
from random_models import initialise
from tests.connector.serving import document
from tests.connector.test_generate import agree, answered, asked

NO_TOKENS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
SMALL = dict(vocab_size=320, hidden_size=32, **NO_TOKENS)
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=96, **NO_TOKENS)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(**SMALL, n_layer=2, n_head=4)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=2)),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**SMALL, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=1, chunk_size=32)
    ),
}
SILENT = [name for name in MODELS if name != "gpt2"]


@cache
def model(name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = MODELS[name]().eval()
    initialise(made)
    return made


def generator_of(name, **options):
    usual = dict(device_blocks=48, host_bytes=1 << 22, offload="eager", prefill_tokens=64)
    return PrefixCachedGenerator(model(name), **{**usual, **options})


@pytest.mark.parametrize("name", MODELS)
def test_its_answers_are_those_of_generate(name):
    with generator_of(name, max_model_len=96) as generator:
        for seed in (1, 2):
            ids = document(seed, 61)
            expected = asked(model(name), ids, do_sample=False)
            for from_host in (0, 48):
                answer, got = answered(generator, ids, do_sample=False)
                assert answer.host_hit_tokens == from_host
                assert agree(got, expected)
                generator.pool.reset()
        with pytest.raises(PromptRefused, match="more than the model's 96"):
            generator.answer(document(1, 90), 12)


@pytest.mark.parametrize("name", MODELS)
def test_control_a_damaged_piece_shows(name):
    damage = []

    def damaging(copier, tensors):
        damage.append(CorruptingCopier(copier, tensors, group=0, loads=None))
        return damage[0]

    shown = 0
    with generator_of(name, max_model_len=96, wrap_copier=damaging) as generator:
        for seed in range(8):
            ids = document(seed, 61)
            generator.answer(ids, 1)
            generator.pool.reset()
            _, got = answered(generator, ids, do_sample=False)
            assert damage[0].corrupted == seed + 1
            shown += not agree(got, asked(model(name), ids, do_sample=False))
    assert shown >= 7


@pytest.mark.parametrize("name", SILENT)
def test_a_model_without_a_length_needs_max_model_len(name):
    with pytest.raises(ConfigurationError, match="does not say how long a prompt may be: give max_model_len"):
        generator_of(name)


def test_gpt2_has_its_length_under_another_name():
    with generator_of("gpt2") as generator:
        assert generator.max_model_len == 96
    with generator_of("gpt2", max_model_len=50) as generator, pytest.raises(PromptRefused, match="more than the model"):
        generator.answer(document(1, 48), 4)


@pytest.mark.parametrize("length", [0, 97])
def test_a_length_that_the_model_cannot_have_is_refused(length):
    with pytest.raises(ConfigurationError, match=f"max_model_len must be from 1 to 96, got {length}"):
        generator_of("gpt2", max_model_len=length)
