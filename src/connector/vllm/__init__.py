"""vLLM's connector to a CPUPrefixCache. vLLM imports this module in every process, also where there is no GPU."""

from connector.vllm.connector import CPUPrefixCacheConnector

__all__ = ["CPUPrefixCacheConnector"]
