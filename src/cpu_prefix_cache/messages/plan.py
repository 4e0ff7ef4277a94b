"""A StepPlan goes to every rank each step, and a RankReport comes back: plain data, which can be pickled.

They are named tuples because a step makes several of them: a frozen dataclass takes 0.3 us more.
"""

import enum
from typing import NamedTuple

VERSION = 4
CHUNK = -1  # of a label: a slot of a chunk, not of a checkpoint


class Direction(enum.Enum):
    STORE = "store"  # device to host
    LOAD = "load"  # host to device


class Label(NamedTuple):
    """Content of one slot of a tier below host memory (`tier.py`).

    `key` is that of the chunk; of a piece of a checkpoint, that of the chunk in which it lies. `parent` is the key of
    the chunk above, empty for a first chunk; of a piece, that of the chunk at whose end the checkpoint is. The slot is
    number `place` of the piece of `group`. `block` is CHUNK, or the number of the piece in its chunk.
    """

    key: bytes
    parent: bytes
    group: int
    place: int
    block: int
    generation: int


class GroupCopy(NamedTuple):
    """The blocks of one group in one transfer, piece by piece.

    With h host blocks and d device blocks to a piece, piece i is `host_blocks[i*h : (i+1)*h]` on the one side and
    `device_blocks[i*d : (i+1)*d]` on the other. In a tier below host memory there is a label for each host block.
    """

    group: int  # index into the planner's groups
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]
    labels: tuple[Label, ...] = ()


class TransferPlan(NamedTuple):
    """One transfer as the copying half sees it. `num_bytes` is what crosses the link, without padding.

    `failed` marks a load whose source was gone when it was planned: it copies nothing and is reported as failed, like
    any other failure (rule 7). `after` of a load names the stores that read the device blocks which it overwrites: it
    begins when they have ended, well or not, and a large one portion by portion. `after` of a store names the load that
    reads the host blocks which it overwrites, and it begins when that has ended. A plan has what is named before what
    names it, except where a load and stores of one plan name each other: they *exchange* blocks of one group, and go in
    portions. Piece by piece, the load has then read what a store overwrites before it overwrites what that piece of the
    store reads; else they fail.

    `holds_compute` marks a store that reads what the compute of its step overwrites, or a load that this compute reads.
    A transfer that `is_early` touches no device block that the compute of the step before uses, and need not wait for
    that.
    """

    id: int
    direction: Direction
    copies: tuple[GroupCopy, ...]
    num_bytes: int
    failed: bool = False
    after: tuple[int, ...] = ()
    holds_compute: bool = False
    is_early: bool = False


class StepPlan(NamedTuple):
    """Work of every rank in one engine step. `epoch` counts resets, for logs and metrics.

    A `cancelled` load that has not begun is reported as failed, one that has begun as it ends; both resolve as failed.
    Reports of transfers below `resolved_below`, and of those in `resolved`, need not be repeated.
    """

    epoch: int
    transfers: tuple[TransferPlan, ...]
    cancelled: tuple[int, ...] = ()
    resolved_below: int = 0
    resolved: tuple[int, ...] = ()
    version: int = VERSION


class RankReport(NamedTuple):
    """Transfers that one rank has finished so far, cumulatively: an id stays in here until a plan has it as resolved.

    `ready_blocks` is how many host blocks the rank can copy to and from; None: as before. `late` are loads past their
    deadline, which count as failed but may still write. `load_bytes_per_second` is measured; None: not yet. `unfit` has
    transfers that are done, by their ids, and blocks of the pool that do not hold what they should: of a store the
    first ones of pieces that did not fit their coded form, some perhaps of another store; of a tier's load the slots
    whose bytes do not match their labels.
    """

    rank: int
    done: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    ready_blocks: int | None = None
    late: frozenset[int] = frozenset()
    load_bytes_per_second: float | None = None
    unfit: tuple[tuple[int, tuple[int, ...]], ...] = ()
