"""Parts of an engine's KV, declared one by one.

A *part* is the bytes that each device block has in one tensor: contiguous, equally many, at a constant stride from
block to block. What lies between blocks is never touched.

`blocks_first` makes one of a tensor [blocks, ...]: K or V, scales, an index cache, a state with its slots.
`kv_layout.py` has words for tensors with other dimensions before that of the blocks.

`canonical` orders the parts of a group by layer and role, so that K and V apart and together come to the same bytes on
the host (rule 14). Within a part the bytes keep the engine's order.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, groupby, pairwise

import torch

from cpu_prefix_cache.messages.errors import ConfigurationError


class Role(enum.IntEnum):
    """Contents of a part. The numbers order a layer's parts on the host, and belong to LAYOUT_VERSION."""

    KEY = 0
    VALUE = 1
    LATENT = 2  # MLA: the compressed KV, with its rotary part
    INDEX = 3  # the keys of a sparse-attention indexer
    KEY_SCALE = 4
    VALUE_SCALE = 5
    LATENT_SCALE = 6
    INDEX_SCALE = 7
    CONV_STATE = 8
    STATE = 9  # Mamba, linear attention


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part: `rows` is uint8 [blocks, bytes of a block], the engine's own memory.

    `number` distinguishes parts of one layer and role, such as the three convolutions of some linear attentions.
    `content` is the type and the shape of a block, such as bfloat16[16, 8, 128]. `beside` are the sizes of the other
    dimensions of its tensor: if one is that of the blocks, the wrong dimension was named. A tensor of tokens was
    divided into blocks of `block_tokens`.
    """

    layer: int
    role: Role
    rows: torch.Tensor
    number: int = 0
    content: str = "uint8"
    beside: tuple[int, ...] = ()
    block_tokens: int | None = None

    def __str__(self) -> str:
        name = f"{self.role.name.lower().replace('_', ' ')} of layer {self.layer}"
        return f"{name} (number {self.number})" if self.number else name


def blocks_first(layer: int, role: Role, tensor: torch.Tensor, *, number: int = 0) -> Part:
    """A tensor [blocks, ...] of any dtype. A state tensor is [slots, ...]: its slots are its blocks.

    Raises ConfigurationError when the bytes of a block do not lie together, and for what is no tensor with bytes.
    """
    check_tensor(tensor)
    content = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
    return Part(layer, role, block_bytes(tensor), number, content, beside=tuple(tensor.shape[1:]))


def check_tensor(given: object) -> None:
    """Raise ConfigurationError for what is no tensor, or one of the meta device."""
    if not isinstance(given, torch.Tensor):
        raise ConfigurationError(f"KV lies in tensors of torch, and copies go to their memory; got {type(given)}")
    if given.is_meta:
        raise ConfigurationError(f"a tensor {list(given.shape)} on the meta device has no memory; give the real one")


def canonical(parts: Iterable[Part]) -> list[torch.Tensor]:
    """The rows of a group's parts, ordered by layer, role and number.

    Raises ConfigurationError when a part comes twice, or two parts share memory.
    """
    ordered = sorted(parts, key=_order)
    for one, next_one in pairwise(ordered):
        if str(one) == str(next_one):
            raise ConfigurationError(f"the {one} was declared twice; tell parts of one role apart by `number`")
    rows = [part.rows for part in ordered]
    check_apart(rows, [str(part) for part in ordered])
    return rows


def spelled(parts: Iterable[Part]) -> str:
    """Meaning of the bytes of a piece, part by part in their order on the host; equal neighbours are counted."""
    contents = (f"{part.role.name.lower()} {part.content}" for part in sorted(parts, key=_order))
    return ", ".join(f"{len(list(equal))} x {content}" for content, equal in groupby(contents))


def _order(part: Part) -> tuple[int, int, int]:
    return part.layer, part.role, part.number


def block_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor [blocks, ...] as uint8 [blocks, bytes], the same memory.

    Raises ConfigurationError when the bytes of a block are not contiguous, blocks overlap, or there are none.
    """
    if tensor.ndim < 2 or not tensor.numel():
        raise ConfigurationError(f"a part is a tensor [blocks, ...] with bytes in it, got shape {tuple(tensor.shape)}")
    if not tensor[0].is_contiguous():
        raise ConfigurationError(
            f"the bytes of one block must be contiguous, but blocks of shape {tuple(tensor.shape[1:])} "
            f"have strides {tensor.stride()[1:]}; a permuted view is given in the order of its memory"
        )
    blocks, width = tensor.shape[0], tensor[0].numel()
    if blocks > 1 and tensor.stride(0) < width:
        raise ConfigurationError(f"blocks of {width} elements overlap: they are only {tensor.stride(0)} apart")
    flat = tensor.as_strided((blocks, width), (tensor.stride(0), 1), tensor.storage_offset())
    return flat.view(torch.uint8).view(blocks, width * tensor.element_size())


def piece_offsets(block_bytes: Iterable[int], device_blocks: int, begin: int = 0) -> tuple[int, ...]:
    """Where each part begins in a piece, and where the last one ends, in bytes. `block_bytes` are those of a block in
    each part, of which the first is at `begin`. Within a part device block follows device block:

        device   layer 0 K   [ . ][b1][ . ][b0] ...          piece of blocks b0, b1
                 layer 0 V   [ . ][b1][ . ][b0] ...
        host     | 0 K b0 | 0 K b1 | 0 V b0 | 0 V b1 | 1 K b0 | ...  padding to whole host blocks |

    No copy reads or writes the padding.

    >>> piece_offsets([64, 32], device_blocks=2)
    (0, 128, 192)
    """
    return tuple(accumulate((size * device_blocks for size in block_bytes), initial=begin))


def check_apart(rows: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise ConfigurationError when two parts of one group share bytes: a load would write them twice. Layers that
    share their KV are declared once. Groups may share memory: the engine knows which blocks are whose."""
    for (one, one_name), (other, other_name) in combinations(zip(rows, names, strict=True), 2):
        low, high = (one, other) if one.data_ptr() <= other.data_ptr() else (other, one)
        if high.data_ptr() >= low.data_ptr() + (low.shape[0] - 1) * low.stride(0) + low.shape[1]:
            continue
        if same_blocks(one, other):
            raise ConfigurationError(f"the {one_name} and the {other_name} are the same memory; declare it once")
        if not _interleave(low, high):
            raise ConfigurationError(f"the {one_name} and the {other_name} share bytes; parts must lie apart")


def same_blocks(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two parts, uint8 [blocks, bytes], are the same memory."""
    return (one.data_ptr(), one.stride(), one.shape) == (other.data_ptr(), other.stride(), other.shape)


def _interleave(low: torch.Tensor, high: torch.Tensor) -> bool:
    """Whether each block of `high` lies in a gap of `low`. False for unequal strides."""
    stride = low.stride(0)
    shift = (high.data_ptr() - low.data_ptr()) % stride
    return high.stride(0) == stride and low.shape[1] <= shift and shift + high.shape[1] <= stride


def side_by_side(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join parts that follow each other in every block."""
    joined = [parts[0]]
    for part in parts[1:]:
        last = joined[-1]
        follows = part.data_ptr() == last.data_ptr() + last.shape[1] and part.stride(0) == last.stride(0)
        if follows and part.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
            joined[-1] = last.as_strided((last.shape[0], last.shape[1] + part.shape[1]), last.stride())
        else:
            joined.append(part)
    return joined
