from .base import KVConnectorBase, KVConnectorSchedulerBase
from .factory import KVConnectorFactory
from .types import ConnectorMetadata, KVConnectorOutput

__all__ = [
    "ConnectorMetadata",
    "KVConnectorBase",
    "KVConnectorFactory",
    "KVConnectorOutput",
    "KVConnectorSchedulerBase",
]
