"""The namespace of a rank, and the digest of a model's configuration.

An engine's namespace is known to its scheduler, too, and names the folder. What a rank alone knows, such as how its
rows lie, is in its manifest, and in what its records are sealed with: where it differs, the folder is refused.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.tier import Namespace, Value

VOLATILE = ("_name_or_path", "_commit_hash", "transformers_version")  # of a model's configuration


@dataclass(frozen=True, slots=True)
class RankNamespace(Namespace):
    """Namespace of a rank: that of the engine's folder, with fields of the rank's own."""

    engine_folder: str

    @classmethod
    def of(cls, engine: Namespace, own: Mapping[str, Value]) -> "RankNamespace":
        return cls((*engine.fields, *own.items()), engine.folder)

    @property
    def folder(self) -> str:
        return self.engine_folder


def digest(described: Mapping[str, Any] | Sequence[str]) -> str:
    """Digest of a model's configuration, whatever its name is; or of lines."""
    if isinstance(described, Mapping):
        described = {name: value for name, value in described.items() if name not in VOLATILE}
    text = json.dumps(described, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_files(field: str, files: Mapping[str, Path]) -> str:
    """Digest of files by their names, with all their bytes. Raises ConfigurationError where one cannot be read."""
    found = hashlib.sha256()
    for name, path in sorted(files.items()):
        try:
            contents = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"the {field} cannot be read: {error}") from error
        found.update(os.fsencode(f"{name} {len(contents)}\n") + contents)
    return found.hexdigest()
