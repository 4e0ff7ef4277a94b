"""The connector of SGLang: a host cache behind its unified radix cache, as the linker that one flag names.

    interface.py    the names of SGLang that it needs, which 0.5.23.json lists: checked first
    pools.py        SGLang's device pools as groups of our layout
    layers.py       a forward waits for the layers that are loaded for it
    ranks.py        what all ranks have in common
    linker.py       the ten calls of a linker, passed on to a cache by keys

How to use it: docs/sglang.md.
"""

from connector.sglang import interface  # first: it refuses an SGLang in which others would find nothing to import
from connector.sglang.linker import HostLinker

__all__ = ["HostLinker", "interface"]
