"""Parts of this library inside vLLM's own OffloadingConnector. `cpu_prefix_cache_vllm` names them to vLLM.

    interface.py    the names of vLLM that they need, checked first
    chains.py       the boundaries of one request, in the order of its prompt
    kept.py         the chunks that vLLM's manager keeps, in the order in which they leave; knows no vLLM
    policy.py       a `CachePolicy` of vLLM that passes its calls on to them

Nothing here copies or needs a device: it runs in the process of vLLM's scheduler.
"""

from connector.vllm_offloading import interface  # first: it refuses a vLLM in which others would find nothing to import
from connector.vllm_offloading.policy import AdaptivePolicy, ArcPolicy, LruPolicy

__all__ = ["AdaptivePolicy", "ArcPolicy", "LruPolicy", "interface"]
