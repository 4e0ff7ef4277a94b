"""The identity of the KV that a tier holds: the name of a model, and a revision that changes with its weights.

    model, revision   as they are given
    weights           a folder or a file that the weights were loaded from: its name unless a model is given, what its
                      weight files are, and the configuration beside them

There is no default. Two fine-tunes of one architecture have the same shapes and, with one tokenizer, the same keys: a
tier without an identity serves the KV of one to the other.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.slab.weights import weights_in

CONFIGURATION = "config.json"
Weights = str | os.PathLike[str]


class Identity(NamedTuple):
    model: str
    revision: str


def check_identity(model: str | None, revision: str | None, weights: Weights | None, *, place: str = "tier") -> None:
    """Raise ConfigurationError for what can name no weights, whatever it is that a caller still adds."""
    for name, value in ("model", model), ("revision", revision):
        if value is not None:
            check_text(f"{name} of a {place}", value)
    if weights is not None and revision is not None:
        raise ConfigurationError(
            f"weights={os.fspath(weights)!r} makes a revision, and {revision!r} is given, too; leave one of them out"
        )


def identity_of(model: str | None, revision: str | None, weights: Weights | None, *, place: str = "tier") -> Identity:
    """Raises ConfigurationError where it is not known which weights these are."""
    if weights is not None:
        path = Path(weights).resolve()
        return Identity(model or path.name, _revision_of(path, place))
    for name, value in ("model", model), ("revision", revision):
        if value is None:
            raise ConfigurationError(
                f"a {place} serves whoever names the same model and revision, and {name} is missing: give it model=... "
                "and revision=... (another one whenever the weights change), or weights=... (the folder they are in)"
            )
    return Identity(str(model), str(revision))


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
