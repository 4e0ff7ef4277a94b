"""Coded forms: any bits come back equal, or are reported as unfit; and kernels agree with the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.copier import coded_form
from cpu_prefix_cache.copier.triton_coding import coding_launchers
from cpu_prefix_cache.copier.triton_staging import INTERPRETED
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.model.codec import EXPONENT

GROUPS = st.sampled_from([2, 4, 10, 32, 34])  # of 512 bytes; a unit has 32
SPECIAL = [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x8000, 0x0000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F]
RNG = torch.Generator()


@st.composite
def fragments(draw):
    """Three fragments of bf16 bits: near each other, with so many strangers; or any at all."""
    groups = draw(GROUPS)
    RNG.manual_seed(draw(st.integers(0, 2**32)))
    count = 3 * groups * 256
    near = 0x3F80 + torch.randint(0, draw(st.sampled_from([1, 8, 14, 16, 40])) << 7, (count,), generator=RNG)
    bits = near ^ (torch.randint(0, 2, (count,), generator=RNG) << 15)
    strangers = draw(st.one_of(st.integers(0, 3), st.integers(3 * groups * 4 - 2, 3 * groups * 4 + 2), st.just(count)))
    where = torch.randperm(count, generator=RNG)[:strangers]
    pool = draw(st.sampled_from(["special", "any", "far above", "zeros"]))
    some = {
        "special": torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (len(where),), generator=RNG)],
        "any": torch.randint(0, 1 << 16, (len(where),), generator=RNG),
        "far above": torch.full((len(where),), 0x7E00),
        "zeros": torch.zeros(len(where), dtype=torch.int64),
    }[pool]
    bits[where] = some
    bits = torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16)
    return bits.view(3, groups * 256).view(torch.uint8)


def escapes_of(coded, groups):
    """How many escapes each unit of one coded fragment has, from its codes alone."""
    found = []
    for first in range(0, groups, coded_form.UNIT_GROUPS):
        here = min(groups - first, coded_form.UNIT_GROUPS)
        unit = coded[first * coded_form.CODED_GROUP :][: here * coded_form.RECORD_BYTES].view(here, -1)
        codes = unit[:, : coded_form.CODE_BYTES]
        found.append((int((codes & 15 == 15).sum() + (codes >> 4 == 15).sum()), 4 * here))
    return found


@settings(deadline=None)
@given(fragments())
def test_bits_come_back_unless_they_do_not_fit(given_bits):
    coded, fits = coded_form.encode(given_bits)
    assert coded.shape[1] == EXPONENT.kept_bytes(given_bits.shape[1])
    back = coded_form.decode(coded, given_bits.shape[1])
    for at in range(3):
        too_many = any(count > room for count, room in escapes_of(coded[at], given_bits.shape[1] // 512))
        assert bool(fits[at]) is not too_many
        if fits[at]:
            assert torch.equal(back[at], given_bits[at])


@pytest.mark.skipif(not INTERPRETED, reason="kernels for the CPU need Triton's interpreter")
@settings(deadline=None, max_examples=12)
@given(fragments(), st.sampled_from([1, 2, 3]))
def test_kernels_write_and_read_what_the_reference_does(given_bits, programs):
    expected, fits = coded_form.encode(given_bits)
    parts, ids = [given_bits.clone()], torch.tensor([2, 0, 1])
    (launcher,) = coding_launchers(parts, [0], device_blocks=1, programs=programs)
    pitch = expected.shape[1]
    slot, unfit = torch.full((3 * pitch,), 0xAB, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    launcher.launch(Direction.STORE, pitch, slot, ids, 0, unfit)
    assert torch.equal(slot.view(3, pitch), expected[ids])
    assert torch.equal(unfit == 0, fits[ids])
    parts[0].fill_(0xAB)
    launcher.launch(Direction.LOAD, pitch, slot, ids, 0, unfit)
    assert torch.equal(parts[0][fits], given_bits[fits])


def test_a_damaged_byte_of_any_field_shows():
    given_bits = torch.randn(1, 512, generator=RNG.manual_seed(0)).bfloat16().view(torch.uint8)
    given_bits[0, 2:4] = torch.tensor([0x80, 0x7F], dtype=torch.uint8)  # an infinity, which is an escape or the base
    coded, _ = coded_form.encode(given_bits)
    for at in (0, 127, 128, 383, 2 * 384, 2 * 384 + 7):
        damaged = coded.clone()
        damaged[0, at] ^= 1
        assert not torch.equal(coded_form.decode(damaged, given_bits.shape[1]), given_bits)
