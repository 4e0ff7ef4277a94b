"""Messages between the two halves of a tier below host memory: plain data, like those of `plan.py`.

A tier has *slots*, each as large as a host block. Its transfers are those of a cache whose device is the host pool: in
their GroupCopies `device_blocks` are host blocks and `host_blocks` are slots, one for each, and `labels` say what a
slot holds. Bytes outlive a process, so nothing is served that its record does not label in the same way.

Contents of a store that several machines share are unknown before a query: an `Ask` goes out with a plan, and
the store's answer comes back with a report.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from cpu_prefix_cache.messages.plan import Label, RankReport, StepPlan

KEY_BYTES = 32  # of keys whose bytes outlive the process: digests by which nobody finds another text (rule 14)
READ_BYTES = 32 << 20  # at most, of one read: a slice for each of a rank's threads, and soon committed
SLOTS_BY_HOST = 2  # a tier has at least so many slots to a host block: a smaller one holds little but what the host has


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of a tier of `slots` slots for the cache above it.

    `offload` and `policy` are the tier's own. Offload None: "eager" for a large tier, and where the host's policy is
    not LRU, because then lazy cannot tell in time what the host evicts next. With `ask_seconds` the tier is a store
    that others write, too: so long a request waits for its answer, and `slots` is how many blocks of it are remembered.
    """

    slots: int
    offload: str | None = None
    policy: str = "lru"
    ask_seconds: float | None = None


class Ask(NamedTuple):
    """Which of these chunks of one prompt does the store have, and which pieces of checkpoints in them?

    `keys` are those of the chunks after the first `depth` ones, each of `grid_tokens` tokens. A query without keys asks
    only whether the store answers.
    """

    id: int
    keys: tuple[bytes, ...] = ()
    depth: int = 0
    grid_tokens: int = 1


class Told(NamedTuple):
    """Answer to an Ask: the number of leading `chunks` that exist, and the `pieces` of checkpoints in them, each as the
    key of its chunk, its group and its number in the chunk. Not `ok`: the query failed.
    """

    id: int
    ok: bool
    chunks: int = 0
    pieces: tuple[tuple[bytes, int, int], ...] = ()


class TierPlan(NamedTuple):
    """Work of every rank with its tier in one engine step. Follows the step's other transfers.

    Records of generations below `first_generation` are never served again, also after a restart; what is shared from
    it on is of `revision`, or of a revision that nobody else has (None). `taken` is how many
    portions of what the restart has found were taken in. Nobody waits for answers to asks below `told_below`.
    """

    step: StepPlan
    first_generation: int = 0
    taken: int = 0
    asks: tuple[Ask, ...] = ()
    told_below: int = 0
    revision: str | None = None


class Found(NamedTuple):
    """A chunk, or a piece of a checkpoint, that a tier holds from before a restart.

    `label` is that of its first slot; `slots` are all of them, in the order of groups and places.
    """

    label: Label
    slots: tuple[int, ...]


class BlockName(NamedTuple):
    """Content of one host block, where an engine gives them out itself: `key` is a digest, `number` that of a group,
    which keeps something else under it.
    """

    key: bytes
    number: int = 0

    @property
    def spelled(self) -> bytes:
        return self.key + self.number.to_bytes(1, "little")

    @classmethod
    def of(cls, spelled: bytes) -> Self:
        return cls(spelled[:-1], spelled[-1])


class TierReport(NamedTuple):
    """Report of the tier of one rank, cumulatively.

    No record of this rank has `next_generation` or a larger one when it opens. None: it is not open.

    What a restart has found comes in portions, the youngest last: portion number `portion` is `found`, repeated until a
    plan says it was taken in. With `is_scanned` it is the last one. `told` is repeated until nobody waits for it; asks
    with numbers below `heard` have come to this rank (None: not said).
    """

    transfers: RankReport
    next_generation: int | None = 0
    portion: int = 0
    found: tuple[Found, ...] = ()
    is_scanned: bool = False
    told: tuple[Told, ...] = ()
    heard: int | None = None

    @property
    def is_repeated(self) -> bool:
        """Whether something in it is repeated until a plan has answered it."""
        return bool(self.transfers.done or self.transfers.failed or self.found or self.told)
