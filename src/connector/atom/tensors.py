"""Where ATOM keeps the bytes of a block: what it registers, as rows of contiguous bytes.

ATOM registers its KV twice: as tensors, named by layer, and as *regions*, addresses of what it sends to other
instances. Neither is complete:

    K and V, [blocks, heads, ...] in any packing        tensors and regions    a row for each block
    MLA, [blocks * tokens, 1, width]                    tensors and regions    as many rows as ATOM has blocks
    scales of fp8, index caches                         tensors and regions    a row for each block
    index caches of sparse MHA, scales of bf16          regions alone          taken by address
    pages of DeepSeek-V4                                regions alone          taken by address
    its slots, numbered from the end of their region    regions alone          rows; ATOM itself copies them into blocks
    recurrent states, [slots, ...]                      tensors alone          refused

So the parts of a page are the tensors, and the regions that no tensor covers. ATOM keeps the memory for as long as its
process lives, so views of it by address stay valid.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import Part, Role, canonical, spelled
from cpu_prefix_cache.deciding import RAW, codec_of


class Layer(Protocol):
    """Part of ATOM's `KVCacheTensor`: the tensors of one layer. Those that it lacks are None, or empty."""

    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    index_cache: torch.Tensor | None


class TransferRegion(Protocol):
    """Part of ATOM's `KVTransferRegion`: units of equal size, numbered from the start or from the end."""

    base_addr: int
    total_bytes: int
    unit_bytes: int
    reverse_indexed: bool
    semantic_role: str | None


class TransferRegions(Protocol):
    """Part of ATOM's `KVTransferTensors`. `swa_block_regions` is its name for the regions of whole slots."""

    block_regions: Sequence[TransferRegion]
    slot_regions: Sequence[TransferRegion]
    swa_block_regions: Sequence[TransferRegion]
    num_slots: int
    expected_full_slot_region_count: int | None


@dataclass(frozen=True, slots=True, eq=False)
class BoundTensors:
    """The tensors of pages for a copier, and of slots if there are any; what each takes, and what its bytes are."""

    tensors: tuple[tuple[torch.Tensor, ...], ...]
    spelled: tuple[str, ...]

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(sum(part.shape[1] for part in parts) for parts in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0][0].device


def bind(
    kv_caches: Mapping[str, Layer],
    transfer_tensors: TransferRegions | None,
    num_blocks: int,
    codec: str = RAW,
) -> BoundTensors:
    """The arguments of ATOM's `register_kv_caches`. `num_blocks` is the number of blocks that its scheduler hands out,
    `codec` that of pages.

    Raises ConfigurationError for KV that is not such blocks, not on one device, or not for the codec.
    """
    if num_blocks < 1:
        raise ConfigurationError(f"ATOM must have at least one block of KV, got {num_blocks}")
    pages = list(_named(kv_caches, num_blocks))
    device = _device_of(pages)
    slots: list[Part] = []
    if transfer_tensors is not None:
        regions = transfer_tensors.block_regions
        _check_all_are_regions(pages, regions)
        pages += _unnamed(pages, regions, num_blocks, device, first=len(kv_caches))
        slots = _slots(transfer_tensors, device)
    if not pages:
        raise ConfigurationError("ATOM has registered no KV: neither tensors nor block regions")
    for part in pages:
        codec_of(codec).check(str(part), part.content, part.rows.shape[1])
    kept = [parts for parts in (pages, slots) if parts]
    return BoundTensors(tuple(tuple(canonical(parts)) for parts in kept), tuple(map(spelled, kept)))


def _named(kv_caches: Mapping[str, Layer], num_blocks: int) -> Iterator[Part]:
    """The tensors of all layers. What layers share is kept once."""
    seen: set[tuple[int, int]] = set()
    for layer, (name, cache) in enumerate(kv_caches.items()):
        for role, tensor in _roles(cache):
            where = tensor.data_ptr(), tensor.nbytes
            if where not in seen:
                yield Part(layer, role, _rows(name, role, tensor, num_blocks), content=_content(tensor))
            seen.add(where)


def _roles(cache: Layer) -> list[tuple[Role, torch.Tensor]]:
    has_values = cache.v_cache is not None and cache.v_cache.numel() > 0
    named = {
        Role.KEY if has_values else Role.LATENT: cache.k_cache,
        Role.VALUE: cache.v_cache,
        Role.KEY_SCALE: cache.k_scale,
        Role.VALUE_SCALE: cache.v_scale,
        Role.INDEX: cache.index_cache,
    }
    return [(role, tensor) for role, tensor in named.items() if tensor is not None and tensor.numel()]


def _content(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"


def _rows(name: str, role: Role, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A tensor as uint8 [num_blocks, bytes], the same memory."""
    what = f"the {role.name.lower().replace('_', ' ')} of {name}, of shape {tuple(tensor.shape)}"
    if not tensor.is_contiguous():
        raise ConfigurationError(
            f"{what}, has strides {tensor.stride()}: the bytes of a block must lie together; register it contiguous"
        )
    if tensor.shape[0] % num_blocks:
        raise ConfigurationError(
            f"{what}, cannot be split into the {num_blocks} blocks of ATOM's scheduler. If it is a recurrent state, "
            "the model is not supported: its states are kept by slots and not in blocks"
        )
    return tensor.flatten().view(torch.uint8).view(num_blocks, -1)


def _device_of(parts: Sequence[Part]) -> torch.device:
    """The device of the tensors. Regions do not have theirs: without a tensor it is the one that ATOM computes on."""
    devices = {part.rows.device for part in parts}
    if len(devices) > 1:
        raise ConfigurationError(f"the KV of one rank must be on one device, but is on {sorted(map(str, devices))}")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_all_are_regions(parts: Iterable[Part], regions: Sequence[TransferRegion]) -> None:
    """Raise ConfigurationError for a tensor that ATOM itself does not send by blocks."""
    known = {(region.base_addr, region.total_bytes) for region in regions}
    for part in parts:
        if (part.rows.data_ptr(), part.rows.nbytes) not in known:
            raise ConfigurationError(
                f"the {part} is none of ATOM's block regions, so it is not indexed by blocks. If it is a recurrent "
                "state, the model is not supported: its states are kept by slots"
            )


def _unnamed(
    parts: Iterable[Part], regions: Sequence[TransferRegion], num_blocks: int, device: torch.device, first: int
) -> Iterator[Part]:
    """The regions that no tensor covers, as layers from `first` on."""
    covered = {(part.rows.data_ptr(), part.rows.nbytes) for part in parts}
    for at, region in enumerate(regions):
        if (region.base_addr, region.total_bytes) not in covered:
            yield _by_address(f"block region {at}", first + at, Role.LATENT, region, num_blocks, device)


def _slots(regions: TransferRegions, device: torch.device) -> list[Part]:
    """The slots, the last one first."""
    whole, count = regions.swa_block_regions, regions.expected_full_slot_region_count
    if regions.slot_regions:
        raise ConfigurationError(
            f"ATOM has registered {len(regions.slot_regions)} slot regions, and it is not known what they hold; "
            "whole slots are swa_block_regions"
        )
    if len(whole) != (count or 0) or bool(whole) != bool(regions.num_slots):
        raise ConfigurationError(
            f"ATOM has registered {len(whole)} regions of {regions.num_slots} slots where it expects {count}: requests "
            "would resume without part of their state"
        )
    return [
        _by_address(f"slot region {at}", at, Role.STATE, region, regions.num_slots, device, from_the_end=True)
        for at, region in enumerate(whole)
    ]


def _by_address(
    what: str,
    layer: int,
    role: Role,
    region: TransferRegion,
    units: int,
    device: torch.device,
    from_the_end: bool = False,
) -> Part:
    """A region of `units` blocks or slots, each of one or more of its own units."""
    numbers = region.base_addr, region.total_bytes, region.unit_bytes
    are_whole = all(isinstance(each, int) and each > 0 for each in numbers) and not region.total_bytes % units
    width = region.total_bytes // units
    if not are_whole or width % region.unit_bytes:
        raise ConfigurationError(
            f"{what}, {region.total_bytes} bytes at address {region.base_addr} in units of {region.unit_bytes}, "
            f"cannot be split into {units} equal parts of whole units"
        )
    if region.reverse_indexed != from_the_end:
        raise ConfigurationError(
            f"{what} is numbered from its {'end' if region.reverse_indexed else 'start'}, and the other regions of its "
            f"kind from their {'end' if from_the_end else 'start'}"
        )
    rows = _memory(region.base_addr, region.total_bytes, device).view(units, width)
    return Part(layer, role, rows, content=f"{region.semantic_role or 'bytes'}[{width}]")


def _memory(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that somebody else owns, as uint8 [bytes]. The same call for all of torch's devices."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
