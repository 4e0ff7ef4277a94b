"""Messages between scheduler, ranks and connector."""

from collections.abc import Callable
from dataclasses import dataclass, field

ReqId = str | int


def _check_generation(what: str, generation: int) -> None:
    if generation < 0:
        raise ValueError(f"a {what} has a generation from 0 on, got {generation}")


@dataclass(frozen=True)
class SaveOperationId:
    req_id: ReqId
    generation: int

    def __post_init__(self) -> None:
        _check_generation("save", self.generation)


@dataclass(frozen=True)
class LoadOperationId:
    req_id: ReqId
    generation: int

    def __post_init__(self) -> None:
        _check_generation("load", self.generation)


SaveCompletionId = ReqId | SaveOperationId
LoadCompletionId = ReqId | LoadOperationId
ConnectorCompletionId = ReqId | SaveOperationId | LoadOperationId
ConnectorCompletionKey = tuple[str, ConnectorCompletionId]


@dataclass(frozen=True)
class ConnectorCompletion:
    channel: str
    operation_id: ConnectorCompletionId
    succeeded: bool

    def __post_init__(self) -> None:
        if not self.channel:
            raise ValueError("a completion needs a channel")
        if type(self.succeeded) is not bool:
            raise TypeError(f"succeeded is True or False, got {self.succeeded!r}")
        hash(self.operation_id)

    @property
    def key(self) -> ConnectorCompletionKey:
        return self.channel, self.operation_id


@dataclass
class KVTransferRegion:
    base_addr: int
    total_bytes: int
    unit_bytes: int
    reverse_indexed: bool = False
    semantic_role: str | None = None

    def unit_addr(self, index: int) -> int:
        start = self.total_bytes - (index + 1) * self.unit_bytes if self.reverse_indexed else index * self.unit_bytes
        return self.base_addr + start


@dataclass
class KVTransferTensors:
    block_regions: list[KVTransferRegion]
    slot_regions: list[KVTransferRegion]
    num_blocks: int
    num_slots: int = 0
    swa_block_regions: list[KVTransferRegion] = field(default_factory=list)
    staging_region: KVTransferRegion | None = None
    staging_pool_size: int = 0
    gather_slot: Callable[[int, int], None] | None = None
    scatter_slot: Callable[[int, int], None] | None = None
    expected_full_slot_region_count: int | None = None


@dataclass
class KVConnectorOutput:
    finished_sending: set[ReqId] = field(default_factory=set)
    finished_recving: set[ReqId] = field(default_factory=set)
    failed_recving: set[ReqId] = field(default_factory=set)
    finished_saving: set[SaveCompletionId] = field(default_factory=set)
    finished_loading: set[LoadCompletionId] = field(default_factory=set)
    failed_loading: set[LoadCompletionId] = field(default_factory=set)
    expected_finished_count: int = 0
    connector_completions: set[ConnectorCompletion] = field(default_factory=set)

    def is_empty(self) -> bool:
        return not any(value for name, value in vars(self).items() if name != "expected_finished_count")


class ConnectorMetadata:
    def __init__(self) -> None:
        self.reqs_to_recv: dict = {}
        self.reqs_to_save: dict = {}
        self.reqs_to_send: dict = {}
        self.reqs_in_batch: set = set()
        self.reqs_not_processed: set = set()
        self.request_id_to_transfer_id: dict = {}


_WORK = (
    "requests",
    "lookup_requests_in_step",
    "reqs_to_recv",
    "reqs_to_save",
    "reqs_to_send",
    "reqs_in_batch",
    "reqs_not_processed",
)


def connector_metadata_has_work(metadata: object | None) -> bool:
    return any(getattr(metadata, name, None) for name in _WORK)
