"""FileTier: a tier in files, as a user describes it. Knows no torch, like `tier.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import is_whole
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.slab.sizing import num_slots
from cpu_prefix_cache.slab.tier import RankPart, Tier, check_option

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.model.planner import Piece
    from cpu_prefix_cache.slab.namespace import Namespace
    from cpu_prefix_cache.slab.rank_tier import RankTier

FILE = "file"


@dataclass(frozen=True, slots=True)
class FileTier(Tier):
    """`bytes` bytes on disk under the folder `path`, for all ranks of this machine together. What other models or
    releases have left there gives up its room, unless `keep_others`. The other options are those of every Tier.

    Raises ConfigurationError.
    """

    path: str
    bytes: int
    keep_others: bool = field(default=False, kw_only=True)
    engine: int = field(default=0, kw_only=True)  # of those with this path: each above 0 has a folder of its own there

    def __post_init__(self) -> None:
        check_text("path of a tier", self.path)
        check_option("bytes", self.bytes, is_whole(self.bytes, 1), "a whole number of bytes, at least 1")
        check_option("keep_others", self.keep_others, type(self.keep_others) is bool, "true or false")
        Tier.__post_init__(self)

    @property
    def folders(self) -> tuple[str, ...]:
        """Below `path`, one in the other, in which the folders of models are."""
        return (f"engine-{self.engine}",) if self.engine else ()

    @property
    def folder(self) -> str:
        """The last of them, for people."""
        return "/".join((self.path, *self.folders))

    def of_engine(self, number: int) -> Self:
        return replace(self, engine=number)

    def slots(self, slot_bytes: int, host_blocks: int, owners: int = 1) -> int:
        return num_slots(self.bytes, slot_bytes, owners, host_blocks)

    def open(
        self, namespace: "Namespace", region: "torch.Tensor | memoryview", pieces: "Sequence[Piece]", part: RankPart
    ) -> "RankTier":
        """The first rank reports the slots from before: what another one has lost is refused when it is read."""
        from cpu_prefix_cache.slab.folder import Folder
        from cpu_prefix_cache.slab.rank_tier import RankTier
        from cpu_prefix_cache.slab.scan import RestartScan
        from cpu_prefix_cache.slab.slab import Slab, unlocked_on_failure

        slab = Slab(Folder(self, namespace, part, region.nbytes // len(region)))
        with unlocked_on_failure(slab):
            source = None if part.rank else RestartScan(slab, pieces)
            return RankTier(slab, region, pieces, part.rank, source, part.stall_seconds)

    def __str__(self) -> str:
        return f"a tier of {self.bytes / 2**30:,.1f} GiB in {self.folder}"


def parse_file_tier(text: str) -> FileTier:
    """The tier that "file:PATH:SIZE" names. Raises ConfigurationError.

    >>> parse_file_tier("file:/nvme/kv:1.5GiB").bytes
    1610612736
    """
    kind, _, rest = text.partition(":")
    if kind != FILE:
        got = repr(kind) if rest and kind.isalpha() else "in a text"  # any other part of a URL may be of a password
        raise ConfigurationError(
            f"unknown kind of tier {got}; known is file, as in file:/nvme/kv:64GiB, and the URL of a store has ://"
        )
    path, _, size = rest.rpartition(":")
    if not path:
        raise ConfigurationError(f"a file tier is given as file:PATH:SIZE, such as file:/nvme/kv:64GiB; got {text!r}")
    return FileTier(path, parse_bytes(size))
