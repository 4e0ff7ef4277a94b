"""The packages as they would be uploaded: built once, each tried in an empty folder, without this repository's files.

sdist      built from the working tree
wheel      built from the sdist, so that the sdist is known to suffice
unpacked   the sdist's folder
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str | Path], folder: Path, expected: int = 0) -> str:
    """Run it in `folder`, with nothing of this process's paths. What it prints, and writes to stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ran.returncode == expected, ran.stdout
    return ran.stdout


def build(source: Path, out: Path, *options: str) -> None:
    run([sys.executable, "-m", "build", "--outdir", out, *options, source], out)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """The folder with both."""
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="session")
def sdist(built) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def unpacked(sdist, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found
