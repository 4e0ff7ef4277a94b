"""Digests that identify the weights of a model, so that KV on disk is never served to other ones.

    a local folder or file    its weight files (cpu_prefix_cache/slab/weights.py)
    a model of a hub          the commit, which the engine or transformers has resolved

If nothing is known, the operator must give a revision.
"""

from pathlib import Path
from typing import Any

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.tier import weights_in

COMMIT_DIGITS = 40


def weights_of(model: str, hf_config: Any, revision: str | None = None, place: str = "tier") -> str:
    """A text that changes with the weights. `hf_config` is None where its commit is not theirs.

    Raises ConfigurationError if nothing identifies them.
    """
    files = weights_in(Path(model))
    if files is not None:
        return files
    commit = None if hf_config is None else vars(hf_config).get("_commit_hash")
    for known in (commit, revision):
        if known is not None and len(known) == COMMIT_DIGITS and not set(known) - set("0123456789abcdef"):
            return f"commit {known}"
    raise ConfigurationError(
        f"nothing tells which weights {model!r} has: no weight files are there, and no commit is known; "
        f"give the {place} a revision, and another one whenever the weights change"
    )
