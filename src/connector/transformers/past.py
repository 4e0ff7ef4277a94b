"""The shapes and bytes of what a model keeps of the past.

They are probed with a short forward pass, since configurations do not name them uniformly: latent attention keeps one
head of two widths, and a state may be float32 in a half-precision model. Bytes are ordered by layer; within a layer K,
then V, then its states, convolution before recurrent.

    full      K and V of all tokens, in layers of full attention         a row of bytes: a block of tokens,
    local     those of the recent ones; for each kind and size           part after part, [heads, tokens, width] each
    states    all states together                                        a row: all of them at one position
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from connector.transformers.layers import FULL, STATES, Kind, LayerPast, classify
from connector.transformers.running import logits, refusing
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import RAW

KEYS, VALUES = KEYS_AND_VALUES = ("keys", 0), ("values", 0)
CONV, RECURRENT = "conv", "recurrent"
ALIGNMENT = 16  # bytes: a row of a device block can be viewed as any type, and copied in wide words
PROBE_TOKENS = 2  # more than one, because a decode step may keep other dtypes than a prefill


class PastPart(NamedTuple):
    """One tensor: K or V of a block of tokens, [heads, tokens, width]; or a whole state, with its batch dimension of 1.

    `key` is its key among those of its layer: keys, values, conv or recurrent, and a number among the states.
    """

    layer: int
    key: tuple[str, int]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Kept:
    """Parts of one kind: of a block of tokens, or of all states. A row of `row_bytes` bytes has them all."""

    def __init__(self, kind: Kind, parts: Sequence[PastPart], block_tokens: int) -> None:
        self.kind, self.parts, self._block_tokens = kind, parts, block_tokens
        self.row_bytes = 0
        self._runs: list[tuple[list[PastPart], slice]] = []  # of parts of one shape and dtype, which begin aligned
        for (shape, dtype), run in groupby(parts, key=lambda part: (part.shape, part.dtype)):
            begin, like = -(-self.row_bytes // dtype.itemsize) * dtype.itemsize, list(run)
            self.row_bytes = begin + len(like) * prod(shape) * dtype.itemsize
            self._runs.append((like, slice(begin, self.row_bytes)))

    def views(self, rows: torch.Tensor) -> Iterator[tuple[PastPart, torch.Tensor]]:
        """Each part in rows of bytes: [rows, *shape]."""
        for like, span in self._runs:
            values = rows[:, span].view(like[0].dtype).view(len(rows), len(like), *like[0].shape)
            yield from zip(like, values.unbind(1), strict=True)

    def first_needed(self, length: int) -> int:
        """The first token of the blocks that hold all that the token at `length`, or a later one, can see."""
        return self.kind.needed(length).start // self._block_tokens * self._block_tokens


class ModelPast:
    """Past that a model keeps, in blocks of `block_tokens` tokens.

    `layers` lists the states of each layer. `full`, `locals` (windows of two sizes are two) and `states` are what is
    kept in them, `kept` those of them that have parts, and `groups` their groups. All is in device blocks of
    `block_bytes`: one block of full attention, or in a model without any the largest other piece. The host keeps full
    attention in the form of `codec`.

    Raises ConfigurationError for layers of an unknown kind, for attention that keeps no keys and values, and for a
    codec without full attention.
    """

    def __init__(self, model: PreTrainedModel, block_tokens: int, codec: str = RAW) -> None:
        self.layers, self.device, self.block_tokens = classify(model), model.device, block_tokens
        parts = _probe(model, self.layers, block_tokens)
        kinds = dict.fromkeys(layer.attention for layer in self.layers if layer.attention is not None)
        of_kind = {kind: Kept(kind, parts.get(kind, ()), block_tokens) for kind in (FULL, *kinds, STATES)}
        self.full, *self.locals, self.states = of_kind.values()
        self.kept = [each for each in of_kind.values() if each.parts]
        self.has_attention = self.kept != [self.states]
        if codec != RAW and not self.full.parts:
            raise ConfigurationError(
                f'codec "{codec}" is for full attention, of which {type(model).__name__} has none: leave codec out'
            )
        content = self.full.row_bytes or max(each.row_bytes for each in self.kept)
        self.block_bytes = -(-content // ALIGNMENT) * ALIGNMENT
        self.groups = [
            replace(
                each.kind,
                block_tokens=block_tokens,
                block_bytes=each.row_bytes if each.kind.is_prefix else self.block_bytes,
                device_blocks=-(-each.row_bytes // self.block_bytes),
                codec=codec if each.kind.is_prefix else RAW,
            )
            for each in self.kept
        ]


@torch.inference_mode()
def _probe(model: PreTrainedModel, layers: Sequence[LayerPast], block_tokens: int) -> dict[Kind, list[PastPart]]:
    """Every tensor that a forward pass keeps, by its kind, in order."""
    cache = DynamicCache(config=model.config)
    with refusing(model):
        logits(model, torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device), cache)
    if len(cache.layers) > len(layers):
        raise ConfigurationError(
            f"{type(model).__name__} keeps the past of {len(cache.layers)} layers, but its configuration has "
            f"{len(layers)}: what the others keep is not known"
        )
    parts: defaultdict[Kind, list[PastPart]] = defaultdict(list)
    for index, (past, layer) in enumerate(zip(layers, cache.layers, strict=True)):
        held = tensors_of(layer)
        if past.attention is not None and held.keys().isdisjoint(KEYS_AND_VALUES):
            raise ConfigurationError(
                f"{type(model).__name__} keeps the past of its layer {index} outside transformers' Cache, or keeps "
                "none: there is nothing to cache"
            )
        for key, each in held.items():
            if key in KEYS_AND_VALUES and past.attention is not None:
                shape = each.shape[1], block_tokens, each.shape[3]
                parts[past.attention].append(PastPart(index, key, shape, each.dtype))
            else:
                parts[STATES].append(PastPart(index, key, tuple(each.shape), each.dtype))
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
