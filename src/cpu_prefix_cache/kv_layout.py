"""How an engine's KV lies in its tensors, in words an engine has: given to a HostCache once.

    Prefix(keys_and_values(kv, block_dim=2), block_tokens=16)          kv [2, layers, blocks, 16, heads, width]
    Prefix(keys_and_values(*layers, block_dim=1), block_tokens=16)     each [2, blocks, 16, heads, width]
    Prefix(latents(*layers, block_tokens=64), block_tokens=64)         MLA, each [blocks * 64, width]
    Window(keys_and_values(...), block_tokens=16, window_tokens=1024)
    ChunkLocal(keys_and_values(...), block_tokens=16, window_tokens=8192)
    State(states(*layers), block_tokens=256)                           each [slots, ...]
    KVGroup(group, parts)                                              for an engine that has a Group and its Parts

Only the functions touch tensors, and only their shapes: no byte is read or copied here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import check_whole
from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, PrefixGroup, StateGroup, WindowGroup

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.memory.parts import Part, Role

Parts = Sequence["Part"]


class KVGroup:
    """A group of layers that share a block table, and the parts of their KV on this rank; `spelled` names them.

    Raises ConfigurationError when there are no parts, one comes twice, two share memory, or parts that were divided
    into blocks have others than the group, or the group's codec is not for them.
    """

    def __init__(self, group: Group, parts: Parts) -> None:
        from cpu_prefix_cache.memory.parts import canonical, spelled

        _check(group.name, parts)
        for part in parts:
            if part.block_tokens is not None and part.block_tokens * group.device_blocks != group.block_tokens:
                raise ConfigurationError(
                    f"the {part} has blocks of {part.block_tokens} tokens, and group {group.name!r} has block_tokens="
                    f"{group.block_tokens}: give both the tokens of a block"
                )
        for part in parts:
            group.form.check(str(part), part.content, part.rows.shape[1])
        self.group, self.parts, self.tensors, self.spelled = group, parts, canonical(parts), spelled(parts)
        self.num_blocks = min(part.rows.shape[0] for part in parts)
        self.part_layers = sorted(part.layer for part in parts)  # of the tensors
        self.layers = sorted(set(self.part_layers))


# Below, `options` are other fields of the group; the bytes of a block are those of the parts.


class Prefix(KVGroup):
    """Full attention, MLA: every block before a boundary is needed."""

    def __init__(self, parts: Parts, *, block_tokens: int, name: str = "attention", **options: Any) -> None:
        super().__init__(_group(PrefixGroup, parts, name, block_tokens, **options), parts)


class Window(KVGroup):
    """Sliding-window attention: a token sees `window_tokens` tokens, itself included."""

    def __init__(
        self, parts: Parts, *, block_tokens: int, window_tokens: int, name: str = "window", **options: Any
    ) -> None:
        group = _group(WindowGroup, parts, name, block_tokens, window_tokens=window_tokens, **options)
        super().__init__(group, parts)


class ChunkLocal(KVGroup):
    """Chunked-local attention: a token sees those of its local chunk; chunks of `window_tokens` tokens."""

    def __init__(
        self, parts: Parts, *, block_tokens: int, window_tokens: int, name: str = "chunk-local", **options: Any
    ) -> None:
        group = _group(ChunkLocalGroup, parts, name, block_tokens, window_tokens=window_tokens, **options)
        super().__init__(group, parts)


class State(KVGroup):
    """Mamba, linear attention: the state at a boundary is needed. States are kept every `block_tokens` tokens."""

    def __init__(self, parts: Parts, *, block_tokens: int, name: str = "state", **options: Any) -> None:
        super().__init__(_group(StateGroup, parts, name, block_tokens, **options), parts)


def check_layout(groups: Sequence[KVGroup], num_blocks: int) -> None:
    """Raise ConfigurationError unless the groups have the blocks of a device that hands out `num_blocks`.

    One more is right, a null block; still more also, unless another dimension has as many as are right.
    """
    check_groups(groups)
    for group in groups:
        for part in group.parts:
            blocks, named = part.rows.shape[0], f"the {part} of group {group.group.name!r}"
            if blocks < num_blocks:
                raise ConfigurationError(
                    f"{named} has {blocks} blocks, but the device hands out {num_blocks}: give block_dim the dimension "
                    f"of the blocks, and the device as many as all tensors have; others are {list(part.beside)}"
                )
            right = (num_blocks, num_blocks + 1)
            if blocks not in right and (likelier := [size for size in part.beside if size in right]):
                raise ConfigurationError(
                    f"{named} has {blocks} blocks, but the device hands out {num_blocks}, and another dimension is of "
                    f"size {likelier[0]}: give block_dim the dimension of the blocks"
                )


def check_groups(groups: Sequence[KVGroup]) -> None:
    """Raise ConfigurationError for what is no list of groups, and for none."""
    if not isinstance(groups, Sequence) or not groups or not all(isinstance(each, KVGroup) for each in groups):
        raise ConfigurationError(
            f"groups are a list of Prefix, Window, ChunkLocal, State or KVGroup, one for each table, got {groups!r}"
        )


def keys_and_values(*tensors: "torch.Tensor", block_dim: int, kv_dim: int = 0) -> Parts:
    """K and V in one tensor: `kv_dim` is that of K and V, `block_dim` that of the blocks; others before it are layers.

    One tensor for all layers, or one for each.

    Raises ConfigurationError when `kv_dim` is not a dimension of size 2, or `block_dim` is none at all.
    """
    from cpu_prefix_cache.memory.parts import Role, check_tensor

    parts: list[Part] = []
    for tensor in tensors:
        check_tensor(tensor)
        if not 0 <= block_dim < tensor.ndim:
            raise ConfigurationError(f"{tuple(tensor.shape)} has no dimension block_dim={block_dim}; count from 0")
        if not 0 <= kv_dim < tensor.ndim or kv_dim == block_dim or tensor.shape[kv_dim] != 2:
            raise ConfigurationError(f"dimension kv_dim={kv_dim} of {tuple(tensor.shape)} is not that of K and V")
        first = len(parts) // 2
        for role, half in zip((Role.KEY, Role.VALUE), tensor.unbind(kv_dim), strict=True):
            beside = tuple(size for at, size in enumerate(tensor.shape) if at not in (block_dim, kv_dim))
            parts += _parts(first, role, half, block_dim - (kv_dim < block_dim), beside)
    return parts


def latents(*tensors: "torch.Tensor", block_tokens: int) -> Parts:
    """MLA: [tokens, ...] for each layer, where a block is `block_tokens` rows.

    Raises ConfigurationError when the rows are not blocks, or the bytes of a block do not lie together.
    """
    from cpu_prefix_cache.memory.parts import Role, blocks_first, check_tensor

    check_whole("block_tokens", block_tokens, least=1)
    parts: list[Part] = []
    for layer, tensor in enumerate(tensors):
        check_tensor(tensor)
        num_blocks, rest = divmod(tensor.shape[0], block_tokens)
        if not num_blocks or rest:
            raise ConfigurationError(
                f"the {tensor.shape[0]} rows of layer {layer} are no blocks of {block_tokens} tokens; give the rows "
                "that are blocks, and no others"
            )
        part = blocks_first(layer, Role.LATENT, tensor.view(num_blocks, block_tokens, *tensor.shape[1:]))
        parts.append(replace(part, block_tokens=block_tokens))
    return parts


def states(*tensors: "torch.Tensor") -> Parts:
    """Mamba, linear attention: [slots, ...] for each layer."""
    from cpu_prefix_cache.memory.parts import Role, blocks_first

    return [blocks_first(layer, Role.STATE, each) for layer, each in enumerate(tensors)]


def _check(name: str, parts: Parts) -> None:
    from cpu_prefix_cache.memory.parts import Part

    if not isinstance(parts, Sequence) or not all(isinstance(each, Part) for each in parts):
        raise ConfigurationError(
            f"group {name!r} needs parts, made of its tensors by keys_and_values, latents or states; got {type(parts)}"
        )
    if not parts:
        raise ConfigurationError(f"group {name!r} has no parts: give it the tensors of its layers")


def _group(kind: type[Group], parts: Parts, name: str, block_tokens: int, **options: Any) -> Group:
    _check(name, parts)  # first, because a Group of no bytes is refused in other words
    block_bytes = sum(part.rows.shape[1] for part in parts)
    return kind(name=name, block_tokens=block_tokens, block_bytes=block_bytes, **options)


def _parts(
    first: int, role: "Role", tensor: "torch.Tensor", block_dim: int, beside: tuple[int, ...]
) -> "Iterator[Part]":
    from cpu_prefix_cache.memory.parts import blocks_first

    for at, layer in enumerate(_layers(tensor, block_dim)):
        yield replace(blocks_first(first + at, role, layer), beside=beside)


def _layers(tensor: "torch.Tensor", block_dim: int) -> "Iterator[torch.Tensor]":
    """Views [blocks, ...], one for each index of the dimensions before `block_dim`."""
    if not block_dim:
        yield tensor
        return
    for each in tensor.unbind(0):
        yield from _layers(each, block_dim - 1)
