"""What both halves know of the tier: where it is, whose bytes it holds, and how many slots it has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig

from connector.vllm.tier_namespace import engine_namespace
from connector.vllm.tier_options import tier_of
from cpu_prefix_cache import HybridChunkPlanner
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

    @classmethod
    def of(
        cls, option: Any, vllm_config: VllmConfig, planner: HybridChunkPlanner, hash_tokens: int, slabs: int
    ) -> "TierSettings":
        """Raises ConfigurationError."""
        said = tier_of(option, vllm_config)
        return cls(said, option["path"], engine_namespace(said, planner, vllm_config, hash_tokens, slabs), slabs)

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
