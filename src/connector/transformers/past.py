"""The shapes and bytes of what a model keeps of the past.

They are probed with a short forward pass, since configurations do not name them uniformly: latent attention keeps one
head of two widths, and a state may be float32 in a half-precision model. Bytes are ordered by layer; within a layer K,
then V, then its states, convolution before recurrent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Parts:
    """Parts that are stored one after the other."""

    def __init__(self, parts: Iterable[PastPart]) -> None:
        self._parts = tuple(parts)
        self.num_bytes = sum(part.num_bytes for part in self._parts)

    def __iter__(self) -> Iterator[PastPart]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def spans(self, times: int = 1) -> Iterator[tuple[PastPart, slice]]:
        """Each part and its span of bytes, if each part is stored for `times` tokens before the next part."""
        ends = accumulate((times * part.num_bytes for part in self._parts), initial=0)
        for part, (begin, end) in zip(self._parts, pairwise(ends), strict=True):
            yield part, slice(begin, end)


@dataclass(frozen=True, slots=True, eq=False)
class LocalGroup:
    """All layers with the same kind and size of local attention; `parts` are K and V of one token."""

    local: Local
    parts: Parts

    @property
    def token_bytes(self) -> int:
        return self.parts.num_bytes


class ModelPast:
    """Past that a model keeps.

    `layers` lists the states of each layer. `full` are K and V of one token in all layers of full attention, `locals`
    are groups of local attention (windows of two sizes are two groups), `states` are all states together.

    Raises ConfigurationError for layers of an unknown kind, and for attention that keeps no keys and values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = classify(model)
        parts = _probe(model, self.layers)
        attention = [part for part in parts if part.name in ("keys", "values")]
        self.full = Parts(part for part in attention if self.layers[part.layer].full)
        self.locals = tuple(
            LocalGroup(local, Parts(part for part in attention if self.layers[part.layer].local == local))
            for local in dict.fromkeys(layer.local for layer in self.layers)
            if local is not None
        )
        self.states = Parts(part for part in parts if part.name in ("conv", "recurrent"))
        self.has_attention = bool(attention)


@torch.inference_mode()
def _probe(model: PreTrainedModel, layers: Sequence[LayerPast]) -> list[PastPart]:
    """Every tensor that a forward pass keeps, in order."""
    cache = DynamicCache(config=model.config)
    with refusing(model):
        ForwardPass(model)(torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device), [0], cache)
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
