"""A vLLM KV connector backed by CPUPrefixCache. vLLM imports this module in every process, also without a GPU."""

from connector.vllm import versions  # first: it refuses a vLLM in which others would find nothing to import
from connector.vllm.connector import CPUPrefixCacheConnector

__all__ = ["CPUPrefixCacheConnector", "versions"]
