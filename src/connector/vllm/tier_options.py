"""The option `tier`: what the operator says of the tier below host memory, checked when vLLM starts.

    "tier": {"kind": "file", "path": "/nvme/kv", "bytes": 1099511627776}

What outlives a process is found by its key alone. So the tier is refused where the same prompt has other keys after a
restart, where keys are no cryptographic digests (rule 17), and where equal keys may stand for other bytes.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import ParallelConfig, VllmConfig

from connector.vllm import versions
from connector.vllm.weights import weights_of_all
from cpu_prefix_cache import OFFLOAD_MODES, ConfigurationError
from cpu_prefix_cache.slab.settings import CRYPTOGRAPHIC, KINDS, FileTier

TIER = "tier"
REQUIRED = ("kind", "path", "bytes")
TEXTS = ("kind", "path", "offload", "model", "revision")
KNOWN = (*REQUIRED, *(name for name in TEXTS if name not in REQUIRED))
SEED = "PYTHONHASHSEED"


def tier_of(said: Any, vllm_config: VllmConfig) -> FileTier:
    """The tier that the option describes, for this engine. Raises ConfigurationError."""
    check_options(said)
    _check_keys(vllm_config.cache_config.prefix_caching_hash_algo)
    _check_bytes(vllm_config, said)
    return FileTier(
        str(engine_folder(said["path"], vllm_config.parallel_config)),
        said["bytes"],
        model=said.get("model", vllm_config.model_config.model),
        revision=said["revision"] if "revision" in said else weights_of_all(vllm_config),
        hash=vllm_config.cache_config.prefix_caching_hash_algo,
        offload=said.get("offload"),
    )


def check_options(said: Any) -> None:
    """Raises ConfigurationError for a key that is missing, unknown or of another type."""
    if not isinstance(said, Mapping):
        raise ConfigurationError(f"{TIER} is a dictionary with {', '.join(REQUIRED)}; got {said!r}")
    unknown = sorted(set(said) - set(KNOWN))
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r} in {TIER}; known keys are {', '.join(KNOWN)}")
    if "kind" in said and said["kind"] not in KINDS:
        raise ConfigurationError(f"unknown kind of tier {said['kind']!r}; known is {', '.join(KINDS)}")
    missing = [name for name in REQUIRED if name not in said]
    if missing:
        raise ConfigurationError(f"{TIER} needs {missing[0]}; its keys are {', '.join(REQUIRED)}, and optional others")
    for name in TEXTS:
        if name in said and (type(said[name]) is not str or not said[name]):
            raise ConfigurationError(f"{name} of the tier is a text, got {said[name]!r}")
    if type(said["bytes"]) is not int or said["bytes"] < 1:
        raise ConfigurationError(f"bytes of the tier is a whole number, at least 1; got {said['bytes']!r}")
    if said.get("offload", OFFLOAD_MODES[0]) not in OFFLOAD_MODES:
        raise ConfigurationError(f"offload of the tier is one of {', '.join(OFFLOAD_MODES)}; got {said['offload']!r}")


def engine_folder(path: str, parallel: ParallelConfig) -> Path:
    """Engines under data parallelism have the same options, and each needs files of its own."""
    number = parallel.data_parallel_index
    return Path(path) / f"engine-{number}" if number else Path(path)


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
