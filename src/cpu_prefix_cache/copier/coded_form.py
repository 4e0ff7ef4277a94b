"""The coded form of bf16 bytes, codec "exponent", in torch. The kernels of triton_coding.py match it byte for byte.

A *fragment*, the bytes of one block in one part, is coded by itself. A *row* is 64 values, a *group* 4 rows (512
bytes), a *unit* 32 groups; the last unit of a fragment may be shorter. A unit of g groups:

    g times  [codes: 128 bytes][sign and mantissa of rows 0 and 1: 128][of rows 2 and 3: 128]
    then     [bases: 4 g bytes][reserve: 4 g bytes, zeros after the last escape]

which is 392 bytes of 512: 12.25 bits a value, 1.306 times. Fragments have an even number of groups, so that each coded
one begins at a multiple of 16 bytes. A code is 4 bits: 0 to 13 how far an exponent is below the base of its row, 14 the
exponent 0 (zeros and subnormals), 15 an *escape*, whose exponent is the next byte of the reserve. No field has the
places of escapes: their order gives them. A unit with more than 4 g escapes (1.56 %) *does not fit*; nothing else is
refused. A base is the largest exponent of the row, or, where few values are far above the others (a channel of
outliers, an infinity), one that makes those the escapes. Decoders take any base.

A value is element (row, word, half) of its group [4, 32, 2]. Codes lie in the order (word, half, row): a 32-bit word of
each row gives a whole word of codes by shifts, and no thread needs another's. Escapes lie in the order (step, word,
group, half, row), where a step is 4 groups: what a warp of 32 threads has in its registers.
"""

import torch

from cpu_prefix_cache.model.codec import EXPONENT

GROUP_VALUES = 256
UNIT_GROUPS = 32
STEP_GROUPS = 4
GROUP_BYTES = 2 * GROUP_VALUES
# Bytes of a group
CODE_BYTES = 128
REST_BYTES = 256
BASES = 4
RESERVE = 4
RECORD_BYTES = CODE_BYTES + REST_BYTES
CODED_GROUP = RECORD_BYTES + BASES + RESERVE
ZERO, ESCAPE = 14, 15  # codes
FAR, ABOVE = 7, 4  # exponents
MANY = 4  # escapes of a step: one group has room for as many
ROWS, WORDS = 4, 32


def encode(fragments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code fragments, uint8 [fragments, bytes]: uint8 [fragments, coded bytes], and whether each fits."""
    groups = fragments.shape[1] // GROUP_BYTES
    coded = fragments.new_empty(len(fragments), EXPONENT.kept_bytes(fragments.shape[1]))
    fits = torch.ones(len(fragments), dtype=torch.bool, device=fragments.device)
    for first in range(0, groups, UNIT_GROUPS):
        last = min(groups, first + UNIT_GROUPS)
        unit, unit_fits = _encode_unit(fragments[:, first * GROUP_BYTES : last * GROUP_BYTES])
        coded[:, first * CODED_GROUP : last * CODED_GROUP] = unit
        fits &= unit_fits
    return coded, fits


def decode(coded: torch.Tensor, length: int) -> torch.Tensor:
    """Fragments of `length` bytes from their coded form, both uint8 [fragments, bytes]."""
    units = range(0, length // GROUP_BYTES, UNIT_GROUPS)
    ends = [min(length // GROUP_BYTES, first + UNIT_GROUPS) for first in units]
    cuts = zip(units, ends, strict=True)
    return torch.cat([_decode_unit(coded[:, a * CODED_GROUP : b * CODED_GROUP]) for a, b in cuts], 1)


def _encode_unit(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count, groups = len(values), values.shape[1] // GROUP_BYTES
    bits = values.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    bits = bits.view(count, groups, ROWS, WORDS, 2).permute(0, 1, 3, 4, 2)  # in the order of coding
    exponent, rest = bits >> 7 & 0xFF, bits >> 8 & 0x80 | bits & 0x7F
    base = _bases(exponent)
    code = _codes(exponent, base).flatten(2)
    packed = code[..., 0::2] | code[..., 1::2] << 4
    planes = rest.unflatten(4, (2, 2)).permute(0, 1, 4, 2, 3, 5)  # by pair of rows
    records = torch.cat([packed, planes.flatten(2)], 2).to(torch.uint8)
    reserve, fits = _reserve(_by_step(exponent.flatten(2)), _by_step(code == ESCAPE), RESERVE * groups)
    return torch.cat([records.flatten(1), base.flatten(1).to(torch.uint8), reserve], 1), fits


def _bases(exponent: torch.Tensor) -> torch.Tensor:
    """The largest exponent of each row; in steps with more than MANY escapes ABOVE more than is usual, where the
    largest is FAR more and leaves more escapes."""
    largest = exponent.amax((2, 3), keepdim=True)
    usual = exponent.amax(3, keepdim=True).sum(2, keepdim=True) // WORDS  # the mean over words
    other = torch.where(largest > usual + FAR, usual + ABOVE, largest)
    before, after = ((_codes(exponent, base) == ESCAPE).sum((2, 3), keepdim=True) for base in (largest, other))
    in_step = _by_step(before.expand(exponent.shape).flatten(2)).unflatten(1, (-1, STEP_GROUPS * GROUP_VALUES))
    many = (in_step.sum(2) // (WORDS * 2) > MANY).repeat_interleave(STEP_GROUPS, 1)[:, : exponent.shape[1]]
    return torch.where(many[..., None, None, None] & (after < before), other, largest)


def _codes(exponent: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    distance = base - exponent
    return torch.where((distance >= 0) & (distance < ZERO), distance, ZERO + (exponent > 0).int())


def _by_step(values: torch.Tensor) -> torch.Tensor:
    """Reorder from codes, [units, groups, 256], to escapes; groups that are missing are zeros."""
    missing = -values.shape[1] % STEP_GROUPS
    whole = torch.nn.functional.pad(values, (0, 0, 0, missing))
    return whole.view(len(values), -1, STEP_GROUPS, WORDS, 8).transpose(2, 3).flatten(1)


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Reorder from escapes to codes."""
    steps = values.view(len(values), -1, WORDS, STEP_GROUPS, 8)
    return steps.transpose(2, 3).reshape(len(values), -1, GROUP_VALUES)[:, :groups]


def _reserve(exponent: torch.Tensor, escapes: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponents of escapes in turn, as many as there is room for, and whether that is all."""
    reserve = torch.zeros(len(exponent), room, dtype=torch.uint8, device=exponent.device)
    rank = torch.cumsum(escapes, 1) - 1
    taken = escapes & (rank < room)
    row = torch.arange(len(exponent), device=exponent.device)[:, None].expand_as(rank)
    reserve[row[taken], rank[taken]] = exponent[taken].to(torch.uint8)
    return reserve, escapes.sum(1) <= room


def _decode_unit(coded: torch.Tensor) -> torch.Tensor:
    count, groups = len(coded), coded.shape[1] // CODED_GROUP
    records, base, reserve = coded.int().split([groups * RECORD_BYTES, groups * BASES, groups * RESERVE], 1)
    packed, planes = records.view(count, groups, RECORD_BYTES).split([CODE_BYTES, REST_BYTES], 2)
    code = torch.stack([packed & 15, packed >> 4], 3).flatten(2)
    bases = base.view(count, groups, ROWS).repeat(1, 1, GROUP_VALUES // ROWS)  # in the order of codes
    near = torch.where(code == ZERO, 0, bases - code)
    escapes = _by_step(code == ESCAPE)
    rank = (torch.cumsum(escapes, 1) - 1).clamp(0, reserve.shape[1] - 1)
    far = _by_group(reserve.gather(1, rank), groups)
    exponent = torch.where(code == ESCAPE, far, near).view(count, groups, WORDS, 2, ROWS)
    rest = planes.reshape(count, groups, 2, WORDS, 2, 2).permute(0, 1, 3, 4, 2, 5).flatten(4)
    bits = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    values = bits.permute(0, 1, 4, 2, 3).flatten(1)
    return torch.where(values > 0x7FFF, values - 0x10000, values).to(torch.int16).view(torch.uint8)
