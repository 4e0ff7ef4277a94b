"""Which adapters have other files than when the host first had KV of theirs.

vLLM's keys know an adapter by its name, from 0.32 on also by its path, and never by its weights. So an adapter that is
trained on and saved in its place, or loaded with `load_inplace`, has the keys of the old one, on the device and here.
vLLM notifies no connector when it loads one, but each request has the path of its adapter: when a request is looked up
first, the names, sizes and times of the files that vLLM loads are looked at, and compared with those seen first since
the last reset. What is below the folder is not looked at: trainers keep checkpoints there.

Of an adapter whose files have changed nothing is loaded and nothing is stored, until a reset: what the device has of it
may be of either, and vLLM may compute with either. A reset to a revision that there was before, as a `revision_file`
may name, finds again what was stored under it, in a store or a pool: then the files count that were seen first under
that revision. The files of an adapter that nobody has here (a name on a hub, or tensors in memory) cannot be looked at.

The files may be on a mount that hangs, and this is the engine's thread. So each look has a thread of its own, which
ends with the look, and is waited for no longer than WAIT. An adapter without an answer is unknown: nothing is loaded
or stored for it, and it is not looked at again before the answer has come.
"""

import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import Protocol

from connector.vllm.versions import keys_have_adapter_paths

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM loads the first that is there
WAIT = 0.005  # seconds
NONE = "none"
MAX_LATE = 8  # looks without an answer, after which no other one begins

Name = tuple[str, ...]  # of an adapter, in vLLM's keys


class Adapter(Protocol):
    """The fields that are read of a LoRARequest of vLLM's."""

    lora_name: str
    lora_path: str


class Adapters:
    def __init__(self, until: str, revision: str | None) -> None:
        """`until` is the time at which an adapter whose files have changed is used again. What is stored is of this
        `revision` until a reset.
        """
        self._until = until
        self._of_revisions: dict[str, dict[Name, tuple[str, str]]] = {}
        self._first = self._seen_under(revision)  # path and files
        self._changed: set[Name] = set()
        self._looks: dict[str, Look] = {}  # of requests that are neither admitted nor ended
        self._late: dict[Name, Look] = {}
        self._warned: set[Name] = set()  # of being unknown

    def look(self, request: str, adapter: Adapter | None) -> None:
        """A request is looked up that has this adapter. Looks at its files, if it has not for this request."""
        if adapter is None or request in self._looks or not self._may_look(name := _name(adapter)):
            return
        look = self._looks[request] = Look(adapter.lora_path)
        look.start()
        look.join(WAIT)
        if look.is_alive():
            self._late[name] = look
        if look.files is None and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "the files of adapter %s in %s cannot be looked at (%s): the host loads and stores nothing for it "
                "until they can",
                adapter.lora_name,
                adapter.lora_path,
                look.error or f"no answer within {WAIT * 1000:.0f} ms",
            )

    def _may_look(self, name: Name) -> bool:
        if name in self._changed:
            return False
        self._late = {each: look for each, look in self._late.items() if look.is_alive()}
        return name not in self._late and len(self._late) < MAX_LATE

    def are_same(self, request: str, adapter: Adapter | None) -> bool:
        """Whether the files of a request's adapter are known to be those that were seen first."""
        if adapter is None:
            return True
        look, name = self._looks.get(request), _name(adapter)
        if look is None or look.files is None or name in self._changed:
            return False
        if look.files == NONE:  # vLLM can load no others from there, either
            return True
        seen = adapter.lora_path, look.files
        if self._first.setdefault(name, seen) == seen:
            return True
        self._changed.add(name)
        logger.warning(
            "adapter %s in %s has other files than before: the host loads and stores nothing for it %s",
            adapter.lora_name,
            adapter.lora_path,
            self._until,
        )
        return False

    def passed(self, request: str) -> None:
        """A request was admitted, or has ended."""
        self._looks.pop(request, None)

    def forget(self, revision: str | None) -> None:
        """The host is empty, and what is found from now on is of this revision; with None, new."""
        self._first = self._seen_under(revision)
        self._changed.clear()
        self._looks.clear()

    def _seen_under(self, revision: str | None) -> dict[Name, tuple[str, str]]:
        return {} if revision is None else self._of_revisions.setdefault(revision, {})


class Look(threading.Thread):
    """A look at the files of an adapter. `files` is None until they are known."""

    def __init__(self, path: str) -> None:
        super().__init__(name="adapter-files", daemon=True)
        self._path = path
        self.files: str | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.files = files_in(self._path)
        except (OSError, ValueError) as error:  # ValueError: no path at all
            self.error = error


def files_in(path: str) -> str:
    """A text that changes with the files that vLLM loads of the adapter at `path`; NONE where there are no weights."""
    folder = Path(os.path.expanduser(path))
    weights = [_described(folder / name) for name in WEIGHTS]
    if not any(weights):
        return NONE
    described = "\n".join([_described(folder / CONFIG), *weights])
    return hashlib.sha256(described.encode()).hexdigest()


def _described(file: Path) -> str:
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _name(adapter: Adapter) -> Name:
    return (adapter.lora_name, adapter.lora_path) if keys_have_adapter_paths() else (adapter.lora_name,)
