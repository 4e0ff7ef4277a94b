"""Right bytes on a device, for layouts whose faults only a device can show: alignments, padding, far addresses."""

import random

import pytest
import torch

from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.deciding import Direction, GroupCopy
from cpu_prefix_cache.memory.arena import HostArena
from tests.gpu.stage import DEVICE, Stage, random_bytes
from tests.unit.copier.bench import POISON, Shapes, piece_of, shapes_of


def random_part(rng, blocks):
    """uint8 [blocks, bytes] within larger poisoned memory: any alignment, any padding."""
    unit = rng.choice((1, 2, 4, 8, 16))
    size = rng.choice((1, 3, 16, 100, 1000, 18 * 1024 // unit)) * unit
    stride = size + rng.choice((0, 0, 1, 5)) * unit
    first = rng.choice((0, unit, 3 * unit))
    memory = torch.full((first + blocks * stride,), POISON, dtype=torch.uint8, device=DEVICE)
    part = memory.as_strided((blocks, size), (stride, 1), first)
    part.copy_(random_bytes(blocks, size))
    return part


def memory_of(part):
    """All the memory a part lies in, padding included."""
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())


@pytest.mark.parametrize("seed", range(24))
def test_any_layout_is_copied_as_the_reference_does(seed):
    rng = random.Random(seed)
    blocks = 24
    count = 4
    host_block_bytes = rng.choice((512, 1000, 4096, 20_000))
    tensors = [[random_part(rng, blocks) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 3))]
    device_blocks = [rng.randint(1, 3) for _ in tensors]
    shapes = Shapes(
        [
            piece_of(str(at), *each, host_block_bytes)
            for at, each in enumerate(zip(tensors, device_blocks, strict=True))
        ],
        host_block_bytes,
    )
    num_host = count * sum(piece.host_blocks for piece in shapes.pieces) + 5
    host_ids = rng.sample(range(num_host), num_host)
    here = [tuple(host_ids.pop() for _ in range(count * piece.host_blocks)) for piece in shapes.pieces]

    def copies():
        there = [tuple(rng.sample(range(blocks), count * each)) for each in device_blocks]
        return [GroupCopy(at, *ids) for at, ids in enumerate(zip(here, there, strict=True))]

    stores, loads = copies(), copies()
    arena = HostArena(num_host, host_block_bytes, pinned_for=DEVICE)
    arena.wait_until_ready()
    expected = torch.full_like(arena.blocks, POISON)
    arena.blocks.fill_(POISON)
    largest = max(each * part.shape[1] for each, parts in zip(device_blocks, tensors, strict=True) for part in parts)
    ring_bytes = 4 * (largest + 512) + rng.choice((0, 1 << 20))
    reference = ReferenceCopier(shapes, tensors, expected)
    staged = choose_copier(shapes, tensors, arena.blocks, pinned=arena, ring_bytes=ring_bytes).copier
    reference.copy(Direction.STORE, stores)
    staged.copy(Direction.STORE, stores)
    assert torch.equal(arena.blocks, expected)

    def loaded(copier):
        for parts in tensors:
            for part in parts:
                memory_of(part).fill_(POISON)
        copier.copy(Direction.LOAD, loads)
        return [memory_of(part).clone() for parts in tensors for part in parts]

    assert all(torch.equal(*pair) for pair in zip(loaded(staged), loaded(reference), strict=True))
    arena.close()


def test_blocks_may_lie_more_than_4_gib_apart():  # L5.33
    stride = 3 << 29  # 1.5 GiB apart
    size = 18 * 1024
    blocks = 5
    memory = torch.empty((blocks - 1) * stride + size, dtype=torch.uint8, device=DEVICE)
    far, near = memory.as_strided((blocks, size), (stride, 1), 0), random_bytes(blocks, 64)
    values = random_bytes(blocks, size)
    far.copy_(values)
    shapes = shapes_of([[far, near]], [1], size + 64)
    arena = HostArena(blocks, size + 64, pinned_for=DEVICE)
    arena.wait_until_ready()
    copier = choose_copier(shapes, [[far, near]], arena.blocks, pinned=arena).copier
    copier.copy(Direction.STORE, [GroupCopy(0, (3, 1, 0), (4, 2, 3))])
    far.fill_(POISON)
    copier.copy(Direction.LOAD, [GroupCopy(0, (3, 1, 0), (3, 4, 0))])
    assert torch.equal(far[[3, 4, 0]], values[[4, 2, 3]])
    assert (far[[1, 2]] == POISON).all()
    arena.close()


@pytest.mark.parametrize("fragment", [4096, 18 * 1024, 64 * 1024, 128 * 1024, 144 * 1024, 4 << 20])
def test_host_segments_past_4_gib(fragment):
    layers = max(1, (4 << 20) // fragment)
    stage = Stage(layers, fragment, blocks=40, num_host=(6 << 30) // (layers * fragment))
    assert stage.arena.blocks.numel() > 5 << 30
    top = stage.arena.blocks.shape[0] - 30
    wanted = stage.rows(range(30)).clone()
    stage.copy(Direction.STORE, range(top, top + 30), range(30))
    assert torch.equal(stage.arena.blocks[top:], wanted.cpu())
    for part in stage.parts:
        part.fill_(POISON)
    stage.copy(Direction.LOAD, range(top, top + 30), range(10, 40))
    assert torch.equal(stage.rows(range(10, 40)), wanted)
    stage.arena.close()
