"""The option `tier` under vLLM: it is checked in `connector/tier/options.py`, and vLLM's own configuration here.

What outlives a process is found by its key alone. So the tier is refused where keys are no cryptographic digests
(rule 14), and where equal keys may stand for other bytes.
"""

from vllm.config import VllmConfig

from connector.tier.options import TierOption
from connector.vllm.weights import source_of, weights_of_all
from cpu_prefix_cache import ConfigurationError, FileTier, SharedTier
from cpu_prefix_cache.tier import CRYPTOGRAPHIC


def tier_of(option: TierOption, vllm_config: VllmConfig) -> FileTier | SharedTier:
    """The tier that the option describes, for this engine. Raises ConfigurationError."""
    check_names("tier", vllm_config, option.names_weights)
    return option.of_engine(
        vllm_config.parallel_config.data_parallel_index,
        model=source_of(vllm_config.model_config),
        weights=lambda: weights_of_all(vllm_config),
        hash=vllm_config.cache_config.prefix_caching_hash_algo,
    )


def check_names(place: str, vllm_config: VllmConfig, names_weights: bool) -> None:
    """Raises ConfigurationError unless keys are cryptographic, when vLLM has the same ones in every process, and where
    the bytes of a block depend on more than its key and the namespace. `place` is what has them.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in CRYPTOGRAPHIC:
        raise ConfigurationError(
            f"a {place} needs cryptographic keys, and vLLM hashes with {algorithm!r}; start it with "
            f"--prefix-caching-hash-algo {CRYPTOGRAPHIC[0]}"
        )
    if vllm_config.lora_config is not None and not names_weights:
        raise ConfigurationError(
            f"with LoRA keys have the adapters' names, and not their weights; give the {place} a revision, and another "
            "one whenever an adapter is replaced under its name"
        )
