"""Small models with random weights in which the past matters.

The usual initialisation of a transformers class (standard deviation 0.02, tied embeddings) hides wrong KV: the same
tokens come out whatever the cache holds. Here embeddings are N(0, 1) and every matrix N(0, 1 / fan_in), queries and
keys half as much again, so that attention is sharp and a damaged block shows in the logits.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cpu_prefix_cache import ConfigurationError

SHARP = ("q_proj", "k_proj")
VOCABULARY = 320  # the 256 bytes, and room
MAX_MODEL_LEN = 8192


def build_model(arch: str, *, hidden: int = 256, layers: int = 4, seed: int = 0) -> PreTrainedModel:
    """A float32 model of one of ARCHITECTURES. Raises ConfigurationError for others."""
    if arch not in ARCHITECTURES:
        raise ConfigurationError(f"arch {arch!r} is not built yet; there is {', '.join(ARCHITECTURES)}")
    torch.manual_seed(seed)
    model = ARCHITECTURES[arch](hidden, layers).eval()
    _initialise(model)
    return model


def _llama(hidden: int, layers: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


ARCHITECTURES = {"full": _llama}


@torch.no_grad()
def _initialise(model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        if "embed" in name:
            weight.normal_()
        elif weight.dim() == 2:
            gain = 1.5 if any(part in name for part in SHARP) else 1.0
            weight.normal_(std=gain / weight.shape[1] ** 0.5)
