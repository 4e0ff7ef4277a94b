"""Tiers of this library inside vLLM's own OffloadingConnector. `cpu_prefix_cache_vllm` names them to vLLM.

    namespace.py    what must be equal for rows of one engine to be served by another
    tier.py         a `SecondaryTierManager` of vLLM that passes its calls on to a tier

All of it runs in the process of vLLM's scheduler.
"""

from connector.vllm_tiers.tier import PrefixCacheTier

__all__ = ["PrefixCacheTier"]
