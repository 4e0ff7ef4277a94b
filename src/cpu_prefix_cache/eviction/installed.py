"""Policies of other packages, each under the name of its entry point.

[project.entry-points."cpu_prefix_cache.policies"]
mine = "my_package:MyPolicy"  # derives from EvictionPolicy, and is made of a Forest
"""

from inspect import signature
from typing import TYPE_CHECKING

from cpu_prefix_cache.eviction.base import EvictionPolicy, PolicyFactory
from cpu_prefix_cache.index.forest import NONE
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.installed import installed, load

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "cpu_prefix_cache.policies"
FORMER = {"accepts": "choose", "cleared": "anew", "forgotten": "anew"}  # methods that nobody calls any more


def installed_policies() -> dict[str, "EntryPoint"]:
    """Entry points by name, loaded by `load_policy`. Called only for a name that is none of ours."""
    return installed(GROUP)


def load_policy(point: "EntryPoint") -> PolicyFactory:
    """Raises ConfigurationError where the entry point leads to nothing, no policy, or one of a former contract."""
    policy = load(point, f"the policy {point.name}")
    if not isinstance(policy, type) or EvictionPolicy not in policy.__mro__:
        raise ConfigurationError(f"{point.value}, which policy {point.name} names, is no EvictionPolicy: {policy!r}")
    for former, now in FORMER.items():
        if former in dir(policy) and getattr(policy, now) is getattr(EvictionPolicy, now):
            raise ConfigurationError(
                f"{point.value}, which policy {point.name} names, has `{former}` and no `{now}`: the former is not "
                f"called any more, so implement EvictionPolicy.{now}"
            )
    _check_takes_hints(policy, point)
    return policy


def _check_takes_hints(policy: type[EvictionPolicy], point: "EntryPoint") -> None:
    """The pool gives every use its hint, also where there is none."""
    try:
        signature(policy.admitted).bind(policy, NONE, (), 0.0, None)
    except TypeError as error:
        raise ConfigurationError(
            f"{point.value}, which policy {point.name} names, takes no `next_use` in `admitted`: add the parameter, "
            f"which it may ignore ({error})"
        ) from error
