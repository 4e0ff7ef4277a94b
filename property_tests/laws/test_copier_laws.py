"""For any layout and any blocks: copies move the bytes of the layout, and touch nothing else.

The model is a list of byte addresses on each side. Every copier is held against it over all of the memory there is:
padding, other blocks, and the rest of a piece's host blocks. The staged copier runs in Triton's interpreter, with
small rings, with tiles of any width, and on a simulated driver: its streams run in any order they may, it has batches
or not, the host region is pinned in slices of any size, and it raises AssertionError on what real drivers refuse.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.copier import paths
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.triton_staging import INTERPRETER, Tiling
from cpu_prefix_cache.deciding import Direction, GroupCopy, Piece, PrefixGroup
from cpu_prefix_cache.memory import span_tables
from tests.support.simulated_driver import SimulatedDriver
from tests.support.simulated_streams import SimulatedStreams
from tests.unit.copier.simulated import simulated_copier

POISON = 0xAB
MAX_FRAGMENTS = 20  # of one group in one copy: what the interpreter does in some milliseconds
BLOCKS = 9
WIDE = [INTERPRETER, Tiling((16, 128, 1024), 4096, 64, 1)]
NARROW = [*WIDE, Tiling((4,), 16, 3, 1), Tiling((4, 32), 64, 1, 1)]  # many tiles: for small fragments alone


@dataclass
class PartAt:
    """Block b lies in [first + b * stride, first + b * stride + size) of a buffer."""

    buffer: int
    first: int
    stride: int
    size: int


@dataclass
class Layout:
    """As much of a planner as copiers need, and where the engine's parts lie: `parts[group]`."""

    pieces: list[Piece]
    host_block_bytes: int
    parts: list[list[PartAt]]
    buffer_bytes: list[int]

    def tensors(self, buffers):
        return [
            [buffers[at.buffer].as_strided((BLOCKS, at.size), (at.stride, 1), at.first) for at in parts]
            for parts in self.parts
        ]


sizes = st.one_of(
    st.integers(1, 40), st.sampled_from([16, 48, 64, 128]), st.sampled_from([18 * 1024, 18 * 1024 + 6, 4096, 1001])
)


@st.composite
def buffers_of_parts(draw, buffer, count):
    """`count` parts in one buffer, side by side within every block, in any order, with any gaps; and its bytes."""
    first, gap = draw(st.sampled_from([0, 0, 1, 8, 16])), draw(st.sampled_from([0, 0, 1, 2, 16]))
    widths = [draw(sizes) for _ in range(count)]
    at = 0
    begins = {}
    for part in draw(st.permutations(range(count))):
        begins[part], at = at, at + widths[part] + gap
    stride = at + draw(st.sampled_from([0, 0, 3, 8, 48]))
    parts = [PartAt(buffer, first + begins[part], stride, widths[part]) for part in range(count)]
    return parts, first + BLOCKS * stride


@st.composite
def layouts(draw):
    """One to three groups, whose parts lie apart or together."""
    host_block_bytes = draw(st.one_of(st.integers(20, 200), st.sampled_from([512, 18 * 1024, 40_000])))
    pieces = []
    groups = []
    buffer_bytes = []
    for index in range(draw(st.integers(1, 3))):
        parts = []
        for count in draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)):
            some, num_bytes = draw(buffers_of_parts(len(buffer_bytes), count))
            parts += some
            buffer_bytes.append(num_bytes)
        device_blocks = draw(st.integers(1, 3))
        block_bytes = sum(part.size for part in parts)
        group = PrefixGroup(name=str(index), block_tokens=1, block_bytes=block_bytes)
        num_bytes = device_blocks * block_bytes
        spare = draw(st.sampled_from([0, 0, 0, 1, 2]))  # host blocks in which this rank has nothing
        pieces.append(Piece(group, device_blocks, -(-num_bytes // host_block_bytes) + spare, num_bytes))
        groups.append(parts)
    return Layout(pieces, host_block_bytes, groups, buffer_bytes)


@st.composite
def transfers(draw):
    """A layout, host blocks, and for each group where pieces come from, where they stay, and where they go."""
    layout = draw(layouts())
    counts = []
    for piece, parts in zip(layout.pieces, layout.parts, strict=True):
        most = min(MAX_FRAGMENTS // (len(parts) * piece.device_blocks), BLOCKS // piece.device_blocks)
        counts.append(draw(st.integers(0, max(1, most))))
    num_host = 3 + sum(count * piece.host_blocks for count, piece in zip(counts, layout.pieces, strict=True))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    host_ids = rng.sample(range(num_host), num_host) if draw(st.booleans()) else list(reversed(range(num_host)))
    stores, loads = [], []
    for index, (count, piece) in enumerate(zip(counts, layout.pieces, strict=True)):
        here = tuple(host_ids.pop() for _ in range(count * piece.host_blocks))
        for copies in (stores, loads):
            ids = rng.sample(range(BLOCKS), count * piece.device_blocks)
            copies.append(GroupCopy(index, here, tuple(ids)))
    return layout, num_host, stores, loads


def addresses(layout, copies):
    """Bytes that a transfer moves, as (buffer, bytes of it, bytes of the host region), both in the same order."""
    for copy in copies:
        piece, parts = layout.pieces[copy.group], layout.parts[copy.group]
        for number in range(len(copy.host_blocks) // piece.host_blocks):
            here = copy.host_blocks[number * piece.host_blocks :][: piece.host_blocks]
            host = [block * layout.host_block_bytes + byte for block in here for byte in range(layout.host_block_bytes)]
            done = 0
            for part in parts:
                for block in copy.device_blocks[number * piece.device_blocks :][: piece.device_blocks]:
                    begin = part.first + block * part.stride
                    yield part.buffer, np.arange(begin, begin + part.size), np.array(host[done : done + part.size])
                    done += part.size


def build(name, layout, tensors, host, data):
    if name == "reference":
        return choose_copier(layout, tensors, host, name=name).copier
    largest = max(
        piece.device_blocks * part.size
        for piece, parts in zip(layout.pieces, layout.parts, strict=True)
        for part in parts
    )
    least = 4 * -(-largest // 512) * 512
    rng = random.Random(data.draw(st.integers(0, 1000), label="order"))
    streams = SimulatedStreams(rng=rng, hurry=data.draw(st.sampled_from([0.0, 0.3, 0.9]), label="hurry"))
    return simulated_copier(
        SimulatedDriver(streams, has_batches=data.draw(st.booleans(), label="batches")),
        layout,
        tensors,
        host,
        ring_bytes=data.draw(st.sampled_from([least, 2 * least, least + 64 * 512]), label="ring"),
        tiling=data.draw(st.sampled_from(NARROW if largest < 100 else WIDE), label="tiling"),
        seam_bytes=data.draw(st.sampled_from([1 << 24, 4096, 1000, 64]), label="seam"),
        direct_bytes=data.draw(st.sampled_from([paths.DIRECT_SLICE_BYTES, 1]), label="direct"),
    )


@pytest.mark.parametrize("name", ["reference", "staged"])
@settings(max_examples=50)  # the interpreter takes 0.2 s for one
@given(transfers(), st.data())
def test_copies_move_the_bytes_of_the_layout_and_nothing_else(name, transfer, data):  # S7.49, O8.19, L5.32
    layout, num_host, stores, loads = transfer
    seed = torch.Generator().manual_seed(1)
    buffers = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed) for size in layout.buffer_bytes]
    host = torch.full((num_host, layout.host_block_bytes), POISON, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:  # tables of few spans, which real copies have loops for
        fewest = data.draw(st.sampled_from([1, paths.FEWEST_IN_TABLE]), label="fewest")
        patch.setattr(paths, "FEWEST_IN_TABLE", fewest)
        patch.setattr(span_tables, "TABLE_SPANS", data.draw(st.sampled_from([1, 5, 1000]), label="table"))
        copier = build(name, layout, layout.tensors(buffers), host, data)
        move_there_and_back(layout, copier, host, buffers, stores, loads)


def move_there_and_back(layout, copier, host, buffers, stores, loads):
    expected = host.numpy().copy().reshape(-1)
    for buffer, there, here in addresses(layout, stores):
        expected[here] = buffers[buffer].numpy()[there]
    copier.copy(Direction.STORE, stores)
    assert np.array_equal(host.numpy().reshape(-1), expected)

    for buffer in buffers:
        buffer.fill_(POISON)
    wanted = [buffer.numpy().copy() for buffer in buffers]
    for buffer, there, here in addresses(layout, loads):
        wanted[buffer][there] = expected[here]
    copier.copy(Direction.LOAD, loads)
    assert all(np.array_equal(buffer.numpy(), right) for buffer, right in zip(buffers, wanted, strict=True))
    assert np.array_equal(host.numpy().reshape(-1), expected)
