"""Digests that identify the weights of an engine's models. One that drafts has KV of its own, and counts, too."""

from typing import Any

from vllm.config import VllmConfig

from connector.tier.weights import weights_of
from cpu_prefix_cache import ConfigurationError

# Formats that are read from the files of the model's folder, or of its commit. Dummies are random, also where nothing
# sets them; others come from where their own options say; and a daemon (ipc_cache) hands out what it read when it was
# started, to whoever has files with the same names and shapes.
FORMATS = (
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
)


def weights_of_all(vllm_config: VllmConfig, place: str = "tier") -> str:
    """A text that changes with the weights of the model, and of the one that drafts, for a `place` that names them.

    Raises ConfigurationError.
    """
    _check_formats(vllm_config, place)
    draft = drafter_of(vllm_config)
    of_models = [vllm_config.model_config] if draft is None else [vllm_config.model_config, draft]
    return ", ".join(weights_of(source_of(each), _config_beside(each), _revision(each), place) for each in of_models)


def source_of(model: Any) -> str:
    """Folder, name on a hub or address that the weights come from. What else is there of an address vLLM copies to a
    folder in the user's cache, which it then takes for the model.
    """
    return str(model.model_weights or model.model)


def _config_beside(model: Any) -> Any:
    """The configuration, whose commit is that of the weights, too. None where it is of another repository."""
    return model.hf_config if source_of(model) == model.model == (model.hf_config_path or model.model) else None


def _revision(model: Any) -> str | None:
    """The revision of the weights. None where that of the model is another repository's."""
    return model.revision if source_of(model) == model.model else None


def _check_formats(vllm_config: VllmConfig, place: str) -> None:
    """Raises ConfigurationError where files do not tell which weights are loaded."""
    speculative = vllm_config.speculative_config
    drafts = None if speculative is None else speculative.draft_load_config
    for format in (str(load.load_format) for load in (vllm_config.load_config, drafts) if load is not None):
        if format not in FORMATS:
            raise ConfigurationError(
                f"with load_format {format!r} weights are not those of the model's files; give the {place} a revision, "
                "and another one for each change of the weights, or leave it out"
            )


def drafter_of(vllm_config: VllmConfig) -> Any:
    """The configuration of the model that drafts; None without one."""
    speculative = vllm_config.speculative_config
    return None if speculative is None else speculative.draft_model_config
