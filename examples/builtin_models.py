"""The small built-in models of the option --arch: random weights whose output depends on the past, and a fast prefill.

    full      llama          attention over everything
    swa       gemma3         three layers with a sliding window of 128 tokens, then one of full attention
    hybrid    qwen3_5        three layers of linear attention, then one of full attention
    mla       deepseek_v3    latent attention: K and V of different widths, one head

All are dense, because on a CPU experts make the prefill of a small model five times as slow.
"""

from transformers import PreTrainedModel

from cpu_prefix_cache import ConfigurationError
from random_models import build_family

WINDOW = 128
ARCHITECTURES = {"full": "llama", "swa": "gemma3", "hybrid": "qwen3_5", "mla": "deepseek_v3_dense"}


def build_model(arch: str, *, hidden: int = 256, layers: int = 4, seed: int = 0) -> PreTrainedModel:
    """A float32 model of one of ARCHITECTURES. Raises ConfigurationError for others."""
    if arch not in ARCHITECTURES:
        raise ConfigurationError(f"unknown arch {arch!r}; known are {', '.join(ARCHITECTURES)}")
    return build_family(ARCHITECTURES[arch], hidden=hidden, layers=layers, window=WINDOW, seed=seed)
