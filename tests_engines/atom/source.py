"""Which ATOM these tests import: the real one, or its double. One process has one of them.

The real one is unpacked from the archive of its source to a temporary folder, once for each archive. It needs packages
that this library does not.
"""

import importlib.util
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[3] / "shared" / "engines" / "atom_ffdf3bb.tar.gz"
NEEDED = ("msgspec", "psutil", "transformers", "zmq")


def unpacked() -> Path:
    """The folder of ATOM's source."""
    home = Path(tempfile.gettempdir()) / f"{ARCHIVE.name.removesuffix('.tar.gz')}-{int(ARCHIVE.stat().st_mtime)}"
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=home.parent) as fresh, tarfile.open(ARCHIVE) as archive:
            archive.extractall(Path(fresh) / "atom", filter="data")
            try:
                (Path(fresh) / "atom").rename(home)
            except OSError:  # another process was faster
                if not home.exists():
                    raise
    return home


def why_not_real() -> str | None:
    """Why the real ATOM cannot be imported here, as a sentence; None if it can."""
    if not ARCHIVE.exists():
        return f"ATOM's source is not here: {ARCHIVE.name} is looked for in ../shared/engines"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"ATOM's scheduler needs {', '.join(missing)} (pyzmq is zmq)" if missing else None


WHY_NOT_REAL = why_not_real()
sys.path.insert(0, str(Path(__file__).parent / "double" if WHY_NOT_REAL else unpacked()))
