"""Identity of KV that a tier keeps beyond the process: a name for people, and a revision that changes with the weights.

The revision is a digest of the configuration, of every parameter and buffer (name, dtype, shape, all bytes), and of the
fields of PEFT's layers for adapters. No sample would do: training may change a few rows alone. A path says nothing: a
checkpoint that has moved finds its own. With each revision, also one that is given, go the configuration, the release
of transformers, whose code computes, and the bytes of code that came with the model (`trust_remote_code`).
"""

import inspect
from dataclasses import replace
from pathlib import Path

import torch
import transformers
import xxhash
from transformers import PreTrainedModel
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from connector.tier.namespace import digest, digest_of_files
from connector.transformers.changes import adapters_of, plain
from cpu_prefix_cache import ConfigurationError, FileTier, SharedTier

CHUNK_BYTES = 64 << 20  # of a tensor, brought to the host at once


def model_name(model: PreTrainedModel) -> str:
    """Source from which the checkpoint was loaded, or its kind."""
    return model.config.name_or_path or str(model.config.model_type)


def weights_revision(model: PreTrainedModel) -> str:
    """32 hexadecimal digits. Reads all weights, from their device: 0.2 s for each GB in the memory of a CPU."""
    lines = [digest(model.config.to_dict())]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_digest(tensor)}")
    lines += [f"{name} {adapters}" for name, each in model.named_modules() if (adapters := adapters_of(each))]
    return digest(lines)[:32]


def with_code(revision: str, model: PreTrainedModel) -> str:
    """The revision, and what else decides what the model computes. Raises ConfigurationError for unreadable code."""
    configuration = digest(model.config.to_dict())[:32]
    return f"{revision}, transformers {transformers.__version__}, configuration {configuration}{_own_code(model)}"


def _own_code(model: PreTrainedModel) -> str:
    """A digest of code that came with the model, which transformers has copied to a folder; empty without any."""
    kind = type(model)
    if not kind.__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."):
        return ""
    folder = Path(inspect.getfile(kind)).parent
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.py")}
    return f", code {digest_of_files('code of the model', files)[:32]}"


def _digest(tensor: torch.Tensor) -> str:
    found = xxhash.xxh3_128()
    for part in plain([tensor]):
        for chunk in part.detach().reshape(-1).split(CHUNK_BYTES // part.element_size()):
            found.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def named(below: FileTier | SharedTier, model: PreTrainedModel) -> FileTier | SharedTier:
    """The tier of this model, with the names that are given for it and for its weights."""
    tier = below if below.model or below.weights else replace(below, model=model_name(model))
    tier = tier if tier.revision or tier.weights else replace(tier, revision=weights_revision(model))
    name, revision = tier.identity
    return replace(tier, model=name, revision=with_code(revision, model), weights=None)


def longest(model: PreTrainedModel, given: int | None) -> int:
    """The most tokens of a prompt: `given`, or those of the configuration. Raises ConfigurationError."""
    config, name = model.config.get_text_config(decoder=True), "max_position_embeddings"
    said = config.to_dict().get(config.attribute_map.get(name, name))
    most = said if given is None else given
    if most is None:
        raise ConfigurationError(
            f"the configuration of {type(model).__name__} does not say how long a prompt may be: give max_model_len"
        )
    if most < 1 or (said is not None and most > said):
        raise ConfigurationError(f"max_model_len must be from 1 to {said or 'any number'}, got {given}")
    return int(most)


def renewed(model: PreTrainedModel, revisions: set[str | None]) -> str | None:
    """The revision of the weights now, for a store that engines share, which is added to those that were. None if it is
    one of them: nothing stored until now is to be found under it.
    """
    revision = with_code(weights_revision(model), model)
    is_new = revision not in revisions
    revisions.add(revision)
    return revision if is_new else None
