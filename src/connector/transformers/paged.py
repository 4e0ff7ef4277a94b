"""The device pool of the engine, and the cache layers through which a transformers model reads and writes it.

    region            uint8 [blocks, block bytes], allocated once: one pool of equal blocks, as on the host
    full attention    block b of every layer's K and V is a view of row b: [blocks, block_tokens, heads, width]
    windows, states   a piece takes as many rows as it needs, as plain bytes
    request           a BlockTable: its blocks in order, and how many tokens it has KV of

While a request runs, each of its layers has the keys and values of all its tokens in one stretch of memory of its own:

    first forward     the blocks before it are gathered, once
    every forward     new keys and values are appended; those of each block that is now full are written to the pool
    end               the stretch is dropped; what the pool does not have, less than a block, is lost

So a token costs an append. (Gathering all keys and values for each token took a third of the time at 6,000 tokens;
transformers' own cache copies them for each.) The price is that the KV of a running request is there twice.
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
SPARE = 8  # of a stretch that grows, one part in so many is room for tokens to come


class BlockTable:
    """The blocks of one request, in which `length` tokens are computed. `length` starts at the end of a block."""

    def __init__(self, block_tokens: int) -> None:
        self.blocks: list[int] = []
        self.length = 0
        self.block_tokens = block_tokens
        self.filled: list[int] = []  # the blocks that are full after the forward pass under way
        self.filled_ids = torch.empty(0, dtype=torch.long)
        self._pending = 0
        self._is_written = True

    def reader(self) -> "BlockTable":
        """A table of the blocks before `length`, from which another forward pass can go on. It writes no block."""
        table = BlockTable(self.block_tokens)
        table.blocks, table.length, table._is_written = list(self.blocks), self.length, False
        return table

    def begin_forward(self, num_tokens: int, device: torch.device) -> None:
        """Prepare to write `num_tokens` tokens after the computed ones. Their blocks must be in `blocks`."""
        self._pending = num_tokens
        end = self.length + num_tokens
        full = slice(self.length // self.block_tokens, end // self.block_tokens)
        self.filled = self.blocks[full] if self._is_written else []
        self.filled_ids = torch.tensor(self.filled, dtype=torch.long, device=device)

    def end_forward(self) -> None:
        self.length += self._pending
        self._pending = 0

    def computed(self, device: torch.device) -> torch.Tensor:
        """The ids of the blocks before `length`."""
        return torch.tensor(self.blocks[: self.length // self.block_tokens], dtype=torch.long, device=device)


class _Stretch:
    """K or V of all tokens of one request in one layer, [heads, tokens, width], and the pool that it is written to."""

    def __init__(self, pool: torch.Tensor, table: BlockTable) -> None:
        self._pool = pool
        self._table = table
        self._memory: torch.Tensor | None = None

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Append `states`, [1, heads, new tokens, width], after `table.length` tokens. Returns all in this form."""
        begin, tokens = self._table.length, self._table.block_tokens
        end = begin + states.shape[-2]
        memory = self._memory = self._with_room(end)
        memory[:, begin:end] = states[0]
        if self._table.filled:
            whole = memory[:, begin // tokens * tokens : end // tokens * tokens]
            self._pool[self._table.filled_ids] = whole.transpose(0, 1).unflatten(0, (-1, tokens))
        return memory[None, :, :end]

    def _with_room(self, tokens: int) -> torch.Tensor:
        """The stretch with room for so many tokens; what it holds is moved when it grows."""
        if self._memory is not None and self._memory.shape[1] >= tokens:
            return self._memory
        held = self._gathered() if self._memory is None else self._memory[:, : self._table.length]
        larger = held.new_empty(held.shape[0], tokens + tokens // SPARE, held.shape[2])
        larger[:, : held.shape[1]] = held
        return larger

    def _gathered(self) -> torch.Tensor:
        """What the blocks before `table.length` hold."""
        blocks = self._pool.index_select(0, self._table.computed(self._pool.device))  # faster than pool[ids]
        return blocks.flatten(0, 1).transpose(0, 1)


class PagedLayer(CacheLayerMixin):
    """One full-attention layer over the pool, for the request with this table."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, table: BlockTable) -> None:
        super().__init__()
        self._stretches = _Stretch(keys, table), _Stretch(values, table)
        self._table = table
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._stretches
        return keys.append(key_states), values.append(value_states)

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
        self._words = self.region.view(torch.int64)  # torch writes single bytes four times as slowly
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

    def release(self) -> None:
        """Give the memory of the pool back. Nothing can be read or written any more."""
        self._layers.clear()
        self.region = self._words = self.region.new_empty(0)

    def write(self, blocks: Sequence[int], piece: torch.Tensor) -> None:
        """Write a piece, uint8 [bytes], to its blocks. The rest of the last block is zeroed."""
        rows = piece.new_zeros(len(blocks), self.block_bytes)
        rows.view(-1)[: len(piece)] = piece
        self._words[torch.tensor(blocks, device=self.region.device)] = rows.view(torch.int64)

    def read(self, blocks: Sequence[int], num_bytes: int) -> torch.Tensor:
        """A copy of the bytes of a piece, uint8 [num_bytes]."""
        return self.region.index_select(0, torch.tensor(blocks, device=self.region.device)).view(-1)[:num_bytes]


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
