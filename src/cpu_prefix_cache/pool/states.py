"""The states of a block. `block_pool.py` moves it between them (rule 1)."""

import enum


class BlockState(enum.IntEnum):
    FREE = 0
    WRITING = 1
    CACHED = 2
    RETIRED = 3
    ABSENT = 4


FREE, WRITING, CACHED, RETIRED, ABSENT = map(int, BlockState)  # as the bytes that are kept: enums cost time
