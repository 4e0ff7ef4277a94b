"""Eviction policies by name. A new one is added to POLICIES and nowhere else, or is an entry point (installed.py).

`adaptive@26624` is `adaptive` for the most prefill time saved, instead of the most hits, in a model in which the
attention of a token costs as much as everything else of it at a depth of 26,624 tokens.
"""

from collections.abc import Mapping
from functools import partial

from cpu_prefix_cache.eviction.adaptive import Adaptive
from cpu_prefix_cache.eviction.arc import Arc
from cpu_prefix_cache.eviction.base import EvictionPolicy, PolicyFactory
from cpu_prefix_cache.eviction.installed import GROUP, installed_policies, load_policy
from cpu_prefix_cache.eviction.lru import Lru
from cpu_prefix_cache.messages.errors import ConfigurationError

POLICIES: Mapping[str, PolicyFactory] = {"lru": Lru, "arc": Arc, "adaptive": Adaptive}
WEIGHED = "adaptive@"
MOST_DIGITS = 9


def policy_of(name: str, chunk_tokens: int = 1) -> PolicyFactory:
    """The policy of this name, for chunks of so many tokens. Raises ConfigurationError for an unknown one."""
    if name in POLICIES:
        return POLICIES[name]
    depth = name.removeprefix(WEIGHED)
    if name.startswith(WEIGHED) and depth.isascii() and depth.isdecimal() and len(depth) <= MOST_DIGITS and int(depth):
        return partial(Adaptive, even_depth=int(depth) / chunk_tokens)
    installed = installed_policies()
    if name in installed:
        return load_policy(installed[name])
    raise ConfigurationError(
        f"policy must be one of {', '.join([*sorted(POLICIES), *sorted(installed)])}; got {name!r}. For the most "
        f"prefill time saved it is {WEIGHED}26624, with the depth in tokens at which attention costs as much as the "
        f"rest of a token. Packages add policies as entry points of {GROUP}"
    )


__all__ = ["POLICIES", "Adaptive", "Arc", "EvictionPolicy", "Lru", "PolicyFactory", "policy_of"]
