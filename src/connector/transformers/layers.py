"""Part of the past that each layer of a model keeps, derived from transformers' own cache layers:

    full        the keys and values of every token      full attention, MLA (its latent)
    local       those of the recent tokens only         sliding windows, chunked attention
    state       values that every token updates         Mamba, linear attention, short convolutions
    full and state, in one layer                        Falcon-H1
    nothing                                             feed-forward layers, and those that share another's keys

Any other kind (static, quantized, compressed, indexed, ...) raises ConfigurationError with its name, because treating
it as one of these would silently give wrong results.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import transformers
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup, PrefixGroup, StateGroup, WindowGroup

# A layer that keeps nothing. 5.19 has no kind for it: there such a layer is a state layer, and stays without a state.
NothingLayer: type[Any] = vars(cache_utils).get("DummyLayer", LinearAttentionLayer)
# Kinds of what is kept, as groups in blocks of one token whose bytes are not known yet.
Local = WindowGroup | ChunkLocalGroup  # of a limited number of past tokens
Kind = PrefixGroup | Local | StateGroup
FULL = PrefixGroup(name="attention", block_tokens=1, block_bytes=1)
STATES = StateGroup(name="state", block_tokens=1, block_bytes=1)
ATTENTION = {
    DynamicLayer: FULL,
    LinearAttentionAndFullAttentionLayer: FULL,
    LinearAttentionLayer: None,
    NothingLayer: None,
}


class LayerPast(NamedTuple):
    """A layer: the kind of its keys and values, if it has some, and transformers' class of it, with its options."""

    attention: PrefixGroup | Local | None
    make: Callable[[], Any]


def classify(model: PreTrainedModel) -> list[LayerPast]:
    """Sort the layers of `model` by what each keeps. Raises ConfigurationError for unknown kinds and refused models."""
    name = type(model).__name__
    if reasons := [sentence for sentence, applies in _refusals(model).items() if applies]:
        raise ConfigurationError(f"{name} {reasons[0]}")
    try:
        layers = DynamicCache(config=model.config).layers
    except KeyError as error:
        raise ConfigurationError(f"{name} has layers of kind {error}, which transformers keeps no past for") from error
    made_of = zip(layers, *get_layer_types_and_kwargs(model.config.get_text_config(decoder=True)), strict=False)
    return [
        LayerPast(attention_of(f"layer {index} of {name}", layer, kind), partial(type(layer), **options))
        for index, (layer, kind, options) in enumerate(made_of)
    ]


def _refusals(model: PreTrainedModel) -> dict[str, bool]:
    """Why a model is refused, and whether it is."""
    defaults = (model.can_generate() and model.generation_config) or GenerationConfig()
    rope = model.config.get_text_config(decoder=True).to_dict().get("rope_parameters")  # perhaps by kind of layer
    devices = sorted({str(each.device) for each in model.parameters()})
    return {
        f"is on {', '.join(devices)}, and its past would be on several devices, which is not supported: load it on "
        "one": len(devices) > 1,
        "has an encoder: prefixes are cached of causal models, which have none": model.config.is_encoder_decoder,
        "has no head to generate with: load it by AutoModelForCausalLM": not model.can_generate(),
        "generates with use_cache=False, and would compute all tokens again behind a past: set "
        "model.generation_config.use_cache = True": defaults.use_cache is False,
        # `generate` leaves "hybrid" out, of Gemma's, by itself
        f"generates with cache_implementation={defaults.cache_implementation!r}, and takes no past beside it: set "
        "model.generation_config.cache_implementation = None": defaults.cache_implementation not in (None, "hybrid"),
        "rotates its keys by factors that change with the length of the prompt (longrope): what one prompt computed is "
        "wrong for a longer prompt with the same beginning": "longrope" in str(rope),
        "keeps positions of its latest prompt in itself (rope_deltas), and any other prompt that goes on would get "
        "them: a past for `generate` is not supported": any("rope_deltas" in vars(each) for each in model.modules()),
        # Mamba's own cache
        f"computes the whole prompt behind a past: take 5.24 of transformers, this is {transformers.__version__}": (
            "cache_params" in inspect.signature(model.forward).parameters
        ),
    }


def attention_of(place: str, layer: object, kind: str) -> PrefixGroup | Local | None:
    if type(layer) is DynamicSlidingWindowLayer:  # transformers' class for both
        local = ChunkLocalGroup if kind == "chunked_attention" else WindowGroup
        tokens = layer.sliding_window
        return local(name=f"{local.kind}-{tokens}", block_tokens=1, block_bytes=1, window_tokens=tokens)
    if type(layer) not in ATTENTION:
        raise ConfigurationError(
            f"{place} keeps its past as {type(layer).__name__}, which is not supported; supported are full, "
            "sliding-window and chunked attention, linear-attention and convolution states, and full attention with "
            "states in one layer"
        )
    return ATTENTION[type(layer)]
