"""Facts on which both sides of the connector must agree: the groups of a model's KV, and the bytes of their blocks.

ATOM gives the scheduler side its config alone, which has no bytes. The ranks see the tensors (`tensors.py`), and report
the bytes of a block of each group once, as the operation of a completion on this connector's channel. ATOM joins the
reports of all ranks only if they are equal.

    dense (MHA, GQA, MLA, with or without an indexer)    pages           one prefix group
    pages and slots (DeepSeek-V4)                        pages, slots    a prefix group, and a state group for each unit

No group has a lookahead, with a drafter neither: ATOM reuses the last block of a hit as it is, and so do we.

A block has the tokens of ATOM's own hash block: `kv_cache_block_size` on each of the ranks that share a context. ATOM
copies a slot into *units*, ordinary blocks (states.py). How many only the scheduler side knows, so each unit is a group
with the bytes of a page: host blocks are the same for any number of them, and ranks copy them all as one group.
"""

from collections.abc import Sequence
from typing import Protocol

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import RAW, Group, GroupCopy, HybridChunkPlanner, PrefixGroup, StateGroup, StepPlan

CHANNEL = "cpu_prefix_cache"
PAGES, UNITS = 0, 1  # on the ranks: the groups of pages and of all units
_REPORT = "block bytes"


class Config(Protocol):
    """Part of ATOM's `Config` that is read here."""

    @property
    def kv_cache_block_size(self) -> int: ...

    @property
    def decode_context_parallel_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def block_tokens(config: Config) -> int:
    """The tokens of one block of a request's block table, over the ranks that share a context."""
    return config.kv_cache_block_size * config.decode_context_parallel_size


def groups(config: Config, block_bytes: Sequence[int], units: int = 1, codec: str = RAW) -> tuple[Group, ...]:
    """The groups of a model whose blocks take `block_bytes` on each rank: of a page, and of a slot if there are slots.

    A state takes so many `units`. Raises ConfigurationError for other numbers of bytes than one or two.
    """
    if len(block_bytes) not in (1, 2):
        raise ConfigurationError(f"a model has pages, or pages and slots; got the bytes of {len(block_bytes)} groups")
    tokens, page = block_tokens(config), block_bytes[PAGES]
    states = range(units if len(block_bytes) > 1 else 0)
    return (
        PrefixGroup(name="pages", block_tokens=tokens, block_bytes=page, codec=codec),
        *(StateGroup(name=f"unit {at} of a state", block_tokens=tokens, block_bytes=page) for at in states),
    )


def planner(
    config: Config, block_bytes: Sequence[int], units: int = 1, *, in_pages: bool = False, codec: str = RAW
) -> HybridChunkPlanner:
    """The planner of the scheduler side, and with one unit the shapes of the copiers of all ranks."""
    return HybridChunkPlanner(
        groups(config, block_bytes, units, codec),
        max_model_len=config.max_model_len,
        grid_tokens=block_tokens(config),
        in_pages=in_pages,
    )


def for_ranks(plan: StepPlan) -> StepPlan:
    """The plan with all units in one group."""
    return plan._replace(transfers=tuple(each._replace(copies=_joined(each.copies)) for each in plan.transfers))


def _joined(copies: Sequence[GroupCopy]) -> tuple[GroupCopy, ...]:
    pages = tuple(copy for copy in copies if copy.group == PAGES)
    units = [copy for copy in copies if copy.group != PAGES]
    if not units:
        return pages
    host = tuple(block for copy in units for block in copy.host_blocks)
    device = tuple(block for copy in units for block in copy.device_blocks)
    return (*pages, GroupCopy(UNITS, host, device))


def as_operation(block_bytes: Sequence[int]) -> str:
    """A rank's report of the bytes of its blocks, as the operation id of a completion.

    >>> as_operation([2097152, 65536])
    'block bytes 2097152 65536'
    """
    return " ".join([_REPORT, *map(str, block_bytes)])


def block_bytes_of(operation: object) -> tuple[int, ...] | None:
    """The bytes that an operation id reports; None if it is of a transfer.

    >>> block_bytes_of("block bytes 2097152 65536"), block_bytes_of(7)
    ((2097152, 65536), None)
    """
    if not isinstance(operation, str) or not operation.startswith(_REPORT):
        return None
    return tuple(map(int, operation.removeprefix(_REPORT).split()))
