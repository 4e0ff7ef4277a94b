"""The device pool of the engine, and the cache layers through which a transformers model reads and writes it.

    region            uint8 [blocks, block bytes], allocated once: one pool of equal blocks, as on the host
    full attention    block b of every layer's K and V is a view of row b: [blocks, block_tokens, heads, width]
    windows, states   a piece takes as many rows as it needs, as plain bytes
    request           a BlockTable: its blocks in order, and how many tokens in them hold KV

A layer's `update` scatters new keys and values into the request's blocks, and returns the keys and values of all its
tokens, gathered. The full attention of a request is stored nowhere else.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import CacheLayerMixin

from connector.transformers.past import ModelPast, Part
from cpu_prefix_cache import Group, GroupKind
from cpu_prefix_cache.kv_layout import KVGroup
from cpu_prefix_cache.memory.limits import check_fits
from cpu_prefix_cache.memory.parts import Role, blocks_first

ALIGNMENT = 16  # bytes: a row can be viewed as any type, and copied in wide words


class BlockTable:
    """The blocks of one request, in which `length` tokens are computed."""

    def __init__(self, block_tokens: int) -> None:
        self.blocks: list[int] = []
        self.length = 0
        self.block_tokens = block_tokens
        self._pending = 0
        self._ids = self._written = self._offsets = torch.empty(0, dtype=torch.long)

    def begin_forward(self, num_tokens: int, device: torch.device) -> None:
        """Prepare to write `num_tokens` tokens after the computed ones. Their blocks must be in `blocks`."""
        self._pending = num_tokens
        if not self.blocks:
            return  # no layer of full attention
        end = self.length + num_tokens
        self._ids = torch.tensor(self.blocks[: -(-end // self.block_tokens)], device=device)
        positions = torch.arange(self.length, end, device=device)
        self._written, self._offsets = self._ids[positions // self.block_tokens], positions % self.block_tokens

    def end_forward(self) -> None:
        self.length += self._pending
        self._pending = 0

    def exchange(self, pool: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write `states`, [1, heads, new tokens, width], into `pool`. Returns all, [1, heads, tokens, width]."""
        pool[self._written, self._offsets] = states[0].transpose(0, 1)
        return pool[self._ids].flatten(0, 1)[: self.length + self._pending].transpose(0, 1)[None]


class PagedLayer(CacheLayerMixin):
    """One full-attention layer over the pool, for the request with this table."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, table: BlockTable) -> None:
        super().__init__()
        self._pools = keys, values
        self._table = table
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is allocated."""

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
    """`num_blocks` device blocks for a model's past, and the groups of that past.

    A block holds `block_tokens` tokens of full attention; in a model without any, the largest other piece.
    """

    def __init__(self, past: ModelPast, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        self.block_bytes = _block_bytes(past, block_tokens)
        if device.type == "cpu":
            check_fits(num_blocks * self.block_bytes)
        self.region = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)
        self._layers: dict[int, list[torch.Tensor]] = {}
        for part, span in past.full.spans(block_tokens):  # K before V
            self._layers.setdefault(part.layer, []).append(_view(self.region[:, span], part, block_tokens))
        self.groups = groups_of(past, block_tokens)

    @property
    def layout(self) -> list[KVGroup]:
        """Every group with its parts: of full attention K and V of each layer; of the others rows of plain bytes."""
        full = [
            blocks_first(layer, role, pool)
            for layer, pools in self._layers.items()
            for role, pool in zip((Role.KEY, Role.VALUE), pools, strict=True)
        ]
        rows = [blocks_first(0, Role.STATE, self.region)]
        return [KVGroup(group, full if group.kind is GroupKind.PREFIX else rows) for group in self.groups]

    def layer(self, index: int, table: BlockTable) -> PagedLayer:
        """Layer `index` of the model, for the request with this table."""
        keys, values = self._layers[index]
        return PagedLayer(keys, values, table)

    def write(self, blocks: Sequence[int], piece: torch.Tensor) -> None:
        """Write a piece, uint8 [bytes], to its blocks. The rest of the last block is zeroed."""
        rows = piece.new_zeros(len(blocks), self.block_bytes)
        rows.view(-1)[: len(piece)] = piece
        self.region[torch.tensor(blocks, device=self.region.device)] = rows

    def read(self, blocks: Sequence[int], num_bytes: int) -> torch.Tensor:
        """A copy of the bytes of a piece, uint8 [num_bytes]."""
        return self.region[torch.tensor(blocks, device=self.region.device)].view(-1)[:num_bytes]


def _view(rows: torch.Tensor, part: Part, block_tokens: int) -> torch.Tensor:
    """A view of the bytes of every block as [blocks, block_tokens, heads, width]."""
    return rows.view(part.dtype).unflatten(1, (block_tokens, *part.shape))


def _block_bytes(past: ModelPast, block_tokens: int) -> int:
    others = [local.token_bytes * block_tokens for local in past.locals] + [past.states.num_bytes]
    content = past.full.num_bytes * block_tokens or max(others)
    return -(-content // ALIGNMENT) * ALIGNMENT


def groups_of(past: ModelPast, block_tokens: int) -> tuple[Group, ...]:
    """Full attention first, then one group for each size of window or attention chunk, then all states together."""
    block_bytes = _block_bytes(past, block_tokens)

    def in_blocks(name: str, kind: GroupKind, num_bytes: int, window_tokens: int = 0) -> Group:
        return Group(
            name=name,
            kind=kind,
            window_tokens=window_tokens,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            device_blocks=-(-num_bytes // block_bytes),
        )

    groups = []
    if past.full.num_bytes:
        full = past.full.num_bytes * block_tokens
        groups.append(Group(name="attention", kind=GroupKind.PREFIX, block_tokens=block_tokens, block_bytes=full))
    groups += [
        in_blocks(
            f"{each.local.kind.value}-{each.local.tokens}",
            each.local.kind,
            each.token_bytes * block_tokens,
            each.local.tokens,
        )
        for each in past.locals
    ]
    if past.states.num_bytes:
        groups.append(in_blocks("state", GroupKind.STATE, past.states.num_bytes))
    return tuple(groups)
