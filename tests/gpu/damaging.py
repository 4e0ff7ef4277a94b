"""`connector.vllm` with a copier that damages each load: one block of the group that DAMAGED names; with `drafter`, all
that is loaded of the last layer of the full attention.

For `kv_connector_module_path`: vLLM imports that module in every process of an engine, so the ranks damage, too.
"""

import os
from dataclasses import replace
from typing import Any

from connector.vllm import CPUPrefixCacheConnector, worker
from cpu_prefix_cache.testing import CorruptingCopier
from tests.support.faults import damaging

__all__ = ["CPUPrefixCacheConnector"]
NAME, DRAFTER = "DAMAGED", "drafter"


def damaging_the_drafter(choose_copier: Any) -> Any:
    """vLLM lists the layer of a drafter last; a row is one layer's K, V or both."""

    def choose_and_damage(shapes: Any, tensors: Any, *arguments: Any, **options: Any) -> Any:
        choice = choose_copier(shapes, tensors, *arguments, **options)
        group = next(at for at, piece in enumerate(shapes.pieces) if piece.in_chunk)
        rows = [rows[-1:] for rows in tensors]
        copier = CorruptingCopier(choice.copier, rows, group, loads=None, blocks=slice(None))
        return replace(choice, copier=copier)

    return choose_and_damage


damaged = os.environ[NAME]
around = damaging_the_drafter(worker.choose_copier) if damaged == DRAFTER else damaging(worker.choose_copier, damaged)
worker.choose_copier = around
