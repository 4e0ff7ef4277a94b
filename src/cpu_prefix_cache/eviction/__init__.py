"""Eviction policies by name. A new one is added to POLICIES and nowhere else."""

from collections.abc import Mapping

from cpu_prefix_cache.eviction.adaptive import Adaptive
from cpu_prefix_cache.eviction.arc import Arc
from cpu_prefix_cache.eviction.base import EvictionPolicy, PolicyFactory
from cpu_prefix_cache.eviction.lru import Lru

POLICIES: Mapping[str, PolicyFactory] = {"lru": Lru, "arc": Arc, "adaptive": Adaptive}

__all__ = ["POLICIES", "Adaptive", "Arc", "EvictionPolicy", "Lru", "PolicyFactory"]
