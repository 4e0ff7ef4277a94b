"""Which copier, by the device of the tensors or by name:

reference   torch indexing, on any device
staged      Triton gather and scatter with a staging ring, for tensors on CUDA and HIP devices
"""

from dataclasses import dataclass

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding, Shapes, Tensors
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.ring import RING_BYTES
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import accelerator_driver
from cpu_prefix_cache.messages.errors import ConfigurationError

COPIERS = ("auto", "reference", "staged")


@dataclass(frozen=True, slots=True)
class ChosenCopier:
    """The copier, its name, and why it was chosen, for the log."""

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
) -> ChosenCopier:
    """The copier for these tensors. The arguments are those of Binding, and of StagedCopier the last three.

    Raises ConfigurationError for an unknown name, and what the copier raises. Triton is imported only if it is needed.
    """
    if name not in COPIERS:
        raise ConfigurationError(f"copier must be one of {', '.join(COPIERS)}; got {name!r}")
    name, reason = _fitting(tensors) if name == "auto" else (name, "it was asked for")
    if name == "reference":
        return ChosenCopier(ReferenceCopier(shapes, tensors, host, null_block=null_block), name, reason)
    try:
        from cpu_prefix_cache.copier.staged import StagedCopier
    except ImportError as missing:
        raise ConfigurationError(f'staged copies need Triton ({missing}); install it, or say "reference"') from missing
    binding = Binding(shapes, tensors, host, null_block)
    copier = StagedCopier(binding, pinned=pinned, ring_bytes=ring_bytes, loads_first=loads_first)
    return ChosenCopier(copier, name, f"{reason}; {copier.paths}")


def _fitting(tensors: Tensors) -> tuple[str, str]:
    kind = tensors[0][0].device.type if tensors and tensors[0] else "cpu"
    if kind == "cuda":
        return "staged", f"the device tensors are on a device of {accelerator_driver().name}"
    if kind == "cpu":
        return "reference", "the device tensors are in host memory, where there is no link to keep busy"
    return "reference", f"staging is for CUDA and HIP devices, and the tensors are on {kind!r}"
