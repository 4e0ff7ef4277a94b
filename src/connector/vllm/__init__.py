"""A vLLM KV connector backed by CPUPrefixCache. vLLM imports this module in every process, also without a GPU."""

from connector.vllm.connector import CPUPrefixCacheConnector

__all__ = ["CPUPrefixCacheConnector"]
