"""How many layers of a model keep which kind of KV state, according to its configuration.

A configuration may name the kind of every layer, in `layer_types`. Older ones follow a rule given by their model_type:
every sixth layer of Gemma 3 is full attention, every fourth of Qwen3-Next. LAYOUTS lists those rules.

A model_type that is not listed is treated like Llama: a K and a V of each token in every layer. If a name in its
configuration suggests otherwise, ConfigurationError is raised, because a wrong size is worse than none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.tools.replay.model_config import ModelConfig

Kind = type[Group]
Layers = Counter[Kind]
PREFIX: Kind = PrefixGroup
WINDOW: Kind = WindowGroup
LOCAL: Kind = ChunkLocalGroup
STATE: Kind = StateGroup

# KV that a layer of this kind in `layer_types` keeps.
NAMES: Mapping[str, tuple[Kind, ...]] = {
    "full_attention": (PREFIX,),
    "attention": (PREFIX,),
    "indexed_attention": (PREFIX,),
    "sliding_attention": (WINDOW,),
    "chunked_attention": (LOCAL,),
    "linear_attention": (STATE,),
    "mamba": (STATE,),
    "conv": (STATE,),
    "hybrid": (PREFIX, STATE),
    "moe": (),
    "mlp": (),
}

# Parts of names that suggest something other than a K and a V of each token in every layer. For models of a known type
# LAYOUTS reads such names.
HINTS = (
    "sliding",
    "window",
    "chunk",
    "local_att",
    "global",
    "sparse_att",
    "block_types",
    "layers_block",
    "override_pattern",
    "mamba",
    "ssm",
    "conv_",
    "linear_",
    "recurrent",
    "rwkv",
    "state_size",
    "delta",
    "attn_type",
    "attn_layer",
    "kv_lora",
    "latent",
    "index_",
    "compress",
    "v_head_dim",
    "qk_head_dim",
    "kv_shared",
    "share_kv",
    "k_eq_v",
    "cross_att",
    "encoder",
    "block_configs",
    "kv_channels",
    "cla_",
    "yoco",
    "mla",
)
HARMLESS = {"chunk_size_feed_forward", "max_window_layers", "use_sliding_window", "add_cross_attention"}


def layers_by_kind(config: ModelConfig) -> Layers:
    """How many layers keep KV state of each kind; a layer may keep two.

    Raises ConfigurationError, naming the model_type, if that does not follow from the configuration with certainty.
    """
    if config.has("is_encoder_decoder"):
        raise config.refused("it has an encoder and a decoder")
    if config.family not in LAYOUTS:
        _check_hints(config)
    names = config.words("layer_types") or config.words("layers_block_type")
    layers = _named(config, names) if names else LAYOUTS.get(config.family, _plain)(config)
    if layers[WINDOW] and config.number("sliding_window") >= config.number("max_position_embeddings", default=2**62):
        layers[PREFIX] += layers.pop(WINDOW)  # a window longer than any prompt
    return +layers


def _check_hints(config: ModelConfig) -> None:
    explained = {"sliding_window", "sliding_window_pattern"} if config.words("layer_types") else set()
    for name in sorted(config.values.keys() - HARMLESS - explained):
        if config.has(name) and any(hint in name for hint in HINTS):
            raise config.refused(
                f"this type is not known here, and {name} hints at more than a K and a V of each token"
            )
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        config.number(name)


def _named(config: ModelConfig, names: Iterable[str]) -> Layers:
    layers = Layers()
    for name in names:
        if name not in NAMES:
            raise config.refused(f"it has layers of the unknown kind {name!r}")
        layers.update(NAMES[name])
    return layers


# Layouts that follow from the model_type


def _plain(config: ModelConfig) -> Layers:
    """Full attention everywhere, or a window everywhere, or from a certain layer on."""
    count = config.number("num_hidden_layers")
    if not config.has("sliding_window") or config.values.get("use_sliding_window") is False:
        return Layers({PREFIX: count})
    full = config.number("max_window_layers") if config.has("use_sliding_window") else 0
    return Layers({PREFIX: min(full, count), WINDOW: max(0, count - full)})


def _all(*kinds: Kind) -> Callable[[ModelConfig], Layers]:
    """Every layer keeps state of these kinds."""
    return lambda config: Layers({kind: config.number("num_hidden_layers") for kind in kinds})


def _full_every(default: int, other: Kind, *names: str) -> Callable[[ModelConfig], Layers]:
    """The last layer of every so many is full attention. `names` are configuration values for that number."""

    def layers(config: ModelConfig) -> Layers:
        count = config.number("num_hidden_layers")
        full = count // config.number(*names, default=default)
        return Layers({PREFIX: full, other: count - full})

    return layers


def _full_at(name: str) -> Callable[[ModelConfig], Layers]:
    """Full attention in the layers listed under `name`, and states in the others."""

    def layers(config: ModelConfig) -> Layers:
        if name not in config.values:
            raise config.refused(f"it has neither layer_types nor {name}")
        full = len(config.indices(name))
        return Layers({PREFIX: full, STATE: config.number("num_hidden_layers") - full})

    return layers


def _llama4(config: ModelConfig) -> Layers:
    """Layers without rotary embeddings, marked by a 0, have full attention; the others attend to a local chunk."""
    marks = config.values.get("no_rope_layers")
    if not marks:
        return _full_every(4, LOCAL, "no_rope_layer_interval")(config)
    return Layers(LOCAL if mark else PREFIX for mark in marks)


def _jamba(config: ModelConfig) -> Layers:
    count, period = config.number("num_hidden_layers"), config.number("attn_layer_period")
    full = len(range(config.count("attn_layer_offset"), count, period))
    return Layers({PREFIX: full, STATE: count - full})


def _kimi_linear(config: ModelConfig) -> Layers:
    full, linear = (len(config.indices(f"linear_attn_config.{name}")) for name in ("full_attn_layers", "kda_layers"))
    if full + linear != config.number("num_hidden_layers"):
        raise config.refused(f"its linear_attn_config names {full} and {linear} layers")
    return Layers({PREFIX: full, STATE: linear})


def _nemotron(config: ModelConfig) -> Layers:
    pattern = str(config.values.get("hybrid_override_pattern", ""))
    if not pattern or set(pattern) - set("M*-E"):
        raise config.refused(f"its hybrid_override_pattern is {pattern!r}")
    return Layers({PREFIX: pattern.count("*"), STATE: pattern.count("M")})


_PLAIN = (
    "arcee",
    "cohere",
    "deepseek",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "llama",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
LAYOUTS: Mapping[str, Callable[[ModelConfig], Layers]] = {
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2"), _all(PREFIX)),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), _all(STATE)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _full_every(4, STATE, "full_attention_interval")),
    "bamba": _full_at("attn_layer_indices"),
    "cohere2": _full_every(4, WINDOW, "sliding_window_pattern", "_sliding_window_pattern"),
    "falcon_h1": _all(PREFIX, STATE),
    "gemma2": _full_every(2, WINDOW, "sliding_window_pattern"),
    "gemma3": _full_every(6, WINDOW, "sliding_window_pattern", "_sliding_window_pattern"),
    "gpt_oss": _full_every(2, WINDOW),
    "granitemoehybrid": _full_at("layer_types"),
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _full_at("full_attn_idxs"),
    "lfm2_moe": _full_at("full_attn_idxs"),
    "llama4": _llama4,
    "nemotron_h": _nemotron,
    "olmo3": _full_every(4, WINDOW),
}
