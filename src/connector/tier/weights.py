"""What identifies the weights of a model, so that KV on disk is never served to other ones.

    a local folder or file    names, sizes and times of change of its weight files
    a model of a hub          the commit, which the engine or transformers has resolved

Weights of one architecture have the same names and sizes, so the times count, too: a folder that is copied without them
(`cp` without `-p`) has other weights. If nothing is known, the operator must say a revision.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu_prefix_cache import ConfigurationError

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
COMMIT_DIGITS = 40


def weights_of(model: str, hf_config: Any, revision: str | None = None) -> str:
    """A text that changes with the weights. Raises ConfigurationError if nothing says which they are."""
    files = list(_weight_files(Path(model)))
    if files:
        described = "".join(f"{path.name} {status.st_size} {status.st_mtime_ns}\n" for path, status in files)
        return f"files {hashlib.sha256(described.encode()).hexdigest()}"
    commit = vars(hf_config).get("_commit_hash")
    for known in (commit, revision):
        if known is not None and len(known) == COMMIT_DIGITS and not set(known) - set("0123456789abcdef"):
            return f"commit {known}"
    raise ConfigurationError(
        f"nothing tells which weights {model!r} has: no weight files are there, and no commit is known; "
        "give the tier a revision, and another one whenever the weights change"
    )


def _weight_files(path: Path) -> Iterator[tuple[Path, Any]]:
    there = sorted(path.rglob("*")) if path.is_dir() else [path]
    for each in there:
        if each.suffix in SUFFIXES and each.is_file():
            yield each, each.stat()
