"""How many slots a tier in files has: known from its configuration alone, before any disk has been looked at."""

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.tier import SLOTS_BY_HOST
from cpu_prefix_cache.slab import records

SMALL_FILES_BYTES = 64 << 10  # of a rank: lock, manifest, generations, folders


def num_slots(nbytes: int, slot_bytes: int, ranks: int, host_blocks: int) -> int:
    """The slots of each rank, of `nbytes` for all. Raises ConfigurationError when they are fewer than twice the host
    blocks, with the least size that would do.
    """
    slots = (nbytes - ranks * SMALL_FILES_BYTES) // (ranks * (slot_bytes + records.SIZE))
    if slots < SLOTS_BY_HOST * host_blocks:
        raise ConfigurationError(
            f"a tier of {nbytes} bytes has {max(0, slots)} slots on each of {ranks} ranks; the host has "
            f"{host_blocks} blocks, so give the tier at least "
            f"{bytes_of(SLOTS_BY_HOST * host_blocks, slot_bytes, ranks)} bytes, or do without it"
        )
    return slots


def bytes_of(slots: int, slot_bytes: int, ranks: int) -> int:
    """Bytes that so many slots on each rank take on the disk, at most."""
    return ranks * (slots * (slot_bytes + records.SIZE) + SMALL_FILES_BYTES)
