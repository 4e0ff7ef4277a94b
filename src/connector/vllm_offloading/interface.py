"""Check, before anything else of this package is imported, that this vLLM has what a policy of ours needs.

since 0.31    a policy is notified once for each request, and the scheduler notes where each key ends in its prompt
before it     it is notified of single blocks; in which order they follow each other nobody says
"""

from importlib import import_module
from typing import Any

import vllm

from cpu_prefix_cache import ConfigurationError

NEEDED = (
    ("vllm.v1.kv_offload.cpu.policies.base", "CachePolicy", "on_store_miss"),
    ("vllm.v1.kv_offload.cpu.policies.base", "CachePolicy", "on_request_finished"),
    ("vllm.v1.kv_offload.base", "ReqContext", "_offload_key_positions"),
)


def members(module: str, owner: str) -> set[str]:
    """The methods and fields of a class; none of a class that is not there."""
    try:
        found: Any = vars(import_module(module)).get(owner)
    except ImportError:
        return set()
    return set() if found is None else {*vars(found), *vars(found).get("__dataclass_fields__", ())}


def check_interface() -> None:
    """Raises ConfigurationError under a vLLM whose OffloadingConnector cannot tell a policy enough."""
    for module, owner, name in NEEDED:
        if name not in members(module, owner):
            raise ConfigurationError(
                f"vLLM {vllm.__version__} has no {owner}.{name}, without which a policy does not learn which blocks "
                "follow each other: take vLLM 0.31 to 0.33, or CPUPrefixCacheConnector, which has the same policies"
            )


check_interface()
