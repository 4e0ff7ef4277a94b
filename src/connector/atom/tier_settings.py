"""The option `tier` under ATOM: the identity of its bytes. The option itself is in `connector/tier/options.py`.

What must be equal for KV of one process to be served by another, beside what every engine has (`namespace.py`):

    the engine    release, what the model computes with, the dtypes of its KV, tensor and context parallel ranks
    each rank     how the bytes of its blocks lie, and its device (rank_tier.py)
"""

import os
from importlib import metadata
from typing import Any

from connector.atom.geometry import block_tokens
from connector.tier.cache import EngineTier
from connector.tier.namespace import digest
from connector.tier.options import TierOption
from connector.tier.weights import weights_of
from cpu_prefix_cache import ConfigurationError, FileTier, SharedTier
from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.tier import Namespace, Value

HASH = "sha256"  # of the keys, where there is a tier (rule 14)
# By these ATOM's kernels put the same KV in another order into tensors of the same shape.
LAYOUT_VARIABLES = (
    "ATOM_USE_TRITON_MLA",
    "ATOM_USE_TRITON_MLA_SHUFFLE_KV",
    "ATOM_MLA_PAGE_SIZE",
    "ATOM_USE_UNIFIED_ATTN",
)


def tier_of(option: TierOption, config: Any) -> FileTier | SharedTier:
    """The tier of this engine. Raises ConfigurationError."""
    return option.of_engine(
        config.parallel_config.data_parallel_rank,
        model=config.model,
        weights=lambda: _weights(config),
        hash=HASH,
    )


def tier_settings(option: TierOption, config: Any, planner: HybridChunkPlanner) -> EngineTier:
    """Each rank has bytes of its own. Raises ConfigurationError."""
    tier = tier_of(option, config)
    return EngineTier(tier, _namespace(tier, config, planner), config.tp_world_size)


def _namespace(tier: FileTier | SharedTier, config: Any, planner: HybridChunkPlanner) -> Namespace:
    extra: dict[str, Value] = {
        "engine": f"atom {_release()}",
        "model dtype": str(config.torch_dtype),
        "index dtype": str(config.index_cache_dtype),
        "model configuration": digest(config.hf_config.to_dict()),
        "online quantization": digest(config.online_quant_config or {}),
        "drafter": _drafter(config.speculative_config),
        "tensor parallel ranks": config.tensor_parallel_size,
        "context parallel ranks": config.decode_context_parallel_size,
        "context parallel interleave": config.dcp_config.interleave_size,
        **{name: os.environ.get(name) or "unset" for name in LAYOUT_VARIABLES},
        "hash tokens": block_tokens(config),
    }
    return tier.namespace(planner, dtype=str(config.kv_cache_dtype), ranks=config.tp_world_size, extra=extra)


def _weights(config: Any) -> str:
    """Weights of the model, and of the one that drafts, which has KV of its own. Raises ConfigurationError."""
    if config.load_dummy:
        raise ConfigurationError(
            "with load_dummy each process may have weights of its own; give the tier a revision, or leave it out"
        )
    weights, speculative = [weights_of(config.model, config.hf_config)], config.speculative_config
    if speculative is not None and speculative.model is not None and speculative.model != config.model:
        weights.append(weights_of(speculative.model, speculative.draft_model_hf_config))
    return ", ".join(weights)


def _drafter(speculative: Any) -> str:
    if speculative is None:
        return "none"
    draft = speculative.draft_model_hf_config
    return f"{speculative.method} {speculative.model} {digest({} if draft is None else draft.to_dict())}"


def _release() -> str:
    try:
        return metadata.version("atom")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "unknown"
