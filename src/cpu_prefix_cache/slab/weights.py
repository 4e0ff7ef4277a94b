"""What the weights in a folder, or in a file, are: names, sizes and times of change of the files that hold them.

Weights of one architecture have the same names and sizes, so the times count, too: a folder that is copied without them
(`cp` without `-p`) has other weights. No byte of a weight is read.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")


def weights_in(path: Path) -> str | None:
    """A text that changes with the weights at `path`; None where no weight files are."""
    files = list(_weight_files(path))
    if not files:
        return None
    described = "".join(f"{path.name} {status.st_size} {status.st_mtime_ns}\n" for path, status in files)
    return f"files {hashlib.sha256(described.encode()).hexdigest()}"


def _weight_files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    there = sorted(path.rglob("*")) if path.is_dir() else [path]
    for each in there:
        if each.suffix in SUFFIXES and each.is_file():
            yield each, each.stat()
