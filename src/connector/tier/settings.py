"""What both halves know of the tier: where it is, whose bytes it holds, and how many slots it has."""

from dataclasses import dataclass
from pathlib import Path

from cpu_prefix_cache.slab.folder import check_path
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.sizing import num_slots


@dataclass(frozen=True)
class TierSettings:
    """`root` is the path that the operator gave, and exists; `said.path` is in it. There are `slabs` slabs."""

    said: FileTier
    root: str
    namespace: Namespace
    slabs: int

    def num_slots(self, slot_bytes: int, host_blocks: int) -> int:
        """Of each slab. The ranks begin first and make their folders, which keep what they have: so the scheduler
        finds the number that the ranks have agreed on.
        """
        self.make_folder()
        return num_slots(self.said, self.namespace, slot_bytes, self.slabs, host_blocks)

    def make_folder(self) -> None:
        """That of this engine, in the path that exists. Raises ConfigurationError."""
        check_path(self.root)
        Path(self.said.path).mkdir(mode=0o700, exist_ok=True)
