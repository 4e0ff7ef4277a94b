"""Arguments of a HostCache as tests give them: options beside the sizes."""

from dataclasses import fields
from typing import Any

from cpu_prefix_cache import HostOptions

NAMES = {each.name for each in fields(HostOptions)}


def with_options(**given: Any) -> dict[str, Any]:
    """Arguments of a HostCache, with those that have names of HostOptions in one."""
    options = {name: value for name, value in given.items() if name in NAMES}
    return {name: value for name, value in given.items() if name not in NAMES} | {"options": HostOptions(**options)}
