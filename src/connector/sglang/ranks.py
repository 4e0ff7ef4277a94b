"""Ranks of one engine, and what they have in common. Each keeps its own part of all pages, and SGLang calls them alike.

A rank may lack what another one has: its copy failed, or took longer. So a prefix is restored where every rank has it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed


class Ranks:
    """The ranks among which SGLang reduces, too."""

    def __init__(self, params: Any) -> None:
        groups = [each for each in (params.attn_tp_cache_group, params.tp_cache_group) if each is not None]
        self._group = next((each for each in groups if distributed.get_world_size(group=each) > 1), None)

    def longest(self, lengths: Sequence[int], most: int) -> int:
        """The longest of these ascending lengths, of at most `most`, that all ranks have; 0: none."""
        if self._group is None:
            return lengths[-1] if lengths else 0
        here = torch.zeros(most + 1, dtype=torch.uint8, device="cpu")
        here[[0, *lengths]] = 1
        distributed.all_reduce(here, op=distributed.ReduceOp.MIN, group=self._group)
        return int(here.nonzero()[-1])
