"""Encode and decode, in Triton: between an engine's tensors and a slot that holds coded pieces (coded_form.py).

Fragments lie as in triton_staging.py; in the slot, where pieces are `pitch` bytes apart, each has its coded form
from offsets[p] + j times its coded length on. A program is one warp, which codes unit after unit, step by step, and
reads the next step ahead. Chosen for this, and why:

* words of 32 bits hold two values, and all arithmetic is on both at once; four words make one of codes, by shifts;
* ranks come from prefix sums: of eight nibbles by a multiplication, of the warp by one scan, then from step to step;
* one warp a program, so that nothing waits at a barrier, and a step without escapes (most) skips what is theirs;
* a list of positions would cost 3 bytes an escape in place of 1, fixed places for each row several times the reserve;
* a base for 64 values and a reserve as large: one for 256 serves keys and values, but not states of Mamba.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from cpu_prefix_cache.copier.coded_form import GROUP_BYTES, STEP_GROUPS, UNIT_GROUPS
from cpu_prefix_cache.copier.triton_staging import INTERPRETED
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.plan import Direction

# Arguments that change from call to call must not make Triton compile again.
VARIES = ["slot", "table", "ids", "unfit", "num_parts", "num_fragments", "device_blocks", "pitch", "units"]


@triton.jit
def _nibble_sums(marks):
    """Inclusive prefix sums of eight nibbles that are 0 or 1."""
    return marks * 0x11111111


@triton.jit
def _marked(marks):
    """Count of nibbles that are 1."""
    return (_nibble_sums(marks) >> 28) & 15


@triton.jit
def _ranks(marks, before):
    """Counts of marks before each word's, with `before` of earlier steps, and with all of this step's."""
    counts = _marked(marks)
    column = tl.sum(counts, 0)
    columns = tl.cumsum(column, 0)
    return before + (columns - column)[None, :] + tl.cumsum(counts, 0) - counts, before + tl.sum(column, 0)


@triton.jit
def _codes(word, base):
    """Codes of both values of a word, and marks of escapes, in the low bits of its halves."""
    exponent = (word >> 7) & 0x00FF00FF
    distance = (base * 0x00010001 | 0x01000100) - exponent  # and 256
    far = (((distance + 0x00F200F2) >> 9) | ((distance >> 8) ^ 0x00010001)) & 0x00010001  # 14 or more, or negative
    escapes = ((exponent + 0x00FF00FF) >> 8) & far
    return (distance & (far * 15 ^ 0x000F000F)) + far * 14 + escapes, escapes


@triton.jit
def _coded(a, b, c, d, base_a, base_b, base_c, base_d):
    """Words of codes, and marks of escapes at the same places."""
    code_a, marks_a = _codes(a, base_a[:, None])
    code_b, marks_b = _codes(b, base_b[:, None])
    code_c, marks_c = _codes(c, base_c[:, None])
    code_d, marks_d = _codes(d, base_d[:, None])
    codes = code_a | (code_b << 4) | (code_c << 8) | (code_d << 12)
    return codes, marks_a | (marks_b << 4) | (marks_c << 8) | (marks_d << 12)


@triton.jit
def _rest(word):
    return ((word >> 8) & 0x00800080) | (word & 0x007F007F)


@triton.jit
def _exponents(codes, base):
    """Exponents of both values of a word; 0 for an escape."""
    far = ((codes + 0x00020002) >> 4) & 0x00010001
    return ((base * 0x00010001 | 0x01000100) - codes) & (far * 255 ^ 0x00FF00FF)


@triton.jit
def _word(rest, exponents):
    return ((rest & 0x00800080) << 8) | (exponents << 7) | (rest & 0x007F007F)


@triton.jit
def _larger(word):
    """The larger exponent of both values of a word."""
    return tl.maximum(word & 0x7F80, (word >> 16) & 0x7F80) >> 7


@triton.jit
def _other(word, largest, marks, ROW: tl.constexpr):
    """The base of each row, with `marks` of its escapes below the largest exponent: see coded_form.py."""
    usual = tl.sum(_larger(word), 1) >> 5
    other = tl.where(largest > usual + 7, usual + 4, largest)
    _, escapes = _codes(word, other[:, None])
    before = (marks >> (4 * ROW)) & 0x00010001
    fewer = tl.sum((escapes & 1) + (escapes >> 16), 1) < tl.sum((before & 1) + (before >> 16), 1)
    return tl.where(fewer, other, largest)


@triton.jit
def _any(marks):
    return tl.max(tl.max((marks != 0).to(tl.int32), 0), 0) != 0


@triton.jit
def _put(reserve, marks, rank, room, a, b, c, d):
    """Store the exponents of marked values at their ranks, below `room`."""
    before = _nibble_sums(marks) - marks
    for nibble in tl.static_range(8):
        word = a if nibble % 4 == 0 else b if nibble % 4 == 1 else c if nibble % 4 == 2 else d
        at = rank + ((before >> (4 * nibble)) & 15)
        mask = ((marks >> (4 * nibble)) & 1 == 1) & (at < room)
        tl.store(reserve + at, ((word >> (7 + 16 * (nibble // 4))) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _take(reserve, marks, rank, room, ROW: tl.constexpr):
    """The exponents of marked values of one row, in the halves of a word; 0 where there is no mark."""
    before = _nibble_sums(marks) - marks
    low = rank + ((before >> (4 * ROW)) & 15)
    high = rank + ((before >> (4 * ROW + 16)) & 15)
    in_low = ((marks >> (4 * ROW)) & 1 == 1) & (low < room)
    in_high = ((marks >> (4 * ROW + 16)) & 1 == 1) & (high < room)
    first = tl.load(reserve + low, mask=in_low, other=0).to(tl.int32)
    return first | (tl.load(reserve + high, mask=in_high, other=0).to(tl.int32) << 16)


@triton.jit
def _unit(slot, table, ids, num_parts, device_blocks, pitch, units, at, GROUPS: tl.constexpr):
    """Unit number `at`: where it is on the device and in the slot, how many groups it has, and of which piece it is."""
    fragment, unit = at // units, at % units
    part, which = fragment // device_blocks, fragment % device_blocks
    piece, part = part // num_parts, part % num_parts
    block = tl.load(ids + piece * device_blocks + which)
    groups = tl.load(table + 2 * num_parts + part).to(tl.int32) // 512
    offset = tl.load(table + 3 * num_parts + part) + which * groups * 392 + unit * (GROUPS * 392)
    on_device = tl.load(table + part) + block * tl.load(table + num_parts + part) + unit * (GROUPS * 512)
    in_slot = slot + (piece.to(tl.int64) * pitch + offset)
    return on_device.to(tl.pointer_type(tl.int32)), in_slot, tl.minimum(groups - unit * GROUPS, GROUPS), piece


@triton.jit
def _read_values(value, first, groups, STEP: tl.constexpr):
    """The words of four rows, of the groups from `first` on; zeros for those that do not exist."""
    group = first + tl.arange(0, STEP)[:, None]
    at = value + group * 128 + tl.arange(0, 32)[None, :]
    mask = tl.broadcast_to(group < groups, [STEP, 32])
    return (
        tl.load(at, mask=mask, other=0),
        tl.load(at + 32, mask=mask, other=0),
        tl.load(at + 64, mask=mask, other=0),
        tl.load(at + 96, mask=mask, other=0),
    )


@triton.jit
def _read_record(unit, first, groups, STEP: tl.constexpr):
    """Codes, both words of signs and mantissas, and bases of four rows in a word."""
    group = first + tl.arange(0, STEP)
    at = unit.to(tl.pointer_type(tl.int32)) + group[:, None] * 96 + tl.arange(0, 32)[None, :]
    mask = tl.broadcast_to(group[:, None] < groups, [STEP, 32])
    return (
        tl.load(at, mask=mask, other=0),
        tl.load(at + 32, mask=mask, other=0),
        tl.load(at + 64, mask=mask, other=0),
        tl.load((unit + groups * 384).to(tl.pointer_type(tl.int32)) + group, mask=group < groups, other=0),
    )


@triton.jit(do_not_specialize=VARIES)
def _encode(
    slot, table, ids, unfit, num_parts, num_fragments, device_blocks, pitch, units, GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    for at in range(tl.program_id(0), num_fragments * units, tl.num_programs(0)):
        value, unit, groups, piece = _unit(slot, table, ids, num_parts, device_blocks, pitch, units, at, GROUPS)
        bases = (unit + groups * 384).to(tl.pointer_type(tl.int32))
        reserve, room = unit + groups * 388, groups * 4
        a, b, c, d = _read_values(value, 0, groups, STEP)
        total = groups * 0
        for first in range(0, groups, STEP):
            next_a, next_b, next_c, next_d = _read_values(value, first + STEP, groups, STEP)
            group = first + tl.arange(0, STEP)
            base_a, base_b = tl.max(_larger(a), 1), tl.max(_larger(b), 1)
            base_c, base_d = tl.max(_larger(c), 1), tl.max(_larger(d), 1)
            codes, marks = _coded(a, b, c, d, base_a, base_b, base_c, base_d)
            if _any(marks):
                rank, after = _ranks(marks, total)
                if after - total > 4:
                    base_a, base_b = _other(a, base_a, marks, 0), _other(b, base_b, marks, 1)
                    base_c, base_d = _other(c, base_c, marks, 2), _other(d, base_d, marks, 3)
                    codes, marks = _coded(a, b, c, d, base_a, base_b, base_c, base_d)
                    rank, after = _ranks(marks, total)
                total = after
                _put(reserve, marks, rank, room, a, b, c, d)
            record = unit.to(tl.pointer_type(tl.int32)) + group[:, None] * 96 + tl.arange(0, 32)[None, :]
            mask = tl.broadcast_to(group[:, None] < groups, [STEP, 32])
            tl.store(record, codes, mask=mask)
            tl.store(record + 32, _rest(a) | (_rest(b) << 8), mask=mask)
            tl.store(record + 64, _rest(c) | (_rest(d) << 8), mask=mask)
            four = base_a | (base_b << 8) | (base_c << 16) | (base_d << 24)
            tl.store(bases + group, four, mask=group < groups)
            a, b, c, d = next_a, next_b, next_c, next_d
        # zeros after the last escape, and a flag for the piece if some have no place
        free = tl.arange(0, GROUPS * 4)
        tl.store(reserve + free, tl.zeros([GROUPS * 4], tl.uint8), mask=(free >= total) & (free < room))
        tl.store(unfit + piece, 1, mask=total > room)


@triton.jit(do_not_specialize=VARIES)
def _decode(
    slot, table, ids, num_parts, num_fragments, device_blocks, pitch, units, GROUPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    for at in range(tl.program_id(0), num_fragments * units, tl.num_programs(0)):
        value, unit, groups, _ = _unit(slot, table, ids, num_parts, device_blocks, pitch, units, at, GROUPS)
        reserve, room = unit + groups * 388, groups * 4
        codes, ab, cd, base = _read_record(unit, 0, groups, STEP)
        total = groups * 0
        for first in range(0, groups, STEP):
            next_codes, next_ab, next_cd, next_base = _read_record(unit, first + STEP, groups, STEP)
            four = base[:, None]
            a = _exponents(codes & 0x000F000F, four & 255)
            b = _exponents((codes >> 4) & 0x000F000F, (four >> 8) & 255)
            c = _exponents((codes >> 8) & 0x000F000F, (four >> 16) & 255)
            d = _exponents((codes >> 12) & 0x000F000F, (four >> 24) & 255)
            marks = codes & (codes >> 1) & (codes >> 2) & (codes >> 3) & 0x11111111
            if _any(marks):
                rank, total = _ranks(marks, total)
                a |= _take(reserve, marks, rank, room, 0)
                b |= _take(reserve, marks, rank, room, 1)
                c |= _take(reserve, marks, rank, room, 2)
                d |= _take(reserve, marks, rank, room, 3)
            group = first + tl.arange(0, STEP)[:, None]
            word = value + group * 128 + tl.arange(0, 32)[None, :]
            mask = tl.broadcast_to(group < groups, [STEP, 32])
            tl.store(word, _word(ab, a), mask=mask)
            tl.store(word + 32, _word(ab >> 8, b), mask=mask)
            tl.store(word + 64, _word(cd, c), mask=mask)
            tl.store(word + 96, _word(cd >> 8, d), mask=mask)
            codes, ab, cd, base = next_codes, next_ab, next_cd, next_base


# Warps that code at a time. 512 reach the link's rate beside matrix products, and 740 to 780 GB/s alone (one H100).
PROGRAMS = 2 if INTERPRETED else 512
ALIGNMENT = 4  # bytes, of fragments on the device: a word


class CodingLauncher:
    """Encodes and decodes parts with fragments of one size. Its kernels are compiled when it is made.

    `table` is as a Launcher has it, but that offsets are those of coded fragments.
    """

    alignment = 16  # bytes, of coded fragments in a slot

    def __init__(self, table: torch.Tensor, num_bytes: int, device_blocks: int, programs: int) -> None:
        self.table, self._programs = table, programs
        self._parts, self._device_blocks = table.shape[1], device_blocks
        self._units = -(-num_bytes // (GROUP_BYTES * UNIT_GROUPS))
        self._compiled = {} if INTERPRETED else {each: self._compile(each) for each in Direction}

    def launch(
        self,
        direction: Direction,
        pitch: int,
        slot: torch.Tensor,
        ids: torch.Tensor,
        stream: int,
        unfit: torch.Tensor,
    ) -> None:
        """As a Launcher's. A store sets `unfit`, int32 [pieces] in memory that the device writes to, of the pieces that
        do not fit."""
        kernel, memory = _decode, [slot, self.table, ids]
        if direction is Direction.STORE:
            kernel, memory = _encode, [*memory, unfit]
        fragments = len(ids) * self._parts
        grid = (min(self._programs, fragments * self._units), 1, 1)
        sizes = (self._parts, fragments, self._device_blocks, pitch, self._units, UNIT_GROUPS, STEP_GROUPS)
        if INTERPRETED:
            kernel[grid](*memory, *sizes)
        else:
            self._compiled[direction][grid](*(each.data_ptr() for each in memory), *sizes, stream=stream)

    def _compile(self, direction: Direction) -> Any:
        """By a launch that codes nothing."""
        kinds = (torch.uint8, torch.int64, torch.int32)
        slot, ids, unfit = (torch.empty(0, dtype=each, device=self.table.device) for each in kinds)
        sizes = (self._parts, 0, self._device_blocks, 0, self._units, UNIT_GROUPS, STEP_GROUPS)
        if direction is Direction.STORE:
            return _encode[(1,)](slot, self.table, ids, unfit, *sizes, num_warps=1)
        return _decode[(1,)](slot, self.table, ids, *sizes, num_warps=1)


def coding_launchers(
    parts: Sequence[torch.Tensor], offsets: Sequence[int], *, device_blocks: int, programs: int = PROGRAMS
) -> list[CodingLauncher]:
    """For parts, uint8 [blocks, bytes] on the device, that begin at `offsets` in a coded piece of `device_blocks`
    blocks. Raises ConfigurationError for a part that is not aligned."""
    columns: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for part, offset in zip(parts, offsets, strict=True):
        if gcd(ALIGNMENT, part.data_ptr(), part.stride(0)) < ALIGNMENT:
            raise ConfigurationError(f"a block of a coded part must begin at a multiple of {ALIGNMENT} bytes")
        columns[part.shape[1]].append((part.data_ptr(), part.stride(0), part.shape[1], offset))
    made = []
    for num_bytes, rows in columns.items():
        table = torch.tensor(rows, dtype=torch.int64, device=parts[0].device).t().contiguous()
        made.append(CodingLauncher(table, num_bytes, device_blocks, programs))
    return made
