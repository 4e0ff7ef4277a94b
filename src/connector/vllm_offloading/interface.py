"""Check, before anything else of this package is imported, that this vLLM has what a policy of ours needs.

since 0.31    a policy is notified once for each request, and the scheduler notes where each key ends in its prompt
before it     it is notified of single blocks; in which order they follow each other nobody says
"""

import vllm

from connector.common.contract import lacking
from cpu_prefix_cache import ConfigurationError

NEEDED = {
    "vllm.v1.kv_offload.cpu.policies.base.CachePolicy": ("on_store_miss", "on_request_finished"),
    "vllm.v1.kv_offload.base.ReqContext": ("_offload_key_positions",),
}


def check_interface() -> None:
    """Raises ConfigurationError under a vLLM whose OffloadingConnector cannot tell a policy enough."""
    for name in lacking(NEEDED):
        raise ConfigurationError(
            f"vLLM {vllm.__version__} has no {name}, without which a policy does not learn which blocks follow each "
            "other: take vLLM 0.31 to 0.33, or CPUPrefixCacheConnector, which has the same policies"
        )


check_interface()
