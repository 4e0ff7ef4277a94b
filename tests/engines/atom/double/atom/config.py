"""Registration of a layer by ATOM."""

from dataclasses import dataclass, field

import torch


def _none() -> torch.Tensor:
    return torch.tensor([])


@dataclass
class KVCacheTensor:
    layer_num: int
    k_cache: torch.Tensor = field(default_factory=_none)
    v_cache: torch.Tensor = field(default_factory=_none)
    k_scale: torch.Tensor = None
    v_scale: torch.Tensor = None
    index_cache: torch.Tensor | None = None
