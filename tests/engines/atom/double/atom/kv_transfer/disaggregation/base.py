"""The two sides of a connector: one on every rank, one beside the scheduler."""

from abc import ABC, abstractmethod
from typing import Any

from .types import ConnectorMetadata, KVConnectorOutput


class KVConnectorBase(ABC):
    is_producer: bool

    @abstractmethod
    def register_kv_caches(
        self, kv_caches: dict[str, Any], transfer_tensors: Any = None, num_blocks: int | None = None
    ) -> None: ...

    @abstractmethod
    def start_load_kv(self, metadata: ConnectorMetadata) -> None: ...

    @abstractmethod
    def get_finished(self) -> tuple[set, set] | KVConnectorOutput: ...

    def get_finished_recv_blocks(self) -> list[int]:
        return []


class KVConnectorSchedulerBase(ABC):
    is_producer: bool

    @abstractmethod
    def get_num_new_matched_tokens(self, seq: Any) -> tuple[int, bool]: ...

    @abstractmethod
    def build_connector_meta(self) -> ConnectorMetadata: ...

    @abstractmethod
    def update_state_after_alloc(self, seq: Any) -> None: ...

    @abstractmethod
    def request_finished(self, seq: Any) -> None: ...
