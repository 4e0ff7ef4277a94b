"""Part of the past that each layer of a model keeps, derived from transformers' own cache layers:

    full        the keys and values of every token      full attention, MLA (its latent)
    local       those of the recent tokens only         sliding windows, chunked attention
    state       values that every token updates         Mamba, linear attention, short convolutions
    full and state, in one layer                        Falcon-H1
    nothing                                             feed-forward layers, and those that share another's keys

Any other kind (static, quantized, compressed, indexed, ...) raises ConfigurationError with its name, because treating
it as one of these would silently give wrong results.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from connector.transformers.rows import Rows
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.deciding import ChunkLocalGroup, WindowGroup

# A layer that keeps nothing. 5.19 has no kind for it: there such a layer is a state layer, and stays without a state.
NothingLayer: type[Any] = vars(cache_utils).get("DummyLayer", LinearAttentionLayer)


# Attention to a limited number of past tokens, as a group in blocks of one token whose bytes are not known yet.
Local = WindowGroup | ChunkLocalGroup


def first_seen(local: Local, position: int) -> int:
    """The first token that the token at `position`, or any later one, can see."""
    return local.needed(position).start


@dataclass(frozen=True, slots=True)
class LayerPast:
    """The state of one layer: nothing, if all are at their defaults.

    `states` is its number of (convolution, recurrent) pairs of states, or of those it has room for.
    """

    full: bool = False
    local: Local | None = None
    states: int = 0


def classify(model: PreTrainedModel) -> tuple[LayerPast, ...]:
    """Sort the layers of `model` by what each keeps. Raises ConfigurationError for a kind that is not known here."""
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
        return LayerPast(local=_local(ChunkLocalGroup if kind == "chunked_attention" else WindowGroup, layer))
    if type(layer) is LinearAttentionLayer:
        return LayerPast(states=layer.number_of_states)
    if type(layer) is NothingLayer:
        return LayerPast()
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return LayerPast(full=True, states=layer.number_of_states)
    raise ConfigurationError(
        f"{place} keeps its past as {type(layer).__name__}, which is not supported; supported are full, sliding-window "
        "and chunked attention, linear-attention and convolution states, and full attention with states in one layer"
    )


def _local(kind: type[Local], layer: DynamicSlidingWindowLayer) -> Local:
    tokens = layer.sliding_window
    return kind(name=f"{kind.kind}-{tokens}", block_tokens=1, block_bytes=1, window_tokens=tokens)


class LocalLayer(CacheLayerMixin):
    """One layer of local attention: keys and values of the recent tokens of each row, [rows, columns, heads, width].

    Unlike transformers' layer it keeps whole blocks: after a forward pass, all tokens from the first block that the
    next token can see, and all that the pass computed. So the blocks of a checkpoint can be taken at any boundary,
    after prefill chunks of any length, and a block has the same bytes whenever it is taken.
    """

    is_sliding = True

    def __init__(self, local: Local, rows: Rows) -> None:
        super().__init__()
        self.sliding_window = local.window_tokens
        self._local = local
        self._rows = rows
        self._firsts = [0] * len(rows)  # the first token of each row that is held
        self._keys = self._values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._keys, self._values = (states[:, :, :0].transpose(1, 2) for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen, start = self._column(self._seen()), self._start
        kept = max(start, self._column([first - first % self._block_tokens for first in self._seen()]))
        self._keys = torch.cat([self._keys[:, kept - start :], key_states.transpose(1, 2)], dim=1)
        self._values = torch.cat([self._values[:, kept - start :], value_states.transpose(1, 2)], dim=1)
        self._firsts = [max(first, kept - pad) for first, pad in zip(self._firsts, self._rows.pads, strict=True)]
        return self._keys[:, seen - kept :].transpose(1, 2), self._values[:, seen - kept :].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self._column(self._seen())
        return self._rows.columns - seen + query_length, seen

    def get_seq_length(self) -> int:
        return self._rows.columns

    def get_max_length(self) -> int:
        return -1

    def held(self, row: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of the tokens [first, end) of a row, each [tokens, heads, width].

        Raises MisuseError if they are not held.
        """
        length = self._rows.lengths[row]
        if not self._firsts[row] <= first < end <= length:
            raise MisuseError(f"asked for the tokens [{first}, {end}), but [{self._firsts[row]}, {length}) are held")
        return self._held(row, first, end)

    def restore(self, first: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Continue a single row at position `length` with the tokens [first, length), given as [tokens, heads, width].

        Raises MisuseError if the layer is not fresh, or a token at `length` can see tokens before `first`.
        """
        if self.is_initialized or first > first_seen(self._local, length):
            raise MisuseError(
                f"a fresh layer at {length} needs the tokens from {first_seen(self._local, length)}; "
                f"got those from {first}{', in a layer that is not fresh' if self.is_initialized else ''}"
            )
        self._keys, self._values, self._firsts = keys[None], values[None], [first]
        self.is_initialized = True

    def join(self, sources: Sequence[tuple["LocalLayer", int]]) -> None:
        """Begin with these rows of other layers."""
        self._firsts = [layer._firsts[at] for layer, at in sources]
        held = [layer._held(at, layer._firsts[at], layer._rows.lengths[at]) for layer, at in sources]
        columns = self._rows.columns - self._start
        self._keys, self._values = (_aligned(rows, columns) for rows in zip(*held, strict=True))
        self.is_initialized = True

    @property
    def _block_tokens(self) -> int:
        return self._rows.tables[0].block_tokens

    @property
    def _start(self) -> int:
        """The first column that is held."""
        return self._column(self._firsts)

    def _seen(self) -> list[int]:
        """The first token of each row that its next one can see."""
        return [first_seen(self._local, length) for length in self._rows.lengths]

    def _column(self, tokens: Sequence[int]) -> int:
        """The first column that has one of these tokens, one of each row."""
        return min(map(operator.add, self._rows.pads, tokens))

    def _held(self, row: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        before = self._start - self._rows.pads[row]
        part = slice(first - before, end - before)
        return self._keys[row, part], self._values[row, part]


class FullAndStateLayer(LinearAttentionAndFullAttentionLayer):
    """A layer with full attention and states: transformers' class keeps the states, `full` the keys and values."""

    def __init__(self, full: CacheLayerMixin, states: int) -> None:
        super().__init__(number_of_states=states)
        self.full = full

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.full.update(key_states, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return int(self.full.get_seq_length())


def _aligned(rows: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """`rows`, each [tokens, heads, width], with their ends in one column: [rows, columns, heads, width]."""
    joined = rows[0].new_zeros(len(rows), columns, *rows[0].shape[1:])
    for row, tokens in zip(joined, rows, strict=True):
        row[columns - len(tokens) :] = tokens
    return joined
