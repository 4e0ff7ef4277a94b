"""FLOPs by configuration: the parameters of a token are those of transformers' own models, which are counted here."""

import json

import pytest

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.flops import EXPERTS, THREE_MATRICES, TWO_MATRICES, read_flops

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
CHOSEN = {"num_experts_per_tok": 2, "num_local_experts": 8}
NARROW = {"moe_intermediate_size": 40, "num_experts_per_tok": 2, "num_experts": 8}
SHARED = NARROW | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
FAMILIES = {
    "llama": GROUPED,
    "starcoder2": GROUPED,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gemma3_text": GROUPED,
    "mixtral": GROUPED | CHOSEN,
    "qwen2_moe": GROUPED | NARROW | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen3_moe": GROUPED | NARROW | {"mlp_only_layers": [1]},
    "glm4_moe": GROUPED | SHARED,
    "deepseek_v2": SHARED | LATENT | {"q_lora_rank": None},
    "deepseek_v3": SHARED | LATENT,
    "deepseek_v32": SHARED | LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 32},
}


def of_a_token(name, parameter):
    """How many of these a token meets: of the experts two in eight; no embeddings, biases, or gates of one number."""
    if parameter.dim() < 2 or "bias" in name or "embed" in name or "lm_head" in name or parameter.shape[0] == 1:
        return 0
    is_chosen = ".experts." in name and "shared" not in name
    return parameter.numel() * 2 // 8 if is_chosen else parameter.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **SMALL, **FAMILIES[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    counted = sum(of_a_token(name, parameter) for name, parameter in model.named_parameters())
    windows = read_flops(tmp_path, active_parameters=0).token  # what attention takes that does not grow
    assert (read_flops(tmp_path).token - windows) / 2 == counted > 4 * 64 * 96


def written(tmp_path, **values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_attention_grows_in_layers_of_full_attention_only(tmp_path):
    """A layer compares a query with a key, and adds a value, for each of 32 heads of 128 values: 4 FLOP for each."""
    full = read_flops(written(tmp_path, **LLAMA_8B))
    assert full.pair == 32 * 4 * 32 * 128 and round(full.even_depth) == 26_624
    kinds = ["full_attention", "sliding_attention"] * 16
    half = read_flops(written(tmp_path, **LLAMA_8B, layer_types=kinds, sliding_window=1024))
    assert half.pair == full.pair / 2 and half.token == full.token + 1024 * full.pair / 2


def test_every_token_of_a_model_of_states_only_takes_as_long(tmp_path):
    states = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64}
    assert read_flops(written(tmp_path, **states), 1e9).even_depth == float("inf")


@pytest.mark.parametrize(
    "values",
    [
        LLAMA_8B | {"model_type": "new"},
        LLAMA_8B | {"model_type": "llama4", "attention_chunk_size": 8192},
        LLAMA_8B | {"intermediate_size": [1, 2]},
        LLAMA_8B | {"model_type": "mixtral"},
    ],
    ids=["unknown", "experts not counted here", "a number for each layer", "how many experts"],
)
def test_uncertain_parameters_are_required_as_an_option(tmp_path, values):
    folder = written(tmp_path, **values)
    with pytest.raises(ConfigurationError, match="give its --active-parameters, such as 22B"):
        read_flops(folder)
    assert read_flops(folder, 22e9).token >= 44e9


def test_no_family_is_counted_in_two_ways():
    assert not TWO_MATRICES & THREE_MATRICES and not EXPERTS & (TWO_MATRICES | THREE_MATRICES)
