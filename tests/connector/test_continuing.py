"""Facts learnt about a model when it is loaded: the states that its layers keep, and how it goes on from there."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)
from transformers.cache_utils import Cache, DynamicLayer

from builtin_models import ARCHITECTURES, build_model
from connector.transformers.past import ModelPast
from connector.transformers.trials import takes_several
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup, WindowGroup
from random_models import FAMILIES, WINDOW, build_family, initialise, tiny

SMALL = dict(vocab_size=320, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_but_jamba_goes_on_with_any_number_of_tokens(family, dtype):
    model = tiny(family).to(dtype)
    assert takes_several(model) is (family != "jamba")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_model_of_the_demo_goes_on_with_any_number_of_tokens(arch):
    model = build_model(arch, hidden=64)
    assert takes_several(model)


def test_a_model_that_the_demo_has_not_is_refused():
    with pytest.raises(ConfigurationError, match="known are full, swa, hybrid, mla"):
        build_model("rnn")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dropped_state_that_no_logit_shows_is_found_all_the_same(dtype):
    """With the usual initialisation the dropped states of Jamba change its logits by 1e-4, half precision by 1e-2."""
    model = JambaForCausalLM(tiny("jamba").config).eval().to(dtype)
    assert not takes_several(model)


@pytest.mark.parametrize(
    "options",
    [
        dict(eos_token_id=[0, 20], forced_eos_token_id=7),
        dict(stop_strings=["end"], token_healing=True),
        dict(max_time=1e-9, max_length=20, min_length=30),
        dict(prompt_lookup_num_tokens=3),
        dict(prefill_chunk_size=4),
    ],
)
def test_a_model_is_tried_whatever_ends_or_drafts_its_answers(options):
    model = tiny("llama")
    vars(model.generation_config).update(options)
    assert takes_several(model)


class CountsFromZero(LlamaForCausalLM):
    """Behaves like Bamba without positions: several tokens count from 0 again, whatever came before."""

    def forward(self, input_ids, position_ids, **options):
        if input_ids.shape[1] > 1:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, **options)


def test_a_model_that_reads_all_of_its_past_but_in_the_wrong_place_goes_on_with_single_tokens():
    torch.manual_seed(0)
    model = CountsFromZero(tiny("llama").config).eval()
    initialise(model)
    assert not takes_several(model)


class CountsElsewhere(LlamaForCausalLM):
    """A part of the past is an attribute of the module: how often each token came, which is added to the logits."""

    def forward(self, input_ids, position_ids, **options):
        answer = super().forward(input_ids, position_ids=position_ids, **options)
        counts = torch.nn.functional.one_hot(input_ids, self.config.vocab_size).cumsum(dim=1)
        if position_ids[0, 0] > 0:
            counts = counts + self.counts
        self.counts = counts[:, -1:]
        answer.logits = answer.logits + counts[:, -answer.logits.shape[1] :]
        return answer


class CountsItself(LlamaForCausalLM):
    """Positions go on from a count in the module, which is of the latest prompt."""

    def forward(self, input_ids, position_ids, attention_mask=None, **options):
        begin = self.count if position_ids[0, 0] > 0 else 0
        self.count = begin + input_ids.shape[1]
        positions = torch.arange(begin, self.count)[None]
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=positions, **options)


class LooksAhead(LlamaForCausalLM):
    """Each token sees all of its block that is computed with it. None that comes later can tell."""

    block_tokens = 8

    def forward(self, input_ids, position_ids, attention_mask=None, **options):
        at, seen = position_ids[0, :, None], torch.arange(position_ids[0, -1] + 1)
        hidden = (seen > at) & (seen // self.block_tokens != at // self.block_tokens)
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill(hidden, torch.finfo(self.dtype).min)
        return super().forward(input_ids, attention_mask=mask[None, None], position_ids=position_ids, **options)


class ForgetsFarTokens(Gemma3ForCausalLM):
    """Wrong only where a forward pass begins behind the window."""

    def forward(self, input_ids, position_ids, **options):
        begins_far = position_ids[0, 0] > WINDOW
        return super().forward(input_ids, position_ids=position_ids - 8 * begins_far, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [CountsElsewhere, CountsItself])
def test_a_part_of_the_past_outside_the_cache_is_found(kind, dtype):
    torch.manual_seed(0)
    model = kind(tiny("llama").config).eval()
    initialise(model)
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} cannot continue from its own cache"):
        takes_several(model.to(dtype))


@pytest.mark.parametrize("block_tokens", [2, 3, 4, 5, 8, 16, 32])
def test_a_mask_that_looks_ahead_is_found_whatever_its_blocks(block_tokens):
    torch.manual_seed(0)
    model = LooksAhead(tiny("llama").config).eval()
    initialise(model)
    model.block_tokens = block_tokens
    with pytest.raises(ConfigurationError, match="LooksAhead cannot continue from its own cache"):
        takes_several(model)
    model.block_tokens = 1
    assert takes_several(model)


def test_recurrent_gemma_keeps_its_states_in_its_modules_and_is_refused():
    config = RecurrentGemmaConfig(**SMALL, num_hidden_layers=3, lru_width=64, attention_window_size=64)
    model = RecurrentGemmaForCausalLM(config).eval()
    with pytest.raises(ConfigurationError, match="RecurrentGemmaForCausalLM"):
        takes_several(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_that_shows_only_beyond_the_window_is_found(dtype):
    torch.manual_seed(0)
    model = ForgetsFarTokens(tiny("gemma3").config).eval()
    initialise(model)
    with pytest.raises(ConfigurationError, match="after 48 tokens, more than its window"):
        takes_several(model.to(dtype))
    assert takes_several(model, max_model_len=WINDOW)  # no request gets there


def llama(layers, **options):
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=layers, **options))


def test_windows_of_different_kinds_and_sizes_are_groups_of_their_own():
    kinds = ["full_attention", "sliding_attention", "chunked_attention", "sliding_attention"]
    past = ModelPast(llama(4, layer_types=kinds, sliding_window=48, attention_chunk_size=24), 1)
    assert [(type(each.kind), each.kind.window_tokens, each.row_bytes) for each in past.locals] == [
        (WindowGroup, 48, 512),
        (ChunkLocalGroup, 24, 256),
    ]
    assert [[part.layer for part in each.parts] for each in past.locals] == [[1, 1, 3, 3], [2, 2]]
    assert past.full.row_bytes == 256


@pytest.mark.parametrize(
    ("family", "layers", "weight"),
    [
        ("llama", "f f f f", (1024, 0, 0)),
        ("gemma3", "w w w f", (256, 768, 0)),
        ("gpt_oss", "w f w f", (512, 512, 0)),
        ("llama4", "c f c f", (512, 512, 0)),
        ("qwen3_5", "s s s f", (256, 0, 18_432)),
        ("bamba", "s f s f", (512, 0, 21_504)),
        ("falcon_h1", "fs fs fs fs", (1024, 0, 43_008)),
        ("lfm2", "s f s f", (512, 0, 1_536)),
        ("deepseek_v3", "f f f f", (320, 0, 0)),
    ],
)
def test_each_family_keeps_these_layers_in_these_bytes(family, layers, weight):
    """Bytes of full attention per token, of windows per token, and of all states."""
    past = ModelPast(tiny(family), 1)
    with_states = {part.layer for part in past.states.parts}
    names = [attention(each) + "s" * (at in with_states) for at, each in enumerate(past.layers)]
    assert " ".join(names) == layers
    assert (past.full.row_bytes, sum(each.row_bytes for each in past.locals), past.states.row_bytes) == weight


def attention(layer):
    return {None: "", "prefix": "f", "window": "w", "chunk-local": "c"}[layer.attention and layer.attention.kind]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("indexed_attention", "DynamicIndexedLayer"),
        ("hybrid_sliding", "LinearAttentionAndSlidingWindowAttentionLayer"),
        ("compressed_sparse_attention", "compressed_sparse_attention"),
    ],
)
def test_a_kind_of_layer_that_is_not_known_is_refused_by_name(kind, name):
    model = llama(2, sliding_window=48)
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(ConfigurationError, match=name):
        ModelPast(model, 1)


def test_a_layer_that_should_keep_keys_and_keeps_none_is_refused():
    model = llama(2)
    model.config.num_hidden_layers = 3
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM keeps the past of its layer 2 outside"):
        ModelPast(model, 1)


class Loops(LlamaForCausalLM):
    """Computes its last layer twice, and keeps the past of both times."""

    def forward(self, input_ids, position_ids, **options):
        answer = super().forward(input_ids, position_ids=position_ids, **options)
        past = next(each for each in options.values() if isinstance(each, Cache))
        keys = past.layers[-1].keys
        past.layers.append(DynamicLayer())
        past.update(keys, keys, len(past.layers) - 1)
        return answer


def test_a_model_that_keeps_the_past_of_layers_its_configuration_has_not_is_refused():
    with pytest.raises(ConfigurationError, match="Loops keeps the past of 5 layers, but its configuration has 4"):
        ModelPast(Loops(tiny("llama").config).eval(), 1)


def test_a_family_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="unknown family 'elman'; known are llama"):
        build_family("elman", hidden=64, layers=2, window=32)
