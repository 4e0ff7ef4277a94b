"""A tier in files: each owner has a slab in the engine's folder.

After a reset a mark is left in the folder of a rank. Weights may have been replaced then, in place, and nothing says by
which. So after the next start nothing of before is served: what was written before the reset, nor after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.tier.namespace import RankNamespace
from connector.tier.settings import RankPart, TierSettings
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab.durable import write_durably
from cpu_prefix_cache.slab.folder import check_path, rank_folder
from cpu_prefix_cache.slab.manifest import read_manifest
from cpu_prefix_cache.slab.namespace import Namespace, Value
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.sizing import num_slots

if TYPE_CHECKING:
    from connector.tier.owner import Owner

MARK = "was-reset"


@dataclass(frozen=True)
class FileTierSettings(TierSettings):
    """`root` is the path that the operator gave, and exists; `said.path` is in it."""

    said: FileTier
    root: str

    def num_slots(self, slot_bytes: int, host_blocks: int) -> int:
        """The ranks begin first and make their folders, which keep what they have: so the scheduler finds the number
        that the ranks have agreed on.
        """
        self._make_folder()
        return num_slots(self.said, self.namespace, slot_bytes, self.owners, host_blocks)

    def cache_options(self) -> Mapping[str, Any]:
        return {"below_offload": self.said.offload}

    def open(self, own: Mapping[str, Value], part: RankPart) -> "Owner":
        from connector.tier.owner import Owner
        from cpu_prefix_cache.slab.rank_tier import RankTier
        from cpu_prefix_cache.slab.slab import Slab

        self._make_folder()
        namespace = RankNamespace.of(self.namespace, own)
        _check_same(rank_folder(self.said.path, namespace, part.number, self.owners), namespace)
        sizes = {"slots": part.slots, "slot_bytes": part.region.shape[1], "nbytes": self.said.nbytes}
        slab = Slab(self.said.path, namespace, rank=part.number, ranks=self.owners, **sizes)
        mark = Path(slab.folder) / MARK
        if mark.exists():
            slab.advance(slab.next_generation)
            slab.keep()
            mark.unlink()
        slab.mark_resets(partial(write_durably, mark, b""))
        tier = RankTier.of_slab(slab, part.region, part.pieces, part.rank)
        return Owner(tier, part.region, part.absent)

    def __str__(self) -> str:
        return f"a tier of {self.said.nbytes / 2**30:,.1f} GiB in {self.said.path}"

    def _make_folder(self) -> None:
        """That of this engine, in the path that exists. Raises ConfigurationError."""
        check_path(self.root)
        Path(self.said.path).mkdir(mode=0o700, exist_ok=True)


def _check_same(folder: Path, namespace: Namespace) -> None:
    """Raise ConfigurationError if the folder's bytes lie in another order than this rank's."""
    there = read_manifest(folder)
    before = {} if there is None else there.get("namespace", {})
    for name, value in namespace.fields if there is not None else ():
        if before.get(name) != value:
            raise ConfigurationError(
                f"{folder} was written with {name} {before.get(name)!r}, and this rank has {value!r}; delete the "
                "folder, or give the tier another path"
            )
