"""The key of a request's `kv_transfer_params` that says when its prefix is used again: in seconds, or "never"."""

from collections.abc import Mapping
from math import inf
from typing import Any

NEXT_USE, NEVER = "cpu_prefix_cache_next_use", "never"


def next_use_of(params: Mapping[str, Any] | None) -> Any:
    """As `Request.next_use`, which may be anything: the cache counts what it cannot use. None: it is not given.

    >>> next_use_of({NEXT_USE: 30}), next_use_of({NEXT_USE: "never"}), next_use_of({}), next_use_of(None)
    (30, inf, None, None)
    """
    given = (params or {}).get(NEXT_USE)
    return inf if given == NEVER else given
