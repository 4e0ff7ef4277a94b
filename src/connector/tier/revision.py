"""The option `revision_file` of a shared store: a revision of the weights that changes while an engine runs.

Engines have no call that passes it to a connector. So whoever sends new weights writes their name into a file,
and then resets. Engines with equal files share again.
"""

import logging
import os
import stat
from typing import Any

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import CPUPrefixCache, KeptCache, TieredCache
from cpu_prefix_cache.tier import check_text

logger = logging.getLogger(__name__)

REVISION_FILE = "revision_file"
MAX_BYTES = 4096


def check_file(path: Any, revision: str | None, place: str) -> None:
    """Raise ConfigurationError for a path that is no text, or has a revision beside it. `place` is what has both."""
    if path is None:
        return
    check_text(f"{REVISION_FILE} of a {place}", path)
    if revision is not None:
        raise ConfigurationError(f"the {place} has a revision and a {REVISION_FILE}: leave one of them out")


def read_revision(path: str) -> str:
    """Raises ConfigurationError if the file names none."""
    try:
        revision = _text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{REVISION_FILE} cannot be read: {error}") from error
    if not revision:
        raise ConfigurationError(f"{REVISION_FILE}, {path}, is empty; write a name of the weights into it")
    return revision


def _text(path: str) -> str:
    """The text of a small regular file. Engines read it in the thread that schedules: no pipe is waited for."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        read = file.read(MAX_BYTES + 1)
    if len(read) > MAX_BYTES:
        raise OSError(f"{path} has more than {MAX_BYTES} bytes; write a name of the weights into it")
    return read.decode()


def reset(cache: CPUPrefixCache | KeptCache, path: str | None) -> str | None:
    """Reset a cache. What it stores from now on is shared with those whose revision is that of the file at `path`, the
    result; with nobody, if there is none or it cannot be read.
    """
    revision = new_revision(path)
    if isinstance(cache, TieredCache | KeptCache):
        cache.reset(revision)
    else:
        cache.reset()
    return revision


def new_revision(path: str | None) -> str | None:
    """The revision that the file at `path` names. None, with a message if there is a path: nobody knows it."""
    try:
        return None if path is None else read_revision(path)
    except ConfigurationError as error:
        logger.error("%s: nothing is shared until the next reset", error)
        return None
