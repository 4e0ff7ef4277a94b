"""The requests of a forward pass: one row each, all of which end in the same column.

    row 0    . . . a a a a      the token at position p of a row is in column pad + p: here the pads are 3
    row 1    b b b b b b b      and 0

Every row gets equally many tokens in a forward pass, in new columns, so the pads stay what they are. Padding is zeros,
which a mask hides. A request alone is one row, without padding.
"""

from collections.abc import Sequence

import torch


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
        if self.filled:
            self.filled_ids = torch.tensor(self.filled, dtype=torch.long, device=device)

    def end_forward(self) -> None:
        self.length += self._pending
        self._pending = 0

    def computed(self, device: torch.device) -> torch.Tensor:
        """The ids of the blocks before `length`."""
        return torch.tensor(self.blocks[: self.length // self.block_tokens], dtype=torch.long, device=device)


class Rows:
    """The tables of requests that are computed together, in the order of their rows."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each row are computed."""
        return [table.length for table in self.tables]

    @property
    def columns(self) -> int:
        """Where all rows end."""
        return max(self.lengths)

    @property
    def pads(self) -> list[int]:
        """The columns before the first token of each row."""
        columns = self.columns
        return [columns - length for length in self.lengths]

    def begin_forward(self, num_tokens: int, device: torch.device) -> None:
        for table in self.tables:
            table.begin_forward(num_tokens, device)

    def end_forward(self) -> None:
        for table in self.tables:
            table.end_forward()
