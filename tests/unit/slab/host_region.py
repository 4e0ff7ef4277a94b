"""A host region of slabs' tests. Apart from small_slab.py, so that what opens a slab alone needs no torch."""

import mmap

import torch

from tests.unit.slab.small_slab import BLOCK, POISON


def region(blocks, block_bytes=BLOCK):
    """Page-aligned, like a host region; poisoned."""
    made = torch.frombuffer(mmap.mmap(-1, blocks * block_bytes), dtype=torch.uint8).view(blocks, block_bytes)
    return made.fill_(POISON)
