"""The entry point by which vLLM knows the connector by name alone, without `kv_connector_module_path`."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "CPUPrefixCacheConnector"


def register() -> None:
    """vLLM calls it in each of its processes, sometimes twice."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "connector.vllm.connector", NAME)
