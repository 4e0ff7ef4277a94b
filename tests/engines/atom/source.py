"""Which ATOM these tests import: the real one, or its double. One process has one of them.

ATOM_SOURCE is an archive of its source, or a folder: a checkout, or what was unpacked. Without it, the source is looked
for where those of all engines are (tests/engines/sources.py). ATOM needs packages that this library does not.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.engines.sources import ATOM, digest, found, home, why_not

VARIABLE = "ATOM_SOURCE"
NEEDED = ("msgspec", "psutil", "transformers", "zmq")


def source() -> Path | None:
    """The archive or the folder; None if there is none. Raises FileNotFoundError for one that was given and is not."""
    said = os.environ.get(VARIABLE)
    if not said:
        return found(ATOM)
    if not Path(said).exists():
        raise FileNotFoundError(f"{VARIABLE} is {said}, which is neither an archive nor a folder")
    return Path(said).absolute()


def unpacked() -> Path:
    """The folder that has ATOM's package."""
    place = source()
    if place is None:
        raise FileNotFoundError(why_not_real())
    return home(place, "atom/model_engine")


def description() -> str:
    """Which ATOM it is: its commit, and a digest of its Python files."""
    here = unpacked()
    files = digest(here, ATOM.package)
    commit = ATOM.commit[:9] if files == ATOM.sha256 else _commit(here)
    return f"ATOM {commit}, whose Python files have the sha256 {files[:16]}"


def _commit(home: Path) -> str:
    """By git, or by the name of the archive."""
    if (home / ".git").exists():
        ran = subprocess.run(["git", "-C", home, "describe", "--always", "--dirty"], capture_output=True, text=True)
        if not ran.returncode:
            return ran.stdout.strip()
    named = [re.search(r"[0-9a-f]{7,40}", name) for name in (str(source().name), home.name)]
    return next((f"{each[0]} (by its name)" for each in named if each), "of an unknown commit")


def why_not_real() -> str | None:
    """Why the real ATOM cannot be imported here, as a sentence; None if it can."""
    if source() is None:
        return why_not(ATOM)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"ATOM's scheduler needs {', '.join(missing)} (pyzmq is zmq)" if missing else None


WHY_NOT_REAL = why_not_real()
sys.path.insert(0, str(Path(__file__).parent / "double" if WHY_NOT_REAL else unpacked()))
