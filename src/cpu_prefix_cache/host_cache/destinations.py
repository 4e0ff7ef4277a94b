"""Destinations of a load: the device blocks that an engine gives for it, in whichever form, as a list for each group.

Whatever they are, they would be held and written to. So their numbers are checked before anything is held; with
`strict` also that nobody else uses these blocks, which looks up each on the device.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any

from cpu_prefix_cache.keeper.kept_cache import KeptCache
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.numbers import is_integer, numbers
from cpu_prefix_cache.messages.request import Hit
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.prefix_cache import CPUPrefixCache

if TYPE_CHECKING:
    from cpu_prefix_cache.kv_layout import KVGroup


class Destinations:
    """The destinations of the loads of one cache. Every call raises MisuseError for what cannot be meant."""

    def __init__(
        self, cache: CPUPrefixCache | KeptCache, device: Device, groups: "Sequence[KVGroup]", *, strict: bool
    ) -> None:
        self._cache, self._device, self._strict = cache, device, strict
        self._names = [each.group.name for each in groups]
        self._num_blocks = [each.num_blocks for each in groups]

    def given(self, blocks: Any, hit: Hit) -> list[list[int]]:
        """Destinations among blocks that were allocated for this load."""
        return self._checked(self._by_group(blocks), hit)

    def check_found(self, keys: Sequence[bytes], hit: Hit, destinations: list[list[int]]) -> None:
        """A load has filled these, or its request has. Where the device finds a chunk in one of them, it must be one
        that the load has filled with this chunk: else the engine has them in another order.
        """
        planner = self._cache.planner
        chunks = range(planner.full_chunks(hit.start), min(planner.full_chunks(hit.boundary), len(keys)))
        filled = {at: list[int]() for at in chunks}
        for piece, blocks in zip(planner.pieces, destinations, strict=True):
            width = piece.device_blocks if piece.in_chunk else 0
            for number, at in enumerate(chunks):
                filled[at] += blocks[number * width : (number + 1) * width]
        own = set(chain.from_iterable(filled.values()))
        for at, blocks in filled.items():
            for block, found in zip(blocks, self._device.find(keys[at]) or (), strict=False):
                if found != block and found in own:
                    raise MisuseError(
                        f"chunk {at} was loaded into block {block}, but the device finds it in block {found}, which "
                        "another place has filled: allocate answers with blocks of [start, boundary), in token order"
                    )

    def _by_group(self, given: Any) -> list[list[Any]]:
        """A list for each group. With one group a plain list of blocks will do."""
        blocks, num_groups = _listed(given), len(self._names)
        if num_groups == 1 and (not blocks or isinstance(blocks[0], Integral)):
            return [blocks]
        if len(blocks) != num_groups or any(isinstance(each, Integral) for each in blocks):
            raise MisuseError(f"blocks are given as one list for each of {num_groups} groups, got {given!r}")
        return [_listed(each) for each in blocks]

    def _checked(self, by_group: list[list[Any]], hit: Hit) -> list[list[int]]:
        destinations = [
            _numbers(blocks, num_blocks, name)
            for blocks, num_blocks, name in zip(by_group, self._num_blocks, self._names, strict=True)
        ]
        self._cache.check_destinations(destinations, hit.start, hit.boundary)
        if self._strict:
            self._check_own(list(chain.from_iterable(destinations)))
        return destinations

    def _check_own(self, blocks: list[int]) -> None:
        # Requests that share a block that is not written yet may each load the same bytes into it.
        filling = {} if self._device.shares_unfinished else self._cache.filling()
        for block in blocks:
            if block in filling:
                raise MisuseError(
                    f"block {block} is being filled by the load of request {filling[block]!r}: give each load blocks "
                    "of its own, and hand out none again before end_step names the request or its holds end"
                )
        self._device.check_own(blocks)


def _listed(given: Any) -> list[Any]:
    listed: object = None
    with suppress(TypeError):
        listed = numbers(given)
    if not isinstance(listed, list):
        raise MisuseError(f"blocks are given as a list, a tensor or an array of their numbers, got {given!r}")
    return listed


def _numbers(blocks: list[Any], num_blocks: int, group: str) -> list[int]:
    if not set(map(type, blocks)) <= {int}:
        if odd := [block for block in blocks if not is_integer(block)]:
            raise MisuseError(f"blocks of group {group!r} are given by their numbers, got {odd[0]!r}")
        blocks = list(map(int, blocks))
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
        wrong = next(block for block in blocks if not 0 <= block < num_blocks)
        raise MisuseError(f"block {wrong} does not exist: the tensors of group {group!r} have 0 to {num_blocks - 1}")
    return blocks
