"""The entry point that registers the connector by name, so that `kv_connector_module_path` may be left out."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "CPUPrefixCacheConnector"


def register() -> None:
    """Called by vLLM in each of its processes, sometimes twice."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "connector.vllm.connector", NAME)
