"""The copying half, for the ranks of an engine of several processes, and for who puts something around a copier.

A connector's worker imports it: the host region of a rank (`HostArena`, or one that ranks share), the layout of the
engine's tensors as parts, `choose_copier`, `CopyWorker`, the tier of the rank while it opens, and the engine's part in
the pool of a node (`JoinedPool`). It imports torch.
"""

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.choose import ChosenCopier, choose_copier
from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.limits import check_fits
from cpu_prefix_cache.memory.mapping import make_shared, map_shared
from cpu_prefix_cache.memory.parts import (
    Part,
    Role,
    block_bytes,
    blocks_first,
    canonical,
    same_blocks,
    spelled,
)
from cpu_prefix_cache.memory.shared_file import OfferedFile, take_file
from cpu_prefix_cache.model.planner import ALIGNMENT, PAGE_BYTES
from cpu_prefix_cache.node.joined_pool import JoinedPool
from cpu_prefix_cache.slab.opening import OpeningTier
from cpu_prefix_cache.slab.tier_copier import SlotStatistics

__all__ = [
    "ALIGNMENT",
    "ChosenCopier",
    "Copier",
    "CopyWorker",
    "EarlyEnds",
    "Event",
    "HostArena",
    "JoinedPool",
    "OfferedFile",
    "OpeningTier",
    "PAGE_BYTES",
    "Part",
    "Passed",
    "Role",
    "SlotStatistics",
    "block_bytes",
    "blocks_first",
    "canonical",
    "check_fits",
    "choose_copier",
    "make_shared",
    "map_shared",
    "same_blocks",
    "spelled",
    "take_file",
]
