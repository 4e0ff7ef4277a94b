"""Gather and scatter, in Triton: between an engine's tensors and a slot of the staging ring.

In a slot, pieces lie `pitch` bytes apart. With d device blocks to a piece, device block number j of piece i has the id
`ids[i*d + j]`, and for each part p there is one *fragment*:

    on the device   from bases[p] + ids[i*d + j] * strides[p] on      lengths[p] bytes
    in the slot     from i * pitch + offsets[p] + j * lengths[p] on   as many

`gather` copies every fragment into the slot, `scatter` out of it: one kernel, compiled for each. Nothing between
fragments is read or written. The kernels trust their ids, which Binding has checked.

A program copies tiles of FRAGMENTS fragments by WORDS words, in turn with the others. Few programs suffice, because HBM
is tens of times faster than the link. A word is as large as the alignment of a part allows; parts of one alignment and
size share a table and a launch. All addresses are int64: a block may lie many GiB from the first.
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

from cpu_prefix_cache.messages.plan import Direction

# Arguments that change from call to call must not make Triton compile again.
VARIES = ["table", "ids", "num_parts", "num_fragments", "device_blocks", "pitch", "chunks"]


@triton.jit(do_not_specialize=VARIES)
def _copy(
    slot, table, ids, num_parts, num_fragments, device_blocks, pitch, chunks, FRAGMENTS: tl.constexpr,
    WORDS: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGNMENT: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(num_fragments, FRAGMENTS) * chunks, tl.num_programs(0)):
        # the addresses of the tile's words on the device and in the slot, and which of them exist
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
        on_device, in_slot = on_device[:, None] + word[None, :], in_slot[:, None] + word[None, :]
        if GATHER:
            tl.store(in_slot, tl.load(on_device, mask=mask), mask=mask)
        else:
            tl.store(on_device, tl.load(in_slot, mask=mask), mask=mask)


# Whether TRITON_INTERPRET=1 was set when this module was imported.
INTERPRETED = not isinstance(_copy, JITFunction)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How large tiles are and how many programs share them. All widths and `words` are powers of two."""

    widths: tuple[int, ...]  # words of a fragment, ascending; the first that holds a whole one is taken, or the last
    words: int  # of all fragments of a tile
    programs: int
    warps: int


def tiling_for(wave_size: int) -> Tiling:
    """For a GPU that runs `wave_size` threads in step: 32, or 64 on AMD's CDNA. A program has 256 threads on each, so a
    thread has as many words of a tile.

    >>> tiling_for(32).warps, tiling_for(64).warps
    (8, 4)
    """
    # Few widths, because Triton compiles for each, half a second a time.
    return Tiling(widths=(16, 128, 1024), words=4096, programs=64, warps=256 // wave_size)


# In Triton's interpreter an operation takes tens of microseconds for any tile.
INTERPRETER = Tiling(widths=(1 << 10, 1 << 17), words=1 << 18, programs=2, warps=1)
TILING = INTERPRETER if INTERPRETED else tiling_for(32)

LARGEST_WORD = 16  # bytes, the widest access of a GPU thread
# by alignment: what is copied at a time, and its bytes
WORDS = {1: (tl.int8, 1), 2: (tl.int16, 2), 4: (tl.int32, 4), 8: (tl.int64, 8), 16: (tl.int64, 8)}


class Launcher:
    """Gathers and scatters parts of one alignment and size. Its kernels are compiled when it is made.

    `table` is int64 [4, parts] on the device: bases, strides, lengths and offsets of the parts; a fragment has at most
    `most_words` words. Compiled kernels are called directly, because Triton's own call takes 12 us more (H200 host).
    """

    def __init__(
        self, table: torch.Tensor, alignment: int, most_words: int, device_blocks: int, tiling: Tiling
    ) -> None:
        self.table, self.alignment = table, alignment
        self._device_blocks, self._tiling = device_blocks, tiling
        self._parts = table.shape[1]
        width = next((width for width in tiling.widths if width >= most_words), tiling.widths[-1])
        self._words = (width, *WORDS[alignment], alignment)  # of a tile: how many of a fragment, and of which type
        self._fragments = max(1, tiling.words // width)  # of a tile
        self._chunks = triton.cdiv(most_words, width)
        self._compiled = {} if INTERPRETED else {gathers: self._compile(gathers) for gathers in (True, False)}

    def launch(
        self,
        direction: Direction,
        pitch: int,
        slot: torch.Tensor,
        ids: torch.Tensor,
        stream: int,
        unfit: torch.Tensor | None = None,
    ) -> None:
        """For a store gather the blocks with these `ids`, int64 on the device, whole pieces of them, into `slot`, uint8
        [bytes], where pieces are `pitch` bytes apart; for a load scatter it to them. `stream` is a handle of CUDA's.
        All bytes fit."""
        gathers, num_fragments = direction is Direction.STORE, len(ids) * self._parts
        programs = min(self._tiling.programs, -(-num_fragments // self._fragments) * self._chunks)
        sizes = (self._parts, num_fragments, self._device_blocks, pitch, self._chunks)
        if INTERPRETED:  # nothing is compiled, so a tile is no larger than needed
            fragments = min(self._fragments, triton.next_power_of_2(num_fragments))
            _copy[(programs,)](slot, self.table, ids, *sizes, fragments, *self._words, gathers)
        else:  # by addresses, so that nobody looks them up
            compiled, addresses = self._compiled[gathers], (slot.data_ptr(), self.table.data_ptr(), ids.data_ptr())
            compiled[(programs, 1, 1)](*addresses, *sizes, self._fragments, *self._words, gathers, stream=stream)

    def _compile(self, gathers: bool) -> Any:
        """By a launch that copies nothing."""
        slot, ids = (torch.empty(0, dtype=each, device=self.table.device) for each in (torch.uint8, torch.int64))
        arguments = (self._parts, 0, self._device_blocks, 0, 1, self._fragments, *self._words, gathers)
        return _copy[(1,)](slot, self.table, ids, *arguments, num_warps=self._tiling.warps)


def launchers(
    parts: Sequence[torch.Tensor], offsets: Sequence[int], *, device_blocks: int, tiling: Tiling = TILING
) -> list[Launcher]:
    """For parts, uint8 [blocks, bytes] on the device, that begin at `offsets` in a piece of `device_blocks` blocks."""
    columns: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for part, offset in zip(parts, offsets, strict=True):
        column = (part.data_ptr(), part.stride(0), part.shape[1], offset)
        columns[gcd(LARGEST_WORD, *column), triton.next_power_of_2(part.shape[1])].append(column)
    made = []
    for (alignment, _), rows in columns.items():
        table = torch.tensor(rows, dtype=torch.int64, device=parts[0].device).t().contiguous()
        most_words = max(length for _, _, length, _ in rows) // WORDS[alignment][1]
        made.append(Launcher(table, alignment, most_words, device_blocks, tiling))
    return made
