"""Tensors of a past as plain bytes, and back."""

import torch
from transformers.cache_utils import LinearAttentionLayer

from cpu_prefix_cache import MisuseError


def set_state(layer: LinearAttentionLayer, name: str, number: int, state: torch.Tensor) -> None:
    if name == "conv":
        layer.update_conv_state(state, number)
    else:
        layer.update_recurrent_state(state, number)


def check_bytes(row: torch.Tensor, num_bytes: int) -> None:
    if row.dtype != torch.uint8 or row.shape != (num_bytes,):
        raise MisuseError(f"a snapshot of {num_bytes} bytes does not fit {row.dtype} {list(row.shape)}")


def as_bytes(state: torch.Tensor) -> torch.Tensor:
    return state.contiguous().view(-1).view(torch.uint8)


def as_tensor(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the bytes as values. It must be a copy, because a part in a page may not be aligned."""
    return row.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
