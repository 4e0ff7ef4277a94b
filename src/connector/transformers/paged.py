"""The device pool of the engine, and the cache layers through which a transformers model reads and writes it.

    region            uint8 [blocks, block bytes], allocated once: one pool of equal blocks, as on the host
    full attention    block b of every layer's K and V is a view of row b: [blocks, heads, block_tokens, width]
    windows, states   a piece takes as many rows as it needs, as plain bytes
    rows              the requests that are computed together (rows.py), each with a BlockTable

While requests run, each layer has the keys and values of all their tokens in one stretch of memory of its own:

    first forward     the blocks before it are gathered, once
    every forward     new keys and values are appended; those of each block that is now full are written to the pool
    join              the rows of several requests are copied into one stretch, or those that go on
    end               the stretch is dropped; what the pool does not have, less than a block, is lost

So a token costs an append. (Gathering all keys and values for each token took a third of the time at 6,000 tokens;
transformers' own cache copies them for each.) The tokens of one head lie together, in the stretch and in each block: a
block is gathered head by head. With the heads of each token together, decode after 6,000 tokens took 1.4 times as long.
The price is that the KV of a running request is there twice.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from connector.transformers.past import ModelPast, PastPart
from connector.transformers.rows import Rows
from cpu_prefix_cache import KVGroup
from cpu_prefix_cache.copying import Role, blocks_first, check_fits
from cpu_prefix_cache.deciding import Group, PrefixGroup, StateGroup

ALIGNMENT = 16  # bytes: a row can be viewed as any type, and copied in wide words
SPARE = 8  # of a stretch that grows, one part in so many is room for tokens to come


class _Stretch:
    """K or V of all tokens of some rows in one layer, [rows, heads, columns, width], and the pool of that layer."""

    def __init__(self, pool: torch.Tensor, rows: Rows) -> None:
        self._pool = pool
        self._rows = rows
        self._memory: torch.Tensor | None = None  # with none, they are in the blocks

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Append `states`, [rows, heads, new tokens, width], and write the blocks that are now full. Returns all."""
        begin = self._rows.columns
        end = begin + states.shape[-2]
        memory = self._memory = self._with_room(end)
        memory[:, :, begin:end] = states
        for at, table in enumerate(self._rows.tables):
            if table.filled:
                first = self._rows.pads[at] + table.length // table.block_tokens * table.block_tokens
                whole = memory[at, :, first : first + len(table.filled) * table.block_tokens]
                self._pool[table.filled_ids] = in_blocks(whole, table.block_tokens)
        return memory[:, :, :end]

    def join(self, sources: Sequence[tuple["_Stretch", int]]) -> None:
        """Begin with these rows of others."""
        self._memory = self._of_rows(sources, self._rows.columns + 1)

    def _with_room(self, columns: int) -> torch.Tensor:
        """The memory with room for so many columns; what it holds is moved when it grows."""
        if self._memory is not None and self._memory.shape[2] >= columns:
            return self._memory
        return self._of_rows([(self, at) for at in range(len(self._rows))], columns)

    def _of_rows(self, sources: Sequence[tuple["_Stretch", int]], columns: int) -> torch.Tensor:
        """Memory for so many columns and some more, which begins with these rows."""
        _, heads, _, width = self._pool.shape
        memory = self._pool.new_empty(len(sources), heads, columns + columns // SPARE, width)
        for row, pad, (stretch, at) in zip(memory, self._rows.pads, sources, strict=True):
            row[:, :pad] = 0
            stretch._copy_row(at, row[:, pad : self._rows.columns])
        return memory

    def _copy_row(self, at: int, out: torch.Tensor) -> None:
        """Write all tokens of one row to `out`, [heads, tokens, width]."""
        if self._memory is not None:
            out[:] = self._memory[at, :, self._rows.pads[at] : self._rows.columns]
        else:  # straight from the blocks: through other memory it took up to twice as long
            table = self._rows.tables[at]
            blocks = in_blocks(out, table.block_tokens)
            torch.index_select(self._pool, 0, table.computed(self._pool.device), out=blocks)


def in_blocks(states: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """A view of [heads, tokens, width] as a pool has it: [blocks, heads, block_tokens, width]."""
    return states.unflatten(1, (-1, block_tokens)).transpose(0, 1)


class PagedLayer(CacheLayerMixin):
    """One full-attention layer over the pool, for the requests of these rows."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> None:
        super().__init__()
        self._stretches = _Stretch(keys, rows), _Stretch(values, rows)
        self._rows = rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._stretches
        return keys.append(key_states), values.append(value_states)

    def join(self, sources: Sequence[tuple["PagedLayer", int]]) -> None:
        """Begin with these rows of other layers."""
        for which, stretch in enumerate(self._stretches):
            stretch.join([(layer._stretches[which], at) for layer, at in sources])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._rows.columns

    def get_max_length(self) -> int:
        return -1


class PagedKV:
    """`num_blocks` device blocks for a model's past, and the groups of that past.

    A block holds `block_tokens` tokens of full attention; in a model without any, the largest other piece.
    """

    def __init__(self, past: ModelPast, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        self.block_bytes = block_bytes(past, block_tokens)
        if device.type == "cpu":
            check_fits(num_blocks * self.block_bytes)
        self.region = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)
        self._words = self.region.view(torch.int64)  # torch writes single bytes four times as slowly
        self.pools: dict[int, list[torch.Tensor]] = {}
        for part, span in past.full.spans(block_tokens):  # K before V
            self.pools.setdefault(part.layer, []).append(_view(self.region[:, span], part, block_tokens))
        self.groups = groups_of(past, block_tokens)

    @property
    def layout(self) -> list[KVGroup]:
        """Every group with its parts: of full attention K and V of each layer; of the others rows of plain bytes."""
        full = [
            blocks_first(layer, role, pool)
            for layer, pools in self.pools.items()
            for role, pool in zip((Role.KEY, Role.VALUE), pools, strict=True)
        ]
        rows = [blocks_first(0, Role.STATE, self.region)]
        return [KVGroup(group, full if group.is_prefix else rows) for group in self.groups]

    def layer(self, index: int, rows: Rows) -> PagedLayer:
        """Layer `index` of the model, for the requests of these rows."""
        keys, values = self.pools[index]
        return PagedLayer(keys, values, rows)

    def release(self) -> None:
        """Give the memory of the pool back. Nothing can be read or written any more."""
        self.pools.clear()
        self.region = self._words = self.region.new_empty(0)

    def write(self, blocks: Sequence[int], piece: torch.Tensor) -> None:
        """Write a piece, uint8 [bytes], to its blocks. The rest of the last block is zeroed."""
        rows = piece.new_zeros(len(blocks), self.block_bytes)
        rows.view(-1)[: len(piece)] = piece
        self._words[torch.tensor(blocks, device=self.region.device)] = rows.view(torch.int64)

    def read(self, blocks: Sequence[int], num_bytes: int) -> torch.Tensor:
        """A copy of the bytes of a piece, uint8 [num_bytes]."""
        return self.region.index_select(0, torch.tensor(blocks, device=self.region.device)).view(-1)[:num_bytes]


def _view(rows: torch.Tensor, part: PastPart, block_tokens: int) -> torch.Tensor:
    """A view of the bytes of every block as [blocks, heads, block_tokens, width]."""
    heads, width = part.shape
    return rows.view(part.dtype).unflatten(1, (heads, block_tokens, width))


def block_bytes(past: ModelPast, block_tokens: int) -> int:
    others = [local.token_bytes * block_tokens for local in past.locals] + [past.states.num_bytes]
    content = past.full.num_bytes * block_tokens or max(others)
    return -(-content // ALIGNMENT) * ALIGNMENT


def groups_of(past: ModelPast, block_tokens: int) -> tuple[Group, ...]:
    """Full attention first, then one group for each size of window or attention chunk, then all states together."""
    row_bytes = block_bytes(past, block_tokens)

    def in_blocks(group: Group, num_bytes: int) -> Group:
        device_blocks = -(-num_bytes // row_bytes)
        return replace(group, block_tokens=block_tokens, block_bytes=row_bytes, device_blocks=device_blocks)

    groups: list[Group] = []
    if past.full.num_bytes:
        full = past.full.num_bytes * block_tokens
        groups.append(PrefixGroup(name="attention", block_tokens=block_tokens, block_bytes=full))
    groups += [in_blocks(each.local, each.token_bytes * block_tokens) for each in past.locals]
    if past.states.num_bytes:
        state = StateGroup(name="state", block_tokens=block_tokens, block_bytes=row_bytes)
        groups.append(in_blocks(state, past.states.num_bytes))
    return tuple(groups)
