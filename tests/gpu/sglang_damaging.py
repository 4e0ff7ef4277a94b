"""`connector.sglang` whose loads each damage one block of the group of the number in DAMAGED.

For `linker_module_path`: SGLang imports that module in every process with a linker.
"""

import os
from dataclasses import replace
from typing import Any

from connector.sglang import HostLinker, linker
from cpu_prefix_cache.by_keys import KeyedHostCache
from cpu_prefix_cache.testing import CorruptingCopier

__all__ = ["HostLinker"]
NAME = "DAMAGED"


def damaging(groups: Any, *, options: Any, **others: Any) -> KeyedHostCache:
    def wrap(copier: Any, tensors: Any) -> CorruptingCopier:
        return CorruptingCopier(copier, tensors, int(os.environ[NAME]), loads=None)

    return KeyedHostCache(groups, options=replace(options, wrap_copier=wrap), **others)


linker.KeyedHostCache = damaging
