"""A release of vLLM whose kernels nobody has built for CPUs: its Python files over the kernels of the one installed.

    folder/vllm             a copy of the package installed, and the Python files of the release over it
    folder/vllm-*.dist-info its metadata, which mark it as one for CPUs
    folder/...              packages that it has come to need

Its models compute with the kernels of the release before, as far as these have the same names and arguments.
"""

import shutil
import subprocess
import zipfile
from pathlib import Path

KERNELS = (".so",)
CPU = "+cpu"  # by which vLLM knows what it was built for
NEW = ("orjson",)  # required from 0.33 on


def lay_over(release: str, python: Path, folder: Path) -> None:
    """Fill `folder`. Raises CalledProcessError if the wheel of the release is not to be had."""
    installed = _said(python, "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])")
    downloads = folder / "downloads"
    pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", downloads]
    subprocess.run([*pip, f"vllm=={release}"], check=True, capture_output=True, text=True)
    (wheel,) = downloads.glob("*.whl")
    shutil.copytree(installed, folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "vllm").rglob("*.py"):
        file.unlink()  # what the release has no more
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith(("vllm/", f"vllm-{release}.dist-info/")) and not name.endswith(KERNELS):
                files.extract(name, folder)
    _say_that_it_is_for_cpus(folder, release)
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *NEW]
    subprocess.run(install, check=True, capture_output=True, text=True)
    shutil.rmtree(downloads)


def _say_that_it_is_for_cpus(folder: Path, release: str) -> None:
    metadata = folder / f"vllm-{release}.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {release}\n", f"\nVersion: {release}{CPU}\n", 1))


def _said(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
