"""Which ATOM these tests import: the real one, or its double. One process has one of them.

ATOM_SOURCE is an archive of its source, or a folder: a checkout, or what was unpacked. Without it, an archive is looked
for beside this repository. An archive is unpacked to a temporary folder, once. ATOM needs packages that this library
does not.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VARIABLE = "ATOM_SOURCE"
BESIDE = Path(__file__).parents[4] / "shared" / "engines" / "atom_ffdf3bb.tar.gz"
NEEDED = ("msgspec", "psutil", "transformers", "zmq")


def source() -> Path | None:
    """The archive or the folder; None if there is none. Raises FileNotFoundError for one that was given and is not."""
    said = os.environ.get(VARIABLE)
    if not said:
        return BESIDE if BESIDE.exists() else None
    if not Path(said).exists():
        raise FileNotFoundError(f"{VARIABLE} is {said}, which is neither an archive nor a folder")
    return Path(said).absolute()


def unpacked() -> Path:
    """The folder that has ATOM's package."""
    found = source()
    if found is None:
        raise FileNotFoundError(why_not_real())
    home = found if found.is_dir() else _unpacked(found)
    for folder in (home, *home.iterdir()):
        if (folder / "atom" / "model_engine").is_dir():
            return folder
    raise FileNotFoundError(f"{found} has no folder atom/model_engine")


def _unpacked(archive: Path) -> Path:
    home = Path(tempfile.gettempdir()) / f"atom-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=home.parent) as fresh, tarfile.open(archive) as files:
            files.extractall(Path(fresh) / "atom", filter="data")
            try:
                (Path(fresh) / "atom").rename(home)
            except OSError:  # another process was faster
                if not home.exists():
                    raise
    return home


def description() -> str:
    """Which ATOM it is: its commit, by git or by the name of the archive, and a digest of its Python files."""
    home, files = unpacked(), hashlib.sha256()
    for file in sorted((home / "atom").rglob("*.py")):
        files.update(f"{file.relative_to(home)}\n".encode() + file.read_bytes())
    return f"ATOM {_commit(home)}, whose Python files have the sha256 {files.hexdigest()[:16]}"


def _commit(home: Path) -> str:
    if (home / ".git").exists():
        ran = subprocess.run(["git", "-C", home, "describe", "--always", "--dirty"], capture_output=True, text=True)
        if not ran.returncode:
            return ran.stdout.strip()
    named = [re.search(r"[0-9a-f]{7,40}", name) for name in (str(source().name), home.name)]
    return next((f"{each[0]} (by its name)" for each in named if each), "of an unknown commit")


def why_not_real() -> str | None:
    """Why the real ATOM cannot be imported here, as a sentence; None if it can."""
    if source() is None:
        return f"ATOM's source is not here: set {VARIABLE}, or have {BESIDE.name} in ../shared/engines"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"ATOM's scheduler needs {', '.join(missing)} (pyzmq is zmq)" if missing else None


WHY_NOT_REAL = why_not_real()
sys.path.insert(0, str(Path(__file__).parent / "double" if WHY_NOT_REAL else unpacked()))
