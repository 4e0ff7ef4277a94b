"""Models that give the longest prompt under another name, or not at all: GPT-2, Bloom, Mamba, Mamba 2.

Before 5.24, transformers' `generate` takes a past of the last two under another name, and computes the whole prompt
behind it: they are refused there. The answers of all others from host memory are those of plain `generate`. The
control: a damaged piece shows.
"""

import inspect
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

from connector.transformers import HostPrefixCache, PromptRefused
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.testing import CorruptingCopier
from random_models import initialise
from tests.connector.running import document, error
from tests.connector.serving import generated

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


TAKEN = [name for name in MODELS if "cache_params" not in inspect.signature(model(name).forward).parameters]


def cache_of(name, **options):
    usual = dict(host_bytes=1 << 22, device_bytes=1 << 20, offload="eager")
    return HostPrefixCache(model(name), **{**usual, **options})


def from_host(name, made, seed):
    """How far the logits of a prompt that comes from the host are from those of `generate`."""
    ids = document(seed, 61)
    for found in (0, 48):
        with made.past(ids) as past:
            logits, _ = generated(model(name), ids, past, new_tokens=8)
        assert (past.hit_tokens, past.device_hit_tokens) == (found, 0)
        made.forget_device()
    wanted, _ = generated(model(name), ids, new_tokens=8)
    return max(error(*both) for both in zip(logits, wanted, strict=True))


@pytest.mark.parametrize("name", TAKEN)
def test_its_answers_are_those_of_generate(name):
    with cache_of(name, max_model_len=96) as made:
        assert max(from_host(name, made, seed) for seed in (1, 2)) <= 1e-4
        with pytest.raises(PromptRefused, match="longer than the model's 96"), made.past(document(1, 97)):
            pass


@pytest.mark.parametrize("name", TAKEN)
def test_beams_over_a_batch_keep_their_prompts(name):
    """With states alone the layer that counts tokens has rows, too, which beams exchange."""
    ids = torch.cat([torch.tensor([document(seed, 61)]) for seed in (1, 2)])
    options = dict(max_new_tokens=6, do_sample=False, num_beams=3, num_return_sequences=2, pad_token_id=0)
    with cache_of(name, max_model_len=96) as made:
        for found in (0, 2 * 48):
            with made.past(ids) as past:
                ours = model(name).generate(ids, past_key_values=past, **options)
            assert past.hit_tokens == found
            assert torch.equal(ours, model(name).generate(ids, **options))
            made.forget_device()


@pytest.mark.parametrize("name", TAKEN)
def test_two_caches_of_one_model_count_their_own_tokens(name):
    with cache_of(name, max_model_len=96) as made, cache_of(name, max_model_len=96) as another:
        assert max(from_host(name, each, seed=1) for each in (made, another)) <= 1e-4


@pytest.mark.parametrize("name", TAKEN)
def test_control_a_damaged_piece_shows(name):
    with cache_of(name, max_model_len=96, wrap_copier=lambda *args: CorruptingCopier(*args, loads=None)) as made:
        assert sum(from_host(name, made, seed) > 1e-4 for seed in range(8)) >= 7


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TAKEN])
def test_a_past_that_generate_would_not_go_on_from_is_refused(name):
    with pytest.raises(ConfigurationError, match="computes the whole prompt behind a past: take 5"):
        cache_of(name, max_model_len=96)


@pytest.mark.parametrize("name", SILENT)
def test_a_model_without_a_length_needs_max_model_len(name):
    with pytest.raises(ConfigurationError, match="does not say how long a prompt may be: give max_model_len"):
        cache_of(name)


def test_gpt2_has_its_length_under_another_name():
    with cache_of("gpt2") as made:
        assert made.max_model_len == 96


@pytest.mark.parametrize(("length", "must"), [(0, "a whole number of at least 1"), (97, "from 1 to 96")])
def test_a_length_that_the_model_cannot_have_is_refused(length, must):
    with pytest.raises(ConfigurationError, match=f"max_model_len must be {must}, got {length}"):
        cache_of("gpt2", max_model_len=length)
