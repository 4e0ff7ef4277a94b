"""Identity of the weights in a folder, or in a file: names, sizes and times of change of the files that hold them, and
samples of their bytes.

Weights of one architecture have the same names and sizes, so the times count, too: a folder that is copied without them
(`cp` without `-p`) has other weights. Where tools set all times alike, as builds that can be repeated do, the samples
show: weights that were trained or merged differ nearly everywhere.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 16, 4096  # of a file: its first bytes, its last ones, and between them at equal distances
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")


def weights_in(path: Path) -> str | None:
    """A text that changes with the weights at `path`; None where no weight files are. Raises OSError."""
    digest, files = hashlib.sha256(), list(_weight_files(path))
    for each, status in files:
        digest.update(os.fsencode(f"{each.name} {status.st_size} {status.st_mtime_ns}\n"))
        for sample in _samples(each, status.st_size):
            digest.update(sample)
    return f"files {digest.hexdigest()}" if files else None


def _samples(path: Path, size: int) -> Iterator[bytes]:
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb", buffering=0) as file:
        for at in range(SAMPLES):
            file.seek(last * at // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _weight_files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    there = sorted(path.rglob("*")) if path.is_dir() else [path]
    for each in there:
        if each.suffix in SUFFIXES and each.is_file():
            yield each, each.stat()
