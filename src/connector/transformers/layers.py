"""What each layer of a model keeps of the past, derived from transformers' own cache layers:

    full        the keys and values of every token      full attention, MLA (its latent)
    local       those of the recent tokens only         sliding windows, chunked attention
    state       values that every token updates         Mamba, linear attention, short convolutions
    full and state, in one layer                        Falcon-H1
    nothing                                             feed-forward layers that are counted as layers

Any other kind (static, quantized, compressed, indexed, ...) raises ConfigurationError with its name, because treating
it as one of these would silently give wrong results.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from cpu_prefix_cache import ConfigurationError, GroupKind, MisuseError


@dataclass(frozen=True, slots=True)
class Local:
    """Attention to a limited number of past tokens: `tokens` is the size of the window, or of the attention chunk."""

    kind: GroupKind
    tokens: int

    def first(self, position: int) -> int:
        """The first token that the token at `position`, or any later one, can see."""
        if self.kind is GroupKind.WINDOW:
            return max(0, position - self.tokens + 1)
        return position - position % self.tokens


@dataclass(frozen=True, slots=True)
class LayerPast:
    """What one layer keeps. `states` is its number of (convolution, recurrent) pairs of states."""

    full: bool = False
    local: Local | None = None
    states: int = 0


def classify(model: PreTrainedModel) -> tuple[LayerPast, ...]:
    """What each layer of `model` keeps. Raises ConfigurationError for a kind that is not known here."""
    name = type(model).__name__
    try:
        layers = DynamicCache(config=model.config).layers
    except KeyError as error:
        raise ConfigurationError(
            f"{name} has layers of the kind {error}, which transformers keeps no past for"
        ) from error
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    return tuple(
        _classify_layer(f"layer {index} of {name}", *each)
        for index, each in enumerate(zip(layers, kinds, strict=False))
    )


def _classify_layer(place: str, layer: object, kind: str) -> LayerPast:
    if type(layer) is DynamicLayer:
        return LayerPast(full=True)
    if type(layer) is DynamicSlidingWindowLayer:  # transformers' class for both
        chunked = kind == "chunked_attention"
        return LayerPast(local=Local(GroupKind.CHUNK_LOCAL if chunked else GroupKind.WINDOW, layer.sliding_window))
    if type(layer) is LinearAttentionLayer:
        return LayerPast(states=layer.number_of_states)
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return LayerPast(full=True, states=layer.number_of_states)
    raise ConfigurationError(
        f"{place} keeps its past as {type(layer).__name__}, which is not supported; supported are full, sliding-window "
        "and chunked attention, linear-attention and convolution states, and full attention with states in one layer"
    )


class LocalLayer(CacheLayerMixin):
    """One layer of local attention of one request: keys and values `[1, heads, tokens, width]` of recent tokens.

    Unlike transformers' layer it keeps whole blocks: after a forward pass, all tokens from the first block that a token
    at `length` can see, and all that the pass computed. So the blocks of a checkpoint can be taken at any boundary,
    after prefill chunks of any length, and a block has the same bytes whenever it is taken.
    """

    is_sliding = True

    def __init__(self, local: Local, block_tokens: int) -> None:
        super().__init__()
        self.sliding_window = local.tokens
        self.start = 0
        self.length = 0
        self._local = local
        self._block_tokens = block_tokens
        self._keys = self._values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._keys, self._values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self._local.first(self.length)
        kept = max(self.start, seen - seen % self._block_tokens)
        old = slice(kept - self.start, None)
        self._keys = torch.cat([self._keys[..., old, :], key_states], dim=-2)
        self._values = torch.cat([self._values[..., old, :], value_states], dim=-2)
        self.start = kept
        self.length += key_states.shape[-2]
        return self._keys[..., seen - kept :, :], self._values[..., seen - kept :, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self._local.first(self.length)
        return self.length - seen + query_length, seen

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def held(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of the tokens [first, end), each [tokens, heads, width]. Raises MisuseError if not held."""
        if not self.start <= first < end <= self.length:
            raise MisuseError(f"asked for the tokens [{first}, {end}), but [{self.start}, {self.length}) are held")
        part = slice(first - self.start, end - self.start)
        return self._keys[0, :, part].transpose(0, 1), self._values[0, :, part].transpose(0, 1)

    def restore(self, first: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Continue at position `length` with the tokens [first, length), given as [tokens, heads, width].

        Raises MisuseError if the layer is not fresh, or a token at `length` can see tokens before `first`.
        """
        if self.length or first > self._local.first(length):
            raise MisuseError(
                f"a fresh layer at {length} needs the tokens from {self._local.first(length)}; "
                f"got those from {first}, in a layer at {self.length}"
            )
        self._keys, self._values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        self.start, self.length = first, length
        self.is_initialized = True

    def continue_from(self, other: "LocalLayer") -> None:
        """Go on where `other` is. No tensor is copied, because `update` changes none."""
        self._keys, self._values = other._keys, other._values
        self.start, self.length, self.is_initialized = other.start, other.length, other.is_initialized


class FullAndStateLayer(LinearAttentionAndFullAttentionLayer):
    """A layer with full attention and states: transformers' class keeps the states, `full` the keys and values."""

    def __init__(self, full: CacheLayerMixin, states: int) -> None:
        super().__init__(number_of_states=states)
        self._full = full

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._full.update(key_states, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return int(self._full.get_seq_length())
