"""Models and prompts the generator cannot serve rightly are refused by name, before anything runs."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from builtin_models import build_model
from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import ConfigurationError
from tests.faults import MeddlingCopier

SMALL = dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


def a_state():
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2))


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
        self.copier.copy(direction, copies)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_an_interrupted_copy_leaves_nothing_behind(offload):  # rule 11
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
    assert interrupts > 3
    copiers[0].armed = False
    for prompt in prompts:
        generator.answer(prompt, 2)
    statistics = generator.statistics()
    assert (statistics.storing, statistics.loading, statistics.running) == (0, 0, 0)
    assert statistics.pool.pinned == generator.pool.statistics().pinned == generator.pool.statistics().writing == 0
