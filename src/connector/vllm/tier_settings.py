"""Facts that both halves know of the tier under vLLM."""

from vllm.config import VllmConfig

from connector.tier.cache import EngineTier
from connector.tier.options import TierOption
from connector.vllm.tier_namespace import engine_namespace
from connector.vllm.tier_options import tier_of
from cpu_prefix_cache.deciding import HybridChunkPlanner


def tier_settings(
    option: TierOption, vllm_config: VllmConfig, planner: HybridChunkPlanner, hash_tokens: int, owners: int
) -> EngineTier:
    """Settings for an engine of which `owners` ranks have bytes of their own. Keys are of hashes of so many tokens.

    Raises ConfigurationError.
    """
    said = tier_of(option, vllm_config)
    namespace = engine_namespace(said, planner, vllm_config, hash_tokens, owners)
    return EngineTier(said, namespace, owners)
