"""The device pool of the embedded engine, and the cache layers that let a transformers model read and write it.

    pool tensor    [blocks, block_tokens, heads, width]      two per layer, K and V, allocated once
    request        a BlockTable: which blocks, in order, and how many tokens in them hold KV

A layer's `update` scatters new keys and values into the request's blocks and hands back all of them, gathered.
Nothing of a request's KV lives anywhere else.
"""

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.memory.arena import check_fits

PROBE_TOKENS = 8
# Relative to the deviation of the logits. Models that continue measure 1e-6 to 3e-6 in float32, half precision 1e-2.
PROBE_TOLERANCE = {True: 2e-5, False: 5e-2}


class BlockTable:
    """The blocks of one request. `length` tokens are computed; a forward adds `pending` more."""

    def __init__(self, block_tokens: int) -> None:
        self.blocks: list[int] = []
        self.length = 0
        self._block_tokens = block_tokens
        self._pending = 0
        self._ids = torch.empty(0, dtype=torch.long)
        self._slots = torch.empty(0, dtype=torch.long)

    def begin_forward(self, num_tokens: int, device: torch.device) -> None:
        """Prepare to write `num_tokens` tokens behind those that are computed. Their blocks are there already."""
        self._pending = num_tokens
        end = self.length + num_tokens
        self._ids = torch.tensor(self.blocks[: -(-end // self._block_tokens)], device=device)
        positions = torch.arange(self.length, end, device=device)
        self._slots = self._ids[positions // self._block_tokens] * self._block_tokens + positions % self._block_tokens

    def end_forward(self) -> None:
        self.length += self._pending
        self._pending = 0

    def exchange(self, pool: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write `states` [1, heads, pending, width] into `pool`; the request's whole [1, heads, tokens, width]."""
        pool.flatten(0, 1)[self._slots] = states[0].transpose(0, 1)
        return pool[self._ids].flatten(0, 1)[: self.length + self._pending].transpose(0, 1)[None]


class PagedLayer(CacheLayerMixin):
    """One full-attention layer over the pool, for the request whose table it was given."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, table: BlockTable) -> None:
        super().__init__()
        self._pools = keys, values
        self._table = table
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool was allocated with the engine."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._pools
        return self._table.exchange(keys, key_states), self._table.exchange(values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._table.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._table.length

    def get_max_length(self) -> int:
        return -1


class PagedKV:
    """The pool tensors of a model: `[blocks, block_tokens, heads, width]` for K and V of every layer."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_tokens: int) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        probed = _probe(model)
        token_bytes = sum(one.numel() * one.element_size() for states in probed for one in states)
        if model.device.type == "cpu":
            check_fits(num_blocks * block_tokens * token_bytes)
        for states in probed:
            keys, values = (one.new_zeros(num_blocks, block_tokens, one.shape[1], one.shape[3]) for one in states)
            self._layers.append((keys, values))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parts of the one group, layer by layer, K before V."""
        return [part for layer in self._layers for part in layer]

    @property
    def block_bytes(self) -> int:
        """What one block weighs over all layers."""
        return sum(part[0].numel() * part.element_size() for part in self.tensors)

    def cache(self, table: BlockTable) -> Cache:
        """What a forward of the request with this table takes as `past_key_values`."""
        return Cache(layers=[PagedLayer(keys, values, table) for keys, values in self._layers])


@torch.inference_mode()
def check_continues(model: PreTrainedModel) -> None:
    """Raise ConfigurationError unless `model` goes on from its own cache as if it had seen everything at once.

    Some cannot (a mask that looks ahead, a state that is dropped), and some depend on the length of the whole prompt
    (rotary factors that change with it), which a key does not know.
    """
    name = type(model).__name__
    rope = model.config.get_text_config().to_dict().get("rope_parameters") or {}
    if "longrope" in str(rope):  # it may be nested by kind of layer
        raise ConfigurationError(
            f"{name} rotates its keys by factors that change with the length of the prompt (longrope): "
            "what one prompt computed is wrong for a longer one of the same beginning"
        )
    ids = torch.arange(2 * PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole = _last_logits(model, ids, DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    _last_logits(model, ids[:, :PROBE_TOKENS], cache)
    continued = _last_logits(model, ids[:, PROBE_TOKENS:], cache)
    error = float((whole - continued).abs().max() / whole.std())
    if not error <= PROBE_TOLERANCE[whole.dtype == torch.float32]:
        raise ConfigurationError(
            f"{name} does not go on from its own cache: its logits are off by {error:.1e} deviations"
        )


def _last_logits(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    past = cache.get_seq_length()
    positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
    logits: torch.Tensor = model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[0, -1]
    return logits


@torch.inference_mode()
def _probe(model: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V, [1, heads, 1, width], of every layer after one token: it knows its shapes, whatever they are called."""
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        _full_attention(model, index, layer)  # before the forward, which those of other kinds may not survive
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    states = []
    for index, each in enumerate(cache.layers):
        layer = _full_attention(model, index, each)
        if layer.keys is None or layer.values is None:
            raise ConfigurationError(f"layer {index} of {type(model).__name__} keeps no keys and values")
        states.append((layer.keys, layer.values))
    return states


def _full_attention(model: PreTrainedModel, index: int, layer: object) -> DynamicLayer:
    if type(layer) is not DynamicLayer:
        raise ConfigurationError(
            f"layer {index} of {type(model).__name__} keeps its past as {type(layer).__name__}, which is not built "
            "yet; only full attention is"
        )
    return layer
