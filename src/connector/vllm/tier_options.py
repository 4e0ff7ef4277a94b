"""The option `tier` under vLLM: what it says is checked in `connector/tier/options.py`, and here what vLLM must be.

What outlives a process is found by its key alone. So the tier is refused where the same prompt has other keys after a
restart, where keys are no cryptographic digests (rule 17), and where equal keys may stand for other bytes.
"""

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from connector.tier.options import check_options, file_tier
from connector.vllm import versions
from connector.vllm.weights import weights_of_all
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab.settings import CRYPTOGRAPHIC, FileTier

SEED = "PYTHONHASHSEED"


def tier_of(said: Any, vllm_config: VllmConfig) -> FileTier:
    """The tier that the option describes, for this engine. Raises ConfigurationError."""
    check_options(said)
    _check_keys(vllm_config.cache_config.prefix_caching_hash_algo)
    _check_bytes(vllm_config, said)
    return file_tier(
        said,
        engine=vllm_config.parallel_config.data_parallel_index,
        model=vllm_config.model_config.model,
        weights=lambda: weights_of_all(vllm_config),
        hash=vllm_config.cache_config.prefix_caching_hash_algo,
    )


def _check_keys(algorithm: str) -> None:
    """Raises ConfigurationError unless a prompt has the same cryptographic keys in every process."""
    if algorithm not in CRYPTOGRAPHIC:
        raise ConfigurationError(
            f"a tier needs cryptographic keys, and vLLM hashes with {algorithm!r}; start it with "
            f"--prefix-caching-hash-algo {CRYPTOGRAPHIC[0]}"
        )
    if versions.CHAINS_BEGIN_AT_RANDOM and os.environ.get(SEED) is None:
        raise ConfigurationError(
            f"this release of vLLM begins its chains of hashes at random, so nothing in the tier would be found after "
            f"a restart; set {SEED}=0 in the environment of vLLM, always to the same number"
        )


def _check_bytes(vllm_config: VllmConfig, said: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where the bytes of a block depend on more than its key and the namespace say."""
    if versions.measures_scales(vllm_config.cache_config):
        raise ConfigurationError(
            "with calculate_kv_scales each process has scales of its own, and a tier does not keep them; leave it out"
        )
    if vllm_config.lora_config is not None and "revision" not in said:
        raise ConfigurationError(
            "with LoRA keys have the adapters' names, and not their weights; give the tier a revision, and another "
            "one whenever an adapter is replaced under its name"
        )
