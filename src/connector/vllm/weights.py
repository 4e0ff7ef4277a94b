"""Digests that identify the weights of an engine's models. One that drafts has KV of its own, and counts, too."""

from typing import Any

from vllm.config import VllmConfig

from connector.tier.weights import weights_of


def weights_of_all(vllm_config: VllmConfig, place: str = "tier") -> str:
    """A text that changes with the weights of the model, and of the one that drafts, for a `place` that names them.

    Raises ConfigurationError.
    """
    draft = drafter_of(vllm_config)
    of_models = [vllm_config.model_config] if draft is None else [vllm_config.model_config, draft]
    return ", ".join(weights_of(each.model, each.hf_config, each.revision, place) for each in of_models)


def drafter_of(vllm_config: VllmConfig) -> Any:
    """The configuration of the model that drafts; None without one."""
    speculative = vllm_config.speculative_config
    return None if speculative is None else speculative.draft_model_config
