"""Drafters with random weights for the models of `vllm_equality.py`, as vLLM reads them.

eagle   one Llama layer in a folder of its own, with the heads of the model's full attention
mtp     a layer of the model's own shape, whose weights are among the model's, under `mtp.`
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm import models

DRAFTS = 2  # tokens at a time
FOLDER = "drafter"  # in that of the model


def save_eagle(model: Any, folder: Path) -> None:
    of = model.config.to_dict()
    models.save_eagle(folder / FOLDER, {name: of[name] for name in models.SIZES}, "bfloat16")


def save_mtp(model: Any, folder: Path) -> None:
    """A copy of the model's last layer, with other weights."""
    layer = deepcopy(model.model.layers[-1])
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() >= 2:
                weight.copy_(weight.flatten()[torch.randperm(weight.numel())].reshape(weight.shape))
    norm = torch.zeros(model.config.hidden_size)  # it adds 1
    weights = {f"mtp.layers.0.{name}": weight for name, weight in layer.state_dict().items()}
    weights |= {f"mtp.{name}.weight": norm for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    weights["mtp.fc.weight"] = models.joining(model.config.hidden_size)
    copies = {name: weight.detach().to(torch.bfloat16).clone() for name, weight in weights.items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | copies, file, {"format": "pt"})


DRAFTERS = {"eagle": save_eagle, "mtp": save_mtp}


def speculative(method: str, folder: Path) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    where = {"model": str(folder / FOLDER)} if method == "eagle" else {}
    return {"method": method, "num_speculative_tokens": DRAFTS, **where}
