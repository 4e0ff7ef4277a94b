"""Whose KV a tier keeps beyond the process: a name for people, and a revision that changes with the weights.

The revision is a digest of the configuration and of every parameter and buffer: its name, dtype, shape, and first
bytes. Weights that were trained or merged differ there. A path says nothing: a checkpoint that has moved finds its own.
"""

import hashlib
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

SAMPLE_BYTES = 1 << 16  # of each tensor
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # of a configuration
LENGTH_BYTES = 8


def model_name(model: PreTrainedModel) -> str:
    """What the checkpoint was loaded from, or its kind."""
    return model.config.name_or_path or str(model.config.model_type)


def weights_revision(model: PreTrainedModel) -> str:
    """32 hexadecimal digits. Reads a sample of each tensor, from its device."""
    digest = hashlib.sha256()
    for part in _parts(model):
        digest.update(len(part).to_bytes(LENGTH_BYTES, "little") + part)
    return digest.hexdigest()[:32]


def _parts(model: PreTrainedModel) -> Iterable[bytes]:
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    yield repr(sorted(config.items())).encode()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield _sample(tensor)


def _sample(tensor: torch.Tensor) -> bytes:
    count = SAMPLE_BYTES // tensor.element_size()
    first = tensor.detach().reshape(-1)[:count].cpu().contiguous()
    return bytes(first.view(torch.uint8).numpy().data)
