"""Where vLLM keeps the bytes of a block: splits registered KV tensors into rows of contiguous bytes.

For each layer vLLM registers a view of its KV, or a list of views for a state. Views differ in which dimension counts
blocks, in what lies outside of it (K and V, heads), in how many kernel blocks make a block, and in their strides:

    [2, blocks, tokens, heads, size]        K of all blocks, then V of all blocks        two rows a block
    [blocks, heads, tokens, size]           in any memory order                          one row, or one for each head
    [slots, ...], [slots, ...]              convolution and recurrent state              a row each

Only bytes inside a view are copied, so neither padding nor pages of other groups in the same memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import same_blocks

Registered = torch.Tensor | Sequence[torch.Tensor]


def group_rows(kv_caches: Mapping[str, Registered], layer_names: Iterable[str], num_blocks: int) -> list[torch.Tensor]:
    """The rows of one group, uint8 [num_blocks, bytes] each, layer by layer. Rows that layers share appear once.

    Raises ConfigurationError for a layer that was not registered, and for a view with another number of blocks.
    """
    rows: list[torch.Tensor] = []
    for name in layer_names:
        if name not in kv_caches:
            raise ConfigurationError(f"vLLM has not registered the KV of layer {name!r}")
        registered = kv_caches[name]
        views = [registered] if isinstance(registered, torch.Tensor) else registered
        for row in (row for view in views for row in view_rows(view, num_blocks)):
            if not any(same_blocks(row, other) for other in rows):
                rows.append(row)
    return rows


def view_rows(view: torch.Tensor, num_blocks: int) -> Iterator[torch.Tensor]:
    """The rows of one view, uint8 [num_blocks, bytes] each, in memory order. The bytes of a row are contiguous."""
    at = _block_dimension(view, num_blocks)
    kernel_blocks = view.shape[at] // num_blocks
    stride = view.stride(at) * kernel_blocks
    inner = [(view.stride(d), view.shape[d]) for d in range(view.ndim) if d != at]
    if kernel_blocks > 1:
        inner.append((view.stride(at), kernel_blocks))
    width, outer = _together(inner)
    bytes_of = _as_bytes(view)
    scale = view.element_size()
    for steps in product(*(range(size) for _, size in outer)):
        offset = view.storage_offset() + sum(step * apart for step, (apart, _) in zip(steps, outer, strict=True))
        yield bytes_of.as_strided((num_blocks, width * scale), (stride * scale, 1), offset * scale)


def order_of(registered: Registered, num_blocks: int) -> str:
    """In which order a layer's rows hold what, however many blocks there are: type, block dimension, and the other
    dimensions with their sizes, the one with the largest stride first.

    >>> order_of(torch.zeros(2, 8, 16, 4, dtype=torch.float16).permute(0, 1, 3, 2), num_blocks=8)
    'float16 1: 0x2 3x16 2x4'
    """
    views = [registered] if isinstance(registered, torch.Tensor) else registered
    return ", ".join(_order_of_view(view, num_blocks) for view in views)


def _order_of_view(view: torch.Tensor, num_blocks: int) -> str:
    at = _block_dimension(view, num_blocks)
    sizes = [*view.shape[:at], view.shape[at] // num_blocks, *view.shape[at + 1 :]]
    inner = sorted((d for d in range(view.ndim) if sizes[d] > 1), key=lambda d: view.stride()[d], reverse=True)
    return f"{str(view.dtype).removeprefix('torch.')} {at}: {' '.join(f'{d}x{sizes[d]}' for d in inner)}"


def _block_dimension(view: torch.Tensor, num_blocks: int) -> int:
    """The dimension that counts blocks: the first, or the second after K and V, if their stride is the larger one."""
    if view.ndim > 2 and view.shape[0] == 2 and view.stride(0) > view.stride(1) and view.shape[1] % num_blocks == 0:
        return 1
    if view.ndim < 2 or view.shape[0] % num_blocks:
        raise ConfigurationError(
            f"vLLM has {num_blocks} blocks, but has registered KV of shape {tuple(view.shape)}, whose blocks do not "
            "come first"
        )
    return 0


def _together(dimensions: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """How many elements are contiguous, and the other dimensions as (stride, size), the largest stride first."""
    width = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted((stride, size) for stride, size in dimensions if size > 1):
        if stride == width and not outer:
            width *= size
        else:
            outer.append((stride, size))
    return width, outer[::-1]


def _as_bytes(view: torch.Tensor) -> torch.Tensor:
    """The whole storage of a view, as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
