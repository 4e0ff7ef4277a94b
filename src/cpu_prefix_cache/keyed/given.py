"""Blocks that an engine gives with keys: for each group those of the last of them, as many as it has.

keys          k0  k1  k2  k3
attention         7   9   4        of the last three
window                    2        of the last
state                              of none
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cpu_prefix_cache.keyed.key_planner import KeyPlanner
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.device import Device

Blocks = Sequence[int]


class Given(NamedTuple):
    """`chunks` keys, the last, have blocks of the prefix groups; of other groups `sides` has those of some last keys.

    `by_group` are the blocks as the engine gives them.
    """

    chunks: int
    sides: Mapping[int, Sequence[Blocks]]
    by_group: Sequence[Blocks]


def given(planner: KeyPlanner, num_keys: int, by_group: Sequence[Blocks]) -> Given:
    """The blocks of the last of so many keys. Raises MisuseError for what does not fit the groups."""
    if len(by_group) != len(planner.groups):
        raise MisuseError(f"blocks are one list for each of {len(planner.groups)} groups, got {len(by_group)} lists")
    counts = [_keys_of(planner, at, len(blocks), num_keys) for at, blocks in enumerate(by_group)]
    chunks = {counts[at] for at in planner.chunk_groups} or {max(counts)}
    if len(chunks) > 1:
        names = ", ".join(f"{planner.groups[at].name!r} {counts[at]}" for at in planner.chunk_groups)
        raise MisuseError(f"prefix groups have blocks of the same keys, but those of so many are given: {names}")
    sides = {at: _split(by_group[at], planner.blocks_of_key(at)) for at in planner.side_groups}
    return Given(chunks.pop(), sides, by_group)


def _keys_of(planner: KeyPlanner, at: int, num_blocks: int, num_keys: int) -> int:
    width = planner.blocks_of_key(at)
    keys, rest = divmod(num_blocks, width)
    if rest or keys > num_keys:
        raise MisuseError(
            f"group {planner.groups[at].name!r} has {width} blocks for each key, those of the last of {num_keys} keys; "
            f"got {num_blocks}"
        )
    return keys


def _split(blocks: Blocks, width: int) -> list[Blocks]:
    return [blocks[at : at + width] for at in range(0, len(blocks), width)]


class GivenBlocks(Device):
    """The device of an engine that gives blocks with their keys, and keeps them until the copy has ended: so nothing is
    held, and nothing is found but what a `put` under way has given.
    """

    def __init__(self, planner: KeyPlanner) -> None:
        self._planner = planner
        self._chunks: dict[bytes, Blocks] = {}
        self._sides: dict[bytes, Sequence[Blocks]] = {}

    def give(self, keys: Sequence[bytes], blocks: Given) -> None:
        """From now on `find` and `find_checkpoint` answer with these."""
        planner = self._planner
        widths = [planner.pieces[at].device_blocks for at in planner.chunk_groups]
        lists = [_split(blocks.by_group[at], width) for at, width in zip(planner.chunk_groups, widths, strict=True)]
        last = keys[len(keys) - blocks.chunks :]
        self._chunks = {key: [block for each in lists for block in each[number]] for number, key in enumerate(last)}
        self._sides = {
            planner.side_name(key, at): _split(side, planner.pieces[at].device_blocks)
            for at, sides in blocks.sides.items()
            for key, side in zip(keys[len(keys) - len(sides) :], sides, strict=True)
        }

    @property
    def num_blocks(self) -> int:
        return 0  # it hands out none

    @property
    def num_waiting(self) -> int:
        return 0

    def find(self, key: bytes) -> Blocks | None:
        return self._chunks.get(key)

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Blocks] | None:
        return self._sides.get(checkpoint.tail[-1])

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        return iter(())

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        return False

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> None:
        return None

    def release(self, hold: None) -> None:
        return None
