"""Gather and scatter: between an engine's tensors and a slot of the staging ring, in Triton.

What they do, in words. In a slot, pieces lie `pitch` bytes apart. With d device blocks to a piece, device block number
j of piece i has the id `ids[i*d + j]`, and for each part p there is one *fragment*:

    on the device   from bases[p] + ids[i*d + j] * strides[p] on      lengths[p] bytes
    in the slot     from i * pitch + offsets[p] + j * lengths[p] on   as many

`gather` copies every fragment into the slot, `scatter` out of it. Nothing between fragments is read or written.

A program copies tiles of FRAGMENTS fragments by WORDS words, in turn with the others. Programs are few: HBM is
tens of times faster than the link they serve. A word is as large as the alignment of everything about a part lets it
be, so parts of one alignment and size share a table, and a table is one launch. In Triton's interpreter each
operation costs tens of microseconds however large its tile, so there a tile takes in as much as it may.

All addresses are int64: a block may lie many GiB from the first. The kernels trust their ids; Binding has checked them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

# What changes from call to call must not make Triton compile again.
VARIES = ["table", "ids", "num_parts", "num_fragments", "device_blocks", "pitch", "chunks"]


@triton.jit
def _tile(
    slot, table, ids, num_parts, num_fragments, device_blocks, pitch, chunks, tile,
    FRAGMENTS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The addresses of tile number `tile` on the device and in the slot, and which of its words exist."""
    fragment = (tile // chunks) * FRAGMENTS + tl.arange(0, FRAGMENTS)
    exists = fragment < num_fragments
    piece = fragment // (num_parts * device_blocks)
    part = fragment % (num_parts * device_blocks) // device_blocks
    which = fragment % device_blocks
    block = tl.load(ids + piece * device_blocks + which, mask=exists, other=0)
    base = tl.load(table + part, mask=exists, other=0)
    stride = tl.load(table + num_parts + part, mask=exists, other=0)
    length = tl.load(table + 2 * num_parts + part, mask=exists, other=0)
    offset = tl.load(table + 3 * num_parts + part, mask=exists, other=0)
    on_device = (base + block * stride).to(tl.pointer_type(WORD))
    in_slot = slot + (piece.to(tl.int64) * pitch + offset + which * length)
    on_device = tl.multiple_of(on_device, ALIGNMENT)
    in_slot = tl.multiple_of(in_slot.to(tl.pointer_type(WORD)), ALIGNMENT)
    word = (tile % chunks) * WORDS + tl.arange(0, WORDS)
    words = tl.multiple_of(length // BYTES, ALIGNMENT // BYTES)
    mask = exists[:, None] & (word[None, :] < words[:, None])
    return on_device[:, None] + word[None, :], in_slot[:, None] + word[None, :], mask


@triton.jit(do_not_specialize=VARIES)
def _gather(
    slot, table, ids, num_parts, num_fragments, device_blocks, pitch, chunks,
    FRAGMENTS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(num_fragments, FRAGMENTS) * chunks, tl.num_programs(0)):
        on_device, in_slot, mask = _tile(
            slot, table, ids, num_parts, num_fragments, device_blocks, pitch, chunks, tile,
            FRAGMENTS, WORDS, WORD, BYTES, ALIGNMENT,
        )  # fmt: skip
        tl.store(in_slot, tl.load(on_device, mask=mask), mask=mask)


@triton.jit(do_not_specialize=VARIES)
def _scatter(
    slot, table, ids, num_parts, num_fragments, device_blocks, pitch, chunks,
    FRAGMENTS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(num_fragments, FRAGMENTS) * chunks, tl.num_programs(0)):
        on_device, in_slot, mask = _tile(
            slot, table, ids, num_parts, num_fragments, device_blocks, pitch, chunks, tile,
            FRAGMENTS, WORDS, WORD, BYTES, ALIGNMENT,
        )  # fmt: skip
        tl.store(on_device, tl.load(in_slot, mask=mask), mask=mask)


# Whether Triton was told to interpret kernels (TRITON_INTERPRET=1) when this module was imported.
INTERPRETED = not isinstance(_gather, JITFunction)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How large a tile is and how many programs share them. All widths and `words` are powers of two."""

    widths: tuple[int, ...]  # words of one fragment in a tile, ascending: the first that holds all of it, or the last
    words: int  # over all fragments of a tile
    programs: int
    warps: int


# Few widths: Triton compiles for each, half a second a time.
GPU = Tiling(widths=(16, 128, 1024), words=4096, programs=64, warps=8)
INTERPRETER = Tiling(widths=(1 << 10, 1 << 17), words=1 << 18, programs=2, warps=1)

LARGEST_WORD = 16  # bytes: the widest access of a GPU thread
WORDS_OF = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}  # alignment -> what is copied at a time


@dataclass(frozen=True, slots=True, eq=False)
class PartTable:
    """Parts of one alignment and size. `rows` is int64 [4, parts] on the device: bases, strides, lengths, offsets."""

    rows: torch.Tensor
    alignment: int
    most_words: int  # of a fragment of any of these parts


def part_tables(parts: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[PartTable]:
    """The parts, uint8 [blocks, bytes] on the device, with where each begins within a piece in a slot."""
    columns: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for part, offset in zip(parts, offsets, strict=True):
        column = (part.data_ptr(), part.stride(0), part.shape[1], offset)
        aligned = gcd(LARGEST_WORD, *column)
        columns[aligned, triton.next_power_of_2(part.shape[1])].append(column)
    tables = []
    for (aligned, _), rows in columns.items():
        bases, strides, lengths, offsets = zip(*rows, strict=True)
        table = torch.tensor([bases, strides, lengths, offsets], dtype=torch.int64, device=parts[0].device)
        tables.append(PartTable(table, aligned, max(lengths) // _word_bytes(aligned)))
    return tables


def default_tiling() -> Tiling:
    return INTERPRETER if INTERPRETED else GPU


def compile_for(tables: Sequence[PartTable], tiling: Tiling) -> None:
    """Have both kernels ready for these tables: copies no block."""
    for table in tables:
        device = table.rows.device
        slot = torch.empty(0, dtype=torch.uint8, device=device)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        for move in (gather, scatter):
            move(slot, table, nothing, device_blocks=1, pitch=LARGEST_WORD, tiling=tiling)


def gather(
    slot: torch.Tensor, table: PartTable, ids: torch.Tensor, *, device_blocks: int, pitch: int, tiling: Tiling
) -> None:
    """Copy the blocks with these `ids`, int64 on the device, whole pieces of them, into `slot`, uint8 [bytes]."""
    _launch(_gather, slot, table, ids, device_blocks, pitch, tiling)


def scatter(
    slot: torch.Tensor, table: PartTable, ids: torch.Tensor, *, device_blocks: int, pitch: int, tiling: Tiling
) -> None:
    """Copy what `gather` put into `slot` to the blocks with these `ids`."""
    _launch(_scatter, slot, table, ids, device_blocks, pitch, tiling)


def _launch(
    kernel: Any, slot: torch.Tensor, table: PartTable, ids: torch.Tensor, device_blocks: int, pitch: int, tiling: Tiling
) -> None:
    num_parts = table.rows.shape[1]
    num_fragments = len(ids) * num_parts
    words = next((width for width in tiling.widths if width >= table.most_words), tiling.widths[-1])
    fragments = max(1, tiling.words // words)
    if INTERPRETED:  # no wider than needed: there is nothing to compile
        fragments = min(fragments, triton.next_power_of_2(max(1, num_fragments)))
    chunks = triton.cdiv(table.most_words, words)
    tiles = triton.cdiv(num_fragments, fragments) * chunks
    kernel[(max(1, min(tiling.programs, tiles)),)](
        slot, table.rows, ids, num_parts, num_fragments, device_blocks, pitch, chunks,
        FRAGMENTS=fragments, WORDS=words, WORD=WORDS_OF[table.alignment], BYTES=_word_bytes(table.alignment),
        ALIGNMENT=table.alignment, num_warps=tiling.warps,
    )  # fmt: skip


def _word_bytes(alignment: int) -> int:
    return min(alignment, 8)
