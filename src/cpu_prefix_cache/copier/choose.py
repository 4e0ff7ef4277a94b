"""Which copier, and why: by what the device tensors are, or by name.

reference   torch indexing, on any device; what every other copier must match
staged      Triton gather and scatter with a staging ring, for CUDA tensors; large blocks cross without it
"""

from dataclasses import dataclass

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Shapes, Tensors
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.ring import RING_BYTES
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.messages.errors import ConfigurationError

COPIERS = ("auto", "reference", "staged")


@dataclass(frozen=True, slots=True)
class Choice:
    """The copier, its name, and in a clause for the log why it was chosen."""

    copier: Copier
    name: str
    reason: str


def choose_copier(
    shapes: Shapes,
    tensors: Tensors,
    host: torch.Tensor,
    *,
    name: str = "auto",
    null_block: int | None = None,
    pinned: HostArena | None = None,
    ring_bytes: int = RING_BYTES,
    loads_first: bool = False,
) -> Choice:
    """The copier for these tensors. `ring_bytes` is for staging alone. `pinned` says how far
    `host` is pinned by now (a `HostArena` does); None says as a whole, or that nothing needs to be. With `loads_first`
    staged stores pause for loads (loads_first.py).

    Raises ConfigurationError for an unknown name, and what the copier raises. Triton is imported only if it is needed.
    """
    if name not in COPIERS:
        raise ConfigurationError(f"copier must be one of {', '.join(COPIERS)}; got {name!r}")
    reason = "it was asked for"
    if name == "auto":
        name, reason = _fitting(tensors)
    if name == "reference":
        return Choice(ReferenceCopier(shapes, tensors, host, null_block=null_block), name, reason)
    try:
        from cpu_prefix_cache.copier.staged import StagedCopier
    except ImportError as missing:
        raise ConfigurationError(f'staged copies need Triton ({missing}); install it, or say "reference"') from missing
    copier = StagedCopier(
        shapes, tensors, host, null_block=null_block, pinned=pinned, ring_bytes=ring_bytes, loads_first=loads_first
    )
    return Choice(copier, name, f"{reason}; {copier.paths}")


def _fitting(tensors: Tensors) -> tuple[str, str]:
    kind = tensors[0][0].device.type if tensors and tensors[0] else "cpu"
    if kind == "cuda":
        return "staged", "the device tensors are on a CUDA device"
    if kind == "cpu":
        return "reference", "the device tensors are in host memory, where there is no link to keep busy"
    return "reference", f"staging is for CUDA devices, and the tensors are on {kind!r}"
