"""The identity of the KV that a tier holds: the name of a model, and a revision that changes with its weights.

    model, revision   as they are given
    weights           a folder or a file that the weights were loaded from: its name unless a model is given, what its
                      weight files are, and the configuration beside them

There is no default. Two fine-tunes of one architecture have the same shapes and, with one tokenizer, the same keys: a
tier without an identity serves the KV of one to the other.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.slab.weights import weights_in

if TYPE_CHECKING:
    from cpu_prefix_cache.model.planner import HybridChunkPlanner
    from cpu_prefix_cache.slab.namespace import Namespace, Value

CONFIGURATION = "config.json"
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")  # digests of 32 bytes that nobody can find a second text for
Weights = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """`model` and `revision` identify KV; a `revision` changes with the weights. In place of both, or of the revision,
    `weights` is the folder that the weights are in. `hash` is the digest that keys are. Raises ConfigurationError.
    """

    model: str | None = None
    revision: str | None = None
    weights: Weights | None = None
    hash: str = "sha256"

    PLACE: ClassVar[str] = "tier"  # in sentences

    def __post_init__(self) -> None:
        check_hash(self.hash)
        for name, value in ("model", self.model), ("revision", self.revision):
            if value is not None:
                check_text(f"{name} of a {self.PLACE}", value)
        if self.weights is not None and self.revision is not None:
            raise ConfigurationError(
                f"weights={os.fspath(self.weights)!r} makes a revision, and {self.revision!r} is given, too; leave one "
                "of them out"
            )

    @property
    def identity(self) -> tuple[str, str]:
        """A model and a revision. Raises ConfigurationError where it is not known which weights these are."""
        if self.weights is not None:
            path = Path(self.weights).resolve()
            return self.model or path.name, _revision_of(path, self.PLACE)
        if self.model is None or self.revision is None:
            missing = "model" if self.model is None else "revision"
            raise ConfigurationError(
                f"a {self.PLACE} serves whoever names the same model and revision, and {missing} is missing: give it "
                "model=... and revision=... (another one whenever the weights change), or weights=... (the folder they "
                "are in)"
            )
        return self.model, self.revision

    def namespace(
        self, planner: "HybridChunkPlanner", *, dtype: str, ranks: int, extra: "Mapping[str, Value]"
    ) -> "Namespace":
        """The namespace of this KV, as `namespace_of`. Raises ConfigurationError where the identity is not known."""
        from cpu_prefix_cache.slab.namespace import namespace_of

        model, revision = self.identity
        return namespace_of(
            planner, model=model, revision=revision, dtype=dtype, hash=self.hash, ranks=ranks, extra=extra
        )


def check_hash(name: str) -> None:
    """Raise ConfigurationError unless keys by this digest may be kept on disk (rule 14)."""
    if name not in CRYPTOGRAPHIC:
        raise ConfigurationError(
            f"bytes on disk are served by their key alone, so keys must be digests by {' or '.join(CRYPTOGRAPHIC)}, "
            f"and {name!r} is none; set the engine's prefix hash to sha256"
        )


def _revision_of(path: Path, place: str) -> str:
    try:
        weights = weights_in(path)
    except OSError as error:
        raise ConfigurationError(f"the weights that name a {place} cannot be read: {error}") from error
    if weights is None:
        raise ConfigurationError(
            f"{path} has no weight files, so it names no weights; give the {place} the folder that the model was "
            "loaded from, or a model=... and a revision=..."
        )
    configuration = path / CONFIGURATION
    if not configuration.is_file():
        return weights
    return f"{weights}, configuration {hashlib.sha256(configuration.read_bytes()).hexdigest()}"
