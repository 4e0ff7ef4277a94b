"""Device memory, a host region, and a planner's description of them: for tests of copiers.

Device memory is host memory, unless COPIER_DEVICE names another device: on a GPU, `make test-gpu` does.
"""

import os
from dataclasses import dataclass

import torch

from cpu_prefix_cache.deciding import Piece, PrefixGroup

POISON = 0xAB
DEVICE = torch.device(os.environ.get("COPIER_DEVICE", "cpu"))


@dataclass
class Shapes:
    """As much of a planner as a copier needs."""

    pieces: list[Piece]
    host_block_bytes: int


def piece_of(name, parts, device_blocks, host_block_bytes):
    """The piece of a group with these parts: as many host blocks as it takes."""
    block_bytes = sum(part[0].numel() * part.element_size() for part in parts)
    group = PrefixGroup(name=name, block_tokens=1, block_bytes=block_bytes)
    num_bytes = device_blocks * block_bytes
    return Piece(group, device_blocks, -(-num_bytes // host_block_bytes), num_bytes)


def shapes_of(tensors, device_blocks, host_block_bytes):
    names = "abcdefgh"
    pieces = [piece_of(*each, host_block_bytes) for each in zip(names, tensors, device_blocks, strict=False)]
    return Shapes(pieces, host_block_bytes)


def poisoned(*shape):
    """Host memory."""
    return torch.full(shape, POISON, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")


def randoms(*shape, seed=0, dtype=torch.uint8):
    """Device memory."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=_seeded(seed))
    return raw.to(DEVICE).view(dtype)


def raw(tensor):
    """Its bytes, block by block."""
    return tensor.contiguous().view(torch.uint8).view(tensor.shape[0], -1)


def _seeded(seed):
    return torch.Generator().manual_seed(seed)
