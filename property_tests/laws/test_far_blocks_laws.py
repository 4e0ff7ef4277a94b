"""Blocks on the device that lie gigabytes apart. No process that may have few addresses can run this (`mutants`)."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.deciding import Direction, GroupCopy, Piece, PrefixGroup
from property_tests.laws.test_copier_laws import BLOCKS, POISON, Layout

REGION = 64 << 30
MIDDLE = 8 << 30  # an address cut to 32 bits is then still within the region: wrong bytes, no crash


@pytest.fixture(scope="module")
def region():
    """64 GiB of addresses, of which only what is written takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, REGION, flags=flags), dtype=torch.uint8)


@pytest.mark.parametrize("name", ["reference", "staged"])
@settings(max_examples=20)
@given(
    stride=st.integers(4 << 30, (REGION - MIDDLE - (1 << 30)) // BLOCKS),
    size=st.sampled_from([18 * 1024, 5001, 48]),
    ids=st.permutations(range(BLOCKS)),
)
def test_blocks_may_lie_any_number_of_gigabytes_apart(name, region, stride, size, ids):  # L5.33
    rows = region.as_strided((BLOCKS, size), (stride, 1), MIDDLE)
    values = torch.randint(0, 256, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    sources, goals = ids[:3], ids[3:6]
    rows[:] = POISON
    rows[sources] = values
    group = PrefixGroup(name="far", block_tokens=1, block_bytes=size)
    layout = Layout([Piece(group, 1, 1, size)], size, [], [])
    host = torch.full((5, size), POISON, dtype=torch.uint8)
    copier = choose_copier(layout, [[rows]], host, name=name, ring_bytes=1 << 17).copier
    copier.copy(Direction.STORE, [GroupCopy(0, (4, 0, 2), tuple(sources))])
    assert torch.equal(host[[4, 0, 2]], values)
    copier.copy(Direction.LOAD, [GroupCopy(0, (4, 0, 2), tuple(goals))])
    assert torch.equal(rows[goals], values)
    assert torch.equal(rows[sources], values)
    assert (rows[ids[6:]] == POISON).all()
