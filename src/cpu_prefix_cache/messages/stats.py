"""Snapshots of what a pool and a cache hold and have done. Counts of blocks, chunks and bytes; no rates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Blocks by state: `free + writing + cached + retired == ready <= capacity`, after every operation (rule 1)."""

    capacity: int
    ready: int
    free: int = 0
    writing: int = 0
    cached: int = 0
    retired: int = 0
    pinned: int = 0  # chunks somebody holds a pin on
    protected: int = 0  # cached blocks that these pins keep from eviction, at most: what two protect may count twice
    evictions: int = 0  # chunks and checkpoints evicted so far
    unused_chunks: int = 0  # of these: chunks that no request was given while they were here, nor anything below them
    unused_checkpoints: int = 0  # and checkpoints


@dataclass(frozen=True, slots=True)
class HintStatistics:
    """Admitted requests with a hint of their next use (next_use.py). Only the policy `adaptive` uses what it says."""

    accepted: int = 0
    clipped: int = 0  # used as the nearest that can be used
    malformed: int = 0  # not used


NO_HINTS = HintStatistics()


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A cache at one moment: its pool now, and counts since it was built. What it does not count is 0."""

    pool: PoolStatistics
    running: int = 0  # requests admitted and not yet finished or preempted
    storing: int = 0  # transfers planned or moving
    loading: int = 0
    hit_tokens: int = 0  # that admitted requests were given by loads, whatever became of these
    chunks_stored: int = 0
    checkpoints_stored: int = 0
    chunks_loaded: int = 0
    bytes_stored: int = 0  # on each rank, like all bytes here
    bytes_loaded: int = 0
    stores_failed: int = 0  # transfers that a rank reported as such
    loads_failed: int = 0  # late ones, and those whose source was gone, too; not those that a reset cancelled
    store_refusals: int = 0  # times a chunk was not stored because the pool was full of pinned and unfinished ones
    store_declined: int = 0  # times a chunk was not stored: not worth the room to the policy, or held back
    store_cancelled: int = 0  # times a chunk was not stored: its transfer or that of its parent failed, or a reset came
    store_unfit: int = 0  # times a chunk was not stored: it, or one above it, has bytes that do not fit their codec
    union_misses: int = 0  # prompts that device and host together could have resumed later than either alone
    lost_before_store: int = 0  # lazy: chunks that the device evicted before they could be stored, counted late
    remembered: int = 0  # chunks whose parent the cache remembers for the lazy walk
    work: int = 0  # chunks looked at by the deciding half: the cost that rule 16 bounds
    hints: HintStatistics = NO_HINTS


@dataclass(frozen=True, slots=True)
class KeeperStatistics:
    """A keeper at one moment: its pool and its engines now, and counts since it was started."""

    pool: PoolStatistics
    engines: int
    leases: int
    writes: int
    questions: int  # that were answered
    asked_chunks: int  # of their prompts
    hit_chunks: int  # of these, those that were leased: a request could resume after them
    tier_hit_chunks: int  # and of these, those beyond what was here when the tier below began to be read
    stored: int  # chunks and checkpoints


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """The tier below host memory. In `cache` its blocks are slots, its stores demotions, and its loads promotions."""

    cache: CacheStatistics
    # opening: what was there before is taken in, and nothing is written; open; read_only: writes fail; paused: reads
    # fail, or it hangs
    state: str
    mode: str  # lazy or eager
    refused: int  # slots that did not hold what they should: misses
    unsaved: int  # chunks that left the host before they could be written
    found: int  # chunks taken in after a restart, or by the answer of a shared store
    read_bytes_per_second: float | None  # of the slowest rank; None: not measured yet
    hit_tokens: int = 0  # that admitted requests loaded from the host because the tier had them
    asked: int = 0  # requests that waited for a promotion
    late: int = 0  # of these, those whose deadline passed first
    questions: int = 0  # requests for which a shared store was queried
    unanswered: int = 0  # of these, those that it did not answer in time
    declined: int = 0  # requests for which the tier had more, and reading it would have taken longer than computing
    read_ahead: int = 0  # prompts that hints expected, and that the tier was read for
    read_seconds: float = 0.0  # in which something was being read on this rank; known only where both halves are
    write_seconds: float = 0.0
    kept: int = 0  # values with wrong bytes that this rank left in a shared store: too many came wrong
