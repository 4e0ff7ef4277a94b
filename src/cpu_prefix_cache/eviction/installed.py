"""Policies of other packages, each under the name of its entry point.

[project.entry-points."cpu_prefix_cache.policies"]
mine = "my_package:MyPolicy"  # derives from EvictionPolicy, and is made of a Forest
"""

from typing import TYPE_CHECKING

from cpu_prefix_cache.eviction.base import EvictionPolicy, PolicyFactory
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.installed import installed, load

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "cpu_prefix_cache.policies"


def installed_policies() -> dict[str, "EntryPoint"]:
    """Entry points by name, loaded by `load_policy`. Called only for a name that is none of ours."""
    return installed(GROUP)


def load_policy(point: "EntryPoint") -> PolicyFactory:
    """Raises ConfigurationError where the entry point leads to nothing, or to no policy."""
    policy = load(point, f"the policy {point.name}")
    if isinstance(policy, type) and EvictionPolicy in policy.__mro__:
        return policy
    raise ConfigurationError(f"{point.value}, which policy {point.name} names, is no EvictionPolicy: {policy!r}")
