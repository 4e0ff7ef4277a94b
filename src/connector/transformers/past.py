"""The shapes and bytes of what a model keeps of the past.

They are probed with a short forward pass, since configurations do not name them uniformly: latent attention keeps one
head of two widths, and a state may be float32 in a half-precision model. Bytes are ordered by layer; within a layer K,
then V, then its states, convolution before recurrent.

    full      K and V of all tokens, in layers of full attention         a row of bytes: a block of tokens,
    local     those of the recent ones; for each kind and size           part after part, [heads, tokens, width] each
    states    all states together                                        a row: all of them at one position
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from connector.transformers.layers import LayerPast, Local, classify
from connector.transformers.running import logits, refusing
from cpu_prefix_cache import ConfigurationError

KEYS, VALUES = KEYS_AND_VALUES = ("keys", 0), ("values", 0)
CONV, RECURRENT = "conv", "recurrent"
PROBE_TOKENS = 2  # more than one, because a decode step may keep other dtypes than a prefill


@dataclass(frozen=True, slots=True)
class PastPart:
    """One tensor: K or V of one token, [heads, width]; or a whole state, with its batch dimension of 1.

    `name` is keys, values, conv or recurrent; `index` counts the states of one layer.
    """

    layer: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, int]:
        """Key of the tensor among those of its layer."""
        return self.name, self.index

    @property
    def is_state(self) -> bool:
        return self.name in (CONV, RECURRENT)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Parts that layers of one kind keep. `local` is None of full attention, and of states."""

    parts: tuple[PastPart, ...]
    local: Local | None = None

    @property
    def is_state(self) -> bool:
        return any(part.is_state for part in self.parts[:1])

    def row_bytes(self, tokens: int) -> int:
        """The bytes of a block of so many tokens, or of all states."""
        return max((span.stop for _, span in self.spans(tokens)), default=0)

    def spans(self, tokens: int) -> Iterator[tuple[PastPart, slice]]:
        """Each part, and its bytes in a row. One begins where its type can be read."""
        end = 0
        for part in self.parts:
            begin = -(-end // part.dtype.itemsize) * part.dtype.itemsize
            end = begin + part.num_bytes * (1 if part.is_state else tokens)
            yield part, slice(begin, end)

    def views(self, rows: torch.Tensor, tokens: int) -> Iterator[tuple[PastPart, torch.Tensor]]:
        """The same in rows of bytes: [rows, heads, tokens, width], or [rows, *shape] of a state."""
        for part, span in self.spans(tokens):
            heads, *width = part.shape
            shape = part.shape if part.is_state else (heads, tokens, *width)
            yield part, rows[:, span].view(part.dtype).view(len(rows), *shape)

    def first_needed(self, length: int, block_tokens: int) -> int:
        """The first token of the blocks that hold all that the token at `length`, or a later one, can see."""
        return 0 if self.local is None else self.local.needed(length).start // block_tokens * block_tokens


class ModelPast:
    """Past that a model keeps.

    `layers` lists the states of each layer. `full`, `locals` (windows of two sizes are two) and `states` are what is
    kept in them, and `kept` those of them that have parts.

    Raises ConfigurationError for layers of an unknown kind, and for attention that keeps no keys and values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers, self.device = classify(model), model.device
        parts = _probe(model, self.layers)
        attention = [part for part in parts if not part.is_state]
        self.full = Kept(tuple(part for part in attention if self.layers[part.layer].full))
        self.locals = tuple(
            Kept(tuple(part for part in attention if self.layers[part.layer].local == local), local)
            for local in dict.fromkeys(layer.local for layer in self.layers)
            if local is not None
        )
        self.states = Kept(tuple(part for part in parts if part.is_state))
        self.kept = tuple(kept for kept in (self.full, *self.locals, self.states) if kept.parts)
        self.has_attention = bool(attention)


@torch.inference_mode()
def _probe(model: PreTrainedModel, layers: Sequence[LayerPast]) -> list[PastPart]:
    """Every tensor that a forward pass keeps, in order."""
    cache = DynamicCache(config=model.config)
    with refusing(model):
        logits(model, torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device), cache)
    if len(cache.layers) > len(layers):
        raise ConfigurationError(
            f"{type(model).__name__} keeps the past of {len(cache.layers)} layers, but its configuration has "
            f"{len(layers)}: what the others keep is not known"
        )
    parts: list[PastPart] = []
    for index, (past, layer) in enumerate(zip(layers, cache.layers, strict=True)):
        held = tensors_of(layer)
        if (past.full or past.local) and held.keys().isdisjoint(KEYS_AND_VALUES):
            raise ConfigurationError(
                f"{type(model).__name__} keeps the past of its layer {index} outside transformers' Cache, or keeps "
                "none: there is nothing to cache"
            )
        for key, each in held.items():
            shape = (each.shape[1], each.shape[3]) if key in KEYS_AND_VALUES else tuple(each.shape)
            parts.append(PastPart(index, *key, shape, each.dtype))
    return parts


def tensors_of(layer: object) -> dict[tuple[str, int], torch.Tensor]:
    """All that a layer holds, by name and by the index of its pair of states."""
    held: dict[tuple[str, int], torch.Tensor | None] = {}
    if isinstance(layer, CacheLayerMixin):
        held = {KEYS: layer.keys, VALUES: layer.values}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for index in range(layer.number_of_states):
            held[CONV, index], held[RECURRENT, index] = layer.conv_states[index], layer.recurrent_states[index]
    return {key: tensor for key, tensor in held.items() if tensor is not None}


def put(layer: Any, key: tuple[str, int], tensor: torch.Tensor) -> None:
    """Give a layer one of them: of its rows, or of others."""
    name, index = key
    if key in KEYS_AND_VALUES:
        setattr(layer, name, tensor)
    elif (states := layer.conv_states if name == CONV else layer.recurrent_states)[index] is None:
        (layer.update_conv_state if name == CONV else layer.update_recurrent_state)(tensor, index)
    else:
        states[index] = tensor
