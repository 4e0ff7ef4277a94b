"""Which adapters have other files than when the host first had KV of theirs.

vLLM's keys know an adapter by its name, from 0.32 on also by its path, and never by its weights. So an adapter that is
trained on and saved in its place, or loaded with `load_inplace`, has the keys of the old one, on the device and here.
vLLM tells no connector when it loads one, but each request says where its adapter is: the names, sizes and times of its
weight files are looked at for each, and compared with those seen first since the last reset.

Of an adapter whose files have changed nothing is loaded and nothing is stored, until a reset: what the device has of it
may be of either, and vLLM may compute with either. The files of an adapter that nobody has here (a name on a hub, or
tensors in memory) cannot be looked at.
"""

import logging
from pathlib import Path
from typing import Protocol

from connector.vllm.versions import keys_have_adapter_paths
from cpu_prefix_cache.slab.weights import states_in

logger = logging.getLogger(__name__)

Name = tuple[str, ...]  # of an adapter, in vLLM's keys


class Adapter(Protocol):
    """What is read of a LoRARequest of vLLM's."""

    lora_name: str
    lora_path: str


class Adapters:
    def __init__(self) -> None:
        self._first: dict[Name, tuple[str, str]] = {}  # path and files
        self._changed: set[Name] = set()

    def look(self, adapter: Adapter | None) -> None:
        """A request has this adapter. Reads the state of its files."""
        if adapter is None or (name := _name(adapter)) in self._changed:
            return
        files = states_in(Path(adapter.lora_path))
        if files is None:  # vLLM can load no others from there, either
            return
        if self._first.setdefault(name, (adapter.lora_path, files)) != (adapter.lora_path, files):
            self._changed.add(name)
            logger.warning(
                "adapter %s in %s has other files than before: the host loads and stores nothing for it until vLLM's "
                "reset_prefix_cache() is called",
                *(adapter.lora_name, adapter.lora_path),
            )

    def has_changed(self, adapter: Adapter | None) -> bool:
        return adapter is not None and _name(adapter) in self._changed

    def forget(self) -> None:
        """The host is empty."""
        self._first.clear()
        self._changed.clear()


def _name(adapter: Adapter) -> Name:
    return (adapter.lora_name, adapter.lora_path) if keys_have_adapter_paths() else (adapter.lora_name,)
