"""Device blocks through which a model's past passes, and the groups of that past.

    region            uint8 [blocks, block bytes], allocated once: one pool of equal blocks, as on the host
    full attention    block b of every layer's K and V is a view of row b: [blocks, heads, block_tokens, width]
    windows, states   a piece takes as many rows as it needs, as plain bytes

The tokens of one head lie together, as in transformers' cache: a block is gathered head by head.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from connector.transformers.past import ModelPast, PastPart
from cpu_prefix_cache import KVGroup
from cpu_prefix_cache.copying import Role, blocks_first, check_fits
from cpu_prefix_cache.deciding import Group, PrefixGroup, StateGroup

ALIGNMENT = 16  # bytes: a row can be viewed as any type, and copied in wide words


class PagedKV:
    """`num_blocks` device blocks for a model's past, and the groups of that past.

    A block holds `block_tokens` tokens of full attention; in a model without any, the largest other piece.
    """

    @torch.inference_mode(False)  # blocks are written in any mode
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

    def release(self) -> None:
        """Give the memory of the pool back. Nothing can be read or written any more."""
        self.pools.clear()
        self.region = self._words = self.region.new_empty(0)

    def write(self, blocks: Sequence[int], piece: torch.Tensor) -> None:
        """Write a piece, uint8 [bytes], to its blocks. The rest of the last block is zeroed."""
        rows = piece.new_zeros(len(blocks), self.block_bytes)
        rows.view(-1)[: len(piece)] = piece
        self._words[torch.tensor(blocks, device=self.region.device)] = rows.view(torch.int64)

    def read(self, pieces: Sequence[Sequence[int]], num_bytes: int) -> torch.Tensor:
        """A copy of the bytes of pieces, uint8 [pieces, num_bytes]; `pieces` are their blocks, equally many each."""
        ids = torch.tensor([block for blocks in pieces for block in blocks], dtype=torch.long)
        rows = self.region.index_select(0, ids.to(self.region.device))
        return rows.view(len(pieces), -1)[:, :num_bytes] if pieces else rows[:, :0]


def in_blocks(states: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """A view of [heads, tokens, width] as a pool has it: [blocks, heads, block_tokens, width]."""
    return states.unflatten(1, (-1, block_tokens)).transpose(0, 1)


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

    def in_rows(group: Group, num_bytes: int) -> Group:
        device_blocks = -(-num_bytes // row_bytes)
        return replace(group, block_tokens=block_tokens, block_bytes=row_bytes, device_blocks=device_blocks)

    groups: list[Group] = []
    if past.full.num_bytes:
        full = past.full.num_bytes * block_tokens
        groups.append(PrefixGroup(name="attention", block_tokens=block_tokens, block_bytes=full))
    groups += [in_rows(each.local, each.token_bytes * block_tokens) for each in past.locals]
    if past.states.num_bytes:
        state = StateGroup(name="state", block_tokens=block_tokens, block_bytes=row_bytes)
        groups.append(in_rows(state, past.states.num_bytes))
    return tuple(groups)
