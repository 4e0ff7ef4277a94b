"""The Pythons in which rows run. What a row needs besides lies in a folder that is put before theirs on the path.

    base                   `make test`'s
    vllm                   `make test-vllm`'s
    newest transformers    base, and the newest transformers of PyPI
    newest triton          base, and the newest Triton, below the same torch
    vllm 0.33              vllm, with the Python files of a later release over its kernels (vllm_release.py)

Folders are made once, in `.field`, but for what is the newest: that anew for each row. A row whose folder cannot be
made is not run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.field.vllm_release import lay_over

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / ".field"


class NotRun(Exception):
    """The environment is not there, or cannot be made: the sentence gives the reason."""


@dataclass(frozen=True)
class Environment:
    """`make` fills a folder that comes first on the path, if anything must."""

    variable: str  # of the environment of this process: the Python
    default: Path
    make: Callable[[Path, Path], None] | None = None  # of the Python, and of the folder
    is_newest: bool = False  # another one tomorrow


def newest(package: str, python: Path, folder: Path) -> None:
    install = [python, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder, package]
    subprocess.run(install, check=True, capture_output=True, text=True)
    for already in ("torch", "numpy"):  # those of the Python
        shutil.rmtree(folder / already, ignore_errors=True)


def vllm_33(python: Path, folder: Path) -> None:
    lay_over("0.33.0", python, folder)


BASE = Environment("FIELD_PYTHON", Path(sys.executable))
VLLM = Environment("FIELD_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python")
ENVIRONMENTS = {
    "base": BASE,
    "vllm": VLLM,
    "newest transformers": Environment(BASE.variable, BASE.default, partial(newest, "transformers"), is_newest=True),
    "newest triton": Environment(BASE.variable, BASE.default, partial(newest, "triton"), is_newest=True),
    "vllm 0.33": Environment(VLLM.variable, VLLM.default, vllm_33),
}


def prepared(name: str) -> tuple[Path, dict[str, str]]:
    """The Python of this environment, and the variables that its tests are started with. Raises NotRun."""
    environment = ENVIRONMENTS[name]
    python = Path(os.environ.get(environment.variable) or environment.default)
    if not python.exists():
        raise NotRun(f"{python} is not there: `make test-field` makes it, or {environment.variable} names another")
    path = [str(ROOT / "src"), str(ROOT)]
    if environment.make is not None:
        path.insert(0, str(_folder(name, python, environment.make, environment.is_newest)))
    return python, dict(os.environ, PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1")


def _folder(name: str, python: Path, make: Callable[[Path, Path], None], is_newest: bool) -> Path:
    folder = FOLDERS / name.replace(" ", "-")
    if folder.exists() and not is_newest:
        return folder
    FOLDERS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDERS) as fresh:
        try:
            make(python, Path(fresh) / "made")
        except subprocess.CalledProcessError as failed:
            said = (failed.stderr or "").strip().splitlines() or ["it says nothing"]
            raise NotRun(f"{name} cannot be installed: {said[-1]}") from failed
        shutil.rmtree(folder, ignore_errors=True)
        (Path(fresh) / "made").rename(folder)
    return folder
