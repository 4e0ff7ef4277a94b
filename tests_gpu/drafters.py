"""Drafters with random weights for the models of `vllm_equality.py`, as vLLM reads them.

eagle   one Llama layer in a folder of its own, with the heads of the model's full attention
mtp     a layer of the model's own shape, whose weights are among the model's, under `mtp.`
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests_vllm.models import initialise

DRAFTS = 2  # tokens at a time
FOLDER = "drafter"  # in that of the model


def save_eagle(model: Any, folder: Path) -> None:
    """vLLM shares embeddings and output with the model, and gives the layer no norm before its attention."""
    of = model.config
    config = transformers.LlamaConfig(
        vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        intermediate_size=of.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        head_dim=of.head_dim,
        max_position_embeddings=of.max_position_embeddings,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    layer = transformers.LlamaForCausalLM(config)
    initialise(layer)
    weights = {
        name.removeprefix("model."): weight
        for name, weight in layer.state_dict().items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    config.save_pretrained(folder / FOLDER)
    weights["fc.weight"] = _joining(of.hidden_size)
    _save(weights, folder / FOLDER / "model.safetensors")


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
    weights["mtp.fc.weight"] = _joining(model.config.hidden_size)
    file = folder / "model.safetensors"
    _save(load_file(file) | weights, file)


def _joining(hidden: int) -> torch.Tensor:
    return torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5


def _save(weights: dict[str, torch.Tensor], file: Path) -> None:
    copies = {name: weight.detach().to(torch.bfloat16).clone() for name, weight in weights.items()}
    save_file(copies, file, {"format": "pt"})


DRAFTERS = {"eagle": save_eagle, "mtp": save_mtp}


def speculative(method: str, folder: Path) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    where = {"model": str(folder / FOLDER)} if method == "eagle" else {}
    return {"method": method, "num_speculative_tokens": DRAFTS, **where}
