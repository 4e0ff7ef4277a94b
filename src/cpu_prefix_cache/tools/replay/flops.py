"""FLOPs to compute a token, from a model's config.json: by itself, and for each token that it attends to.

    of a token    2 for each parameter that it meets in a matrix product: attention, MLP, experts that it is sent to;
                  without embeddings, and the output layer, which prefill needs for its last token only
    of a pair     2 for each value of a query and a key, and of a score and a value, in layers of full attention

A window counts as if it were always full, a local chunk as if it were always half full. At the *even depth* both parts
are equal.

>>> import json, pathlib, tempfile
>>> config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
>>> file = pathlib.Path(tempfile.mkdtemp(), "config.json")
>>> _ = file.write_text(json.dumps(config | {"hidden_size": 4096, "intermediate_size": 14336}))
>>> round(read_flops(file).token / 1e9, 1), round(read_flops(file).even_depth)
(14.0, 26624)
"""

import math
from dataclasses import dataclass
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.layers import LOCAL, PREFIX, STATE, WINDOW, Layers, layers_by_kind
from cpu_prefix_cache.tools.replay.model_config import ModelConfig
from cpu_prefix_cache.tools.replay.models import head_dim

# Families whose parameters are counted here, compared with transformers' models by a test: with an MLP of two matrices,
# of three, and with experts.
TWO_MATRICES = {"arcee", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
THREE_MATRICES = {
    "cohere",
    "cohere2",
    "ernie4_5",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_vl",
    "seed_oss",
    "smollm3",
    "stablelm",
}
EXPERTS = {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "kimi_k2",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
}
EXPERT_NAMES = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of a token by itself, and of a pair of tokens."""

    token: float
    pair: float

    @property
    def even_depth(self) -> float:
        """The depth in a prompt at which a token's attention takes as much as everything else of it."""
        return self.token / self.pair if self.pair else math.inf


def read_flops(path: Path, active_parameters: float | None = None) -> Flops:
    """The FLOPs of the model in this config.json, or in the folder with it.

    `active_parameters` are those that a token meets, if known. Raises ConfigurationError for a file that is no
    configuration, and for a model whose parameters do not follow from it with certainty.
    """
    config = ModelConfig.read(path)
    layers = layers_by_kind(config)
    parameters = _parameters(config) if active_parameters is None else active_parameters
    pair = _pair(config) if set(layers) - {STATE} else 0
    token = 2 * parameters + pair * _seen_at_once(config, layers)
    if config.has("index_topk"):  # all tokens are compared by an indexer, and some of them attended to
        token += layers[PREFIX] * pair * config.number("index_topk")
        pair = 2 * config.number("index_n_heads") * config.number("index_head_dim")
    return Flops(token, layers[PREFIX] * pair)


def _pair(config: ModelConfig) -> int:
    """FLOPs of a pair of tokens, in one layer."""
    heads = config.number("num_attention_heads")
    if config.has("kv_lora_rank"):
        return 2 * heads * (_key_dim(config) + config.number("v_head_dim"))
    return 4 * heads * head_dim(config)


def _seen_at_once(config: ModelConfig, layers: Layers) -> float:
    """Tokens that one token attends to in all layers together whose attention does not grow with depth."""
    windows, local = layers[WINDOW], layers[LOCAL]
    return (windows * config.number("sliding_window") if windows else 0) + (
        local * config.number("attention_chunk_size") / 2 if local else 0
    )


def _parameters(config: ModelConfig) -> int:
    """Parameters that a token meets in matrix products."""
    if config.has("active_parameters"):
        return config.number("active_parameters")
    if config.family not in TWO_MATRICES | THREE_MATRICES | EXPERTS:
        raise _unknown(config)
    try:
        count = config.number("num_hidden_layers")
        sparse = _layers_with_experts(config) if config.family in EXPERTS else 0
        # a model without dense layers need not give the width of their MLP
        mlps = (_mlp(config) * (count - sparse) if sparse < count else 0) + (_experts(config) * sparse if sparse else 0)
        return count * _attention(config) + mlps
    except ConfigurationError as error:
        raise _unknown(config) from error


def _attention(config: ModelConfig) -> int:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    if not config.has("kv_lora_rank"):
        kv_heads = config.number("num_key_value_heads", "num_attention_heads")
        return 2 * hidden * (heads + kv_heads) * head_dim(config)
    latent, values = config.number("kv_lora_rank"), config.number("v_head_dim")
    query, nope = heads * _key_dim(config), config.number("qk_nope_head_dim")
    down = config.number("q_lora_rank") if config.has("q_lora_rank") else 0
    queries = down * (hidden + query) if down else hidden * query
    keys = hidden * (latent + config.number("qk_rope_head_dim")) + latent * heads * (nope + values)
    return queries + keys + heads * values * hidden + _indexer(config, down or hidden)


def _indexer(config: ModelConfig, query_inputs: int) -> int:
    if not config.has("index_n_heads"):
        return 0
    heads, dim = config.number("index_n_heads"), config.number("index_head_dim")
    return query_inputs * heads * dim + config.number("hidden_size") * (dim + heads)


def _mlp(config: ModelConfig) -> int:
    matrices = 2 if config.family in TWO_MATRICES else 3
    return matrices * config.number("hidden_size") * config.number("intermediate_size", "ffn_dim")


def _layers_with_experts(config: ModelConfig) -> int:
    if words := config.words("mlp_layer_types"):
        return sum(word == "sparse" for word in words)
    first, step = config.count("first_k_dense_replace"), config.number("decoder_sparse_step", default=1)
    sparse = range(first + (step - 1 - first) % step, config.number("num_hidden_layers"), step)
    return len(sparse) - sum(at in sparse for at in config.indices("mlp_only_layers"))


def _experts(config: ModelConfig) -> int:
    """The experts that a token is sent to, those that all are sent to, and what chooses them."""
    hidden = config.number("hidden_size")
    width = config.number("moe_intermediate_size", "intermediate_size")
    chosen = config.number("num_experts_per_tok", "num_experts_per_token")
    shared = config.number("n_shared_experts") * width if config.has("n_shared_experts") else 0
    if config.has("shared_expert_intermediate_size"):
        shared = config.number("shared_expert_intermediate_size")  # whose gate, a number for each channel, is left out
    return hidden * (3 * (chosen * width + shared) + config.number(*EXPERT_NAMES))


def _key_dim(config: ModelConfig) -> int:
    return config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim")


def _unknown(config: ModelConfig) -> ConfigurationError:
    return ConfigurationError(
        f"what a token of a model of type {config.family!r} takes to compute does not follow from its configuration: "
        "give its --active-parameters, such as 22B"
    )
