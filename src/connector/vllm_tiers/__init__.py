"""Tiers of this library inside vLLM's own OffloadingConnector. `cpu_prefix_cache_vllm` names them to vLLM.

    connector.py    vLLM's connector, which lets its tiers know the engine
    namespace.py    what must be equal for rows of one engine to be served by another
    tier.py         a `SecondaryTierManager` of vLLM that passes its calls on to a tier

The tier runs in the process of vLLM's scheduler.
"""

from connector.vllm_tiers.connector import CPUPrefixCacheOffloadingConnector
from connector.vllm_tiers.tier import PrefixCacheTier

__all__ = ["CPUPrefixCacheOffloadingConnector", "PrefixCacheTier"]
