"""Keys of a request's `kv_transfer_params`. If false, nothing is loaded for the request, or nothing of it is stored."""

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)

LOAD, STORE = "cpu_prefix_cache_load", "cpu_prefix_cache_store"


def allows(params: Mapping[str, Any] | None, flag: str) -> bool:
    value = (params or {}).get(flag, True)
    if type(value) is not bool:
        _warn_of(flag, repr(value))
    return value is not False


@lru_cache(16)
def _warn_of(flag: str, value: str) -> None:
    """Warn once for each value. A connector cannot reject a request, so the value counts as true."""
    logger.warning("%s in kv_transfer_params is true or false, got %s: taken for true", flag, value)
