"""For any layout and any blocks: a store and a load bring every byte back, and touch nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache import Direction, Group, GroupCopy, GroupKind, HybridChunkPlanner
from cpu_prefix_cache.copier.reference import ReferenceCopier

POISON = 0xAB
DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn]


@st.composite
def benches(draw):
    """Device tensors of one to three groups, with padding between blocks, and the planner that fits them."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    groups, tensors = [], []
    for index in range(draw(st.integers(1, 3))):
        num_blocks = draw(st.integers(8, 12))
        parts = []
        for _ in range(draw(st.integers(1, 4))):
            dtype, width, padding = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 9)), draw(st.integers(0, 3))
            size = dtype.itemsize
            raw = torch.randint(0, 256, (num_blocks, (width + padding) * size), dtype=torch.uint8, generator=seed)
            parts.append(raw.view(dtype)[:, :width])
        weight = sum(part[0].numel() * part.element_size() for part in parts)
        tokens = 2 ** draw(st.integers(0, 2))
        groups.append(Group(name=str(index), kind=GroupKind.PREFIX, block_tokens=tokens, block_bytes=weight))
        tensors.append(parts)
    return HybridChunkPlanner(groups, max_model_len=64), tensors


@st.composite
def round_trips(draw):
    """A bench, and for each group where two chunks come from, where they stay, and where they go."""
    planner, tensors = draw(benches())
    host_ids = draw(st.permutations(range(2 * planner.host_blocks_per_chunk + 3)))
    stores, loads = [], []
    for index, piece in enumerate(planner.pieces):
        host = tuple(host_ids.pop() for _ in range(2 * piece.host_blocks))
        blocks = list(range(tensors[index][0].shape[0]))
        sources = tuple(draw(st.permutations(blocks))[: 2 * piece.device_blocks])
        goals = tuple(draw(st.permutations(blocks))[: 2 * piece.device_blocks])
        stores.append(GroupCopy(index, host, sources))
        loads.append(GroupCopy(index, host, goals))
    return planner, tensors, stores, loads


def raw(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.uint8)


@given(round_trips())
def test_every_byte_comes_back_and_nothing_else_is_touched(trip):  # S7.49, O8.19
    planner, tensors, stores, loads = trip
    spare = 3
    host = torch.full((2 * planner.host_blocks_per_chunk + spare, planner.host_block_bytes), POISON, dtype=torch.uint8)
    copier = ReferenceCopier(planner, tensors, host)
    before = [[raw(part).clone() for part in parts] for parts in tensors]

    copier.copy(Direction.STORE, stores)
    written = {block for copy in stores for block in copy.host_blocks}
    assert all((host[block] == POISON).all() for block in range(host.shape[0]) if block not in written)
    for parts in tensors:
        for part in parts:
            part.view(torch.uint8).fill_(POISON)

    copier.copy(Direction.LOAD, loads)
    for group, (store, load) in enumerate(zip(stores, loads, strict=True)):
        for part, was in zip(tensors[group], before[group], strict=True):
            now = raw(part)
            assert torch.equal(now[list(load.device_blocks)], was[list(store.device_blocks)])
            untouched = [block for block in range(now.shape[0]) if block not in load.device_blocks]
            assert (now[untouched] == POISON).all()
