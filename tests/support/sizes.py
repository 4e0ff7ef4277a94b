"""How large everything inside an object is: for tests that nothing grows with the number of requests served."""

from collections import deque
from typing import Any

CONTAINERS = (dict, list, set, deque, tuple, frozenset)
OURS = ("cpu_prefix_cache", "connector", "sortedcontainers")


def sizes_of_containers(root: Any) -> dict[str, int]:
    """The length of every container reachable from `root` through our own objects, by its path of attribute names.

    The elements of a container share one path, and their lengths are added up.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    waiting = [("root", root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            sizes[path] = sizes.get(path, 0) + len(value)
            members = value.values() if isinstance(value, dict) else value
            waiting += [(f"{path}[]", member) for member in members]
        elif type(value).__module__.startswith(OURS):
            waiting += [(f"{path}.{name}", member) for name, member in _attributes(value)]
    return sizes


def _attributes(value: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    named = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return named + list(getattr(value, "__dict__", {}).items())
