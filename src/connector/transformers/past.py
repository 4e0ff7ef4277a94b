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
from itertools import groupby
from math import prod

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from connector.transformers.forward import ForwardPass, refusing
from connector.transformers.layers import LayerPast, Local, classify
from cpu_prefix_cache import ConfigurationError

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
    def is_state(self) -> bool:
        return self.name in ("conv", "recurrent")

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
        return any(part.is_state for part in self.parts)

    def row_bytes(self, tokens: int) -> int:
        """The bytes of a block of so many tokens, or of all states."""
        return max((span.stop for _, span in self.spans(tokens)), default=0)

    def spans(self, tokens: int) -> Iterator[tuple[Sequence[PastPart], slice]]:
        """Neighbours that are alike, and their bytes in a row. A state begins where its type can be read."""
        end = 0
        for (*_, dtype), alike in groupby(
            self.parts, lambda part: (part.is_state and part.name, part.shape, part.dtype)
        ):
            parts = list(alike)
            begin = -(-end // dtype.itemsize) * dtype.itemsize
            end = begin + sum(part.num_bytes for part in parts) * (1 if self.is_state else tokens)
            yield parts, slice(begin, end)

    def views(self, rows: torch.Tensor, tokens: int) -> Iterator[tuple[Sequence[PastPart], torch.Tensor]]:
        """The same in rows of bytes: [rows, parts, heads, tokens, width], or [rows, parts, *shape] of states."""
        for parts, span in self.spans(tokens):
            heads, *width = shape = parts[0].shape
            each = shape if self.is_state else (heads, tokens, *width)
            yield parts, rows[:, span].view(parts[0].dtype).unflatten(1, (len(parts), *each))

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
        ForwardPass(model)(torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device), 0, cache)
    if len(cache.layers) > len(layers):
        raise ConfigurationError(
            f"{type(model).__name__} keeps the past of {len(cache.layers)} layers, but its configuration has "
            f"{len(layers)}: what the others keep is not known"
        )
    parts: list[PastPart] = []
    for index, (past, layer) in enumerate(zip(layers, cache.layers, strict=True)):
        if past.full or past.local:
            if not isinstance(layer, CacheLayerMixin) or layer.keys is None or layer.values is None:
                raise ConfigurationError(
                    f"{type(model).__name__} keeps the past of its layer {index} outside transformers' Cache, or keeps "
                    "none: there is nothing to cache"
                )
            for name, each in (("keys", layer.keys), ("values", layer.values)):
                parts.append(PastPart(index, name, 0, (each.shape[1], each.shape[3]), each.dtype))
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            parts += [PastPart(index, name, at, tuple(each.shape), each.dtype) for name, at, each in states_of(layer)]
    return parts


def states_of(layer: LinearAttentionCacheLayerMixin) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The states of a layer, each as its name, the index of its pair, and the tensor."""
    for index in range(layer.number_of_states):
        for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            state = states[index]
            if state is not None:
                yield name, index, state
