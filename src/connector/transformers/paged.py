"""The device pool of the embedded engine, and the cache layers that let a transformers model read and write it.

    pool tensor    [blocks, block_tokens, heads, width]      two per layer, K and V, allocated once
    request        a BlockTable: which blocks, in order, and how many tokens in them hold KV

A layer's `update` scatters new keys and values into the request's blocks and hands back all of them, gathered.
Nothing of a request's KV lives anywhere else.
"""

import torch
from transformers.cache_utils import CacheLayerMixin

from connector.transformers.past import ModelPast
from cpu_prefix_cache.memory.arena import check_fits


class BlockTable:
    """The blocks of one request. `length` tokens are computed; a forward adds `pending` more."""

    def __init__(self, block_tokens: int) -> None:
        self.blocks: list[int] = []
        self.length = 0
        self.block_tokens = block_tokens
        self._pending = 0
        self._ids = torch.empty(0, dtype=torch.long)
        self._slots = torch.empty(0, dtype=torch.long)

    def begin_forward(self, num_tokens: int, device: torch.device) -> None:
        """Prepare to write `num_tokens` tokens behind those that are computed. Their blocks are there already."""
        self._pending = num_tokens
        end = self.length + num_tokens
        self._ids = torch.tensor(self.blocks[: -(-end // self.block_tokens)], device=device)
        positions = torch.arange(self.length, end, device=device)
        self._slots = self._ids[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens

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
    """The pool tensors of a model: `[blocks, block_tokens, heads, width]` for K and V of every full-attention layer."""

    def __init__(self, past: ModelPast, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        if device.type == "cpu":
            check_fits(num_blocks * block_tokens * past.full.num_bytes)
        self._layers: dict[int, list[torch.Tensor]] = {}
        for part in past.full:  # K before V
            pool = torch.zeros(num_blocks, block_tokens, *part.shape, dtype=part.dtype, device=device)
            self._layers.setdefault(part.layer, []).append(pool)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parts of the one group, layer by layer, K before V."""
        return [part for layer in self._layers.values() for part in layer]

    @property
    def block_bytes(self) -> int:
        """What one block weighs over all layers."""
        return sum(part[0].numel() * part.element_size() for part in self.tensors)

    def layer(self, index: int, table: BlockTable) -> PagedLayer:
        """Layer `index` of the model, for the request with this table."""
        keys, values = self._layers[index]
        return PagedLayer(keys, values, table)
