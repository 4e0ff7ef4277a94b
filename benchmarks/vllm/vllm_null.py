"""A connector that offers the same hits and copies nothing: a lower bound of times. The engine's answers are wrong."""

from collections.abc import Mapping
from typing import Any

from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.messages import StepMetadata, WorkerReports
from cpu_prefix_cache.deciding import RankReport


class NullCopies:
    """A worker half that reports every copy as done at once."""

    def __init__(self, rank: int, host_blocks: int) -> None:
        self._rank, self._host_blocks = rank, host_blocks
        self._done: set[int] = set()
        self._received: set[str] = set()
        self._timed: int | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        pass

    def begin(self, metadata: StepMetadata) -> None:
        self._timed = metadata.timed
        self._received |= set(metadata.requests.values())
        self._done = {id for id in self._done if id >= metadata.plan.resolved_below} - set(metadata.plan.resolved)
        self._done |= {transfer.id for transfer in metadata.plan.transfers}

    def results(self) -> tuple[set[str], set[str]]:
        received, self._received = self._received, set()
        return received, set()

    def reports(self) -> WorkerReports:
        report = RankReport(self._rank, frozenset(self._done), ready_blocks=self._host_blocks)
        return WorkerReports((report,), self._timed, prepared=(self._rank,))

    def take_stats(self) -> None:
        return None

    def close(self) -> None:
        pass


class NullConnector(CPUPrefixCacheConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker is not None:
            planner, settings = self._settings.planner, self._settings
            self.worker.close()
            self.worker = NullCopies(vllm_config.parallel_config.rank, settings.host_bytes // planner.host_block_bytes)
