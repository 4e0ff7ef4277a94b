"""Several KV connectors in one vLLM server: of those that have a prompt, the one that saves the most time loads it."""

from connector.vllm.multi.connector import CPUPrefixCacheMultiConnector

__all__ = ["CPUPrefixCacheMultiConnector"]
