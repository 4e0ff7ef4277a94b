"""A model's config.json, as Hugging Face writes it: looked up by name, and refused by name when something is missing.

Where the language model is one part of several, its values lie in a `text_config`, whose names win over those around
it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}
NO_WINDOW = {"use_sliding_window": False}

# What published configurations leave out, because it is the default of the class that reads them.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "head_dim": 64},
    "llama4": {"attention_chunk_size": 8192},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32"},
    "qwen2": NO_WINDOW,
    "qwen2_5_vl": NO_WINDOW,
    "qwen2_moe": NO_WINDOW,
    "qwen2_vl": NO_WINDOW,
    "qwen3": NO_WINDOW | {"head_dim": 128},
    "qwen3_moe": NO_WINDOW | {"head_dim": 128},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {"head_dim": 256},
    "qwen3_next": {"head_dim": 256},
}


class ModelConfig:
    """One model's numbers. `family` is its model_type without the suffix that marks the language part of a model."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        text = values.get("text_config")
        merged = {**values, **{name: value for name, value in text.items() if value is not None}} if text else values
        self.family = str(merged.get("model_type", "")).removesuffix("_text")
        self.values: Mapping[str, Any] = {**DEFAULTS.get(self.family, {}), **_given(merged)}

    @classmethod
    def read(cls, path: Path) -> "ModelConfig":
        """From a config.json or a folder with one. Raises ConfigurationError when there is none, or it is no object."""
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read the model's configuration: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{file} is not JSON: {error}") from error
        if not isinstance(values, dict) or not isinstance(values.get("text_config") or {}, dict):
            raise ConfigurationError(f"{file} is not the configuration of a model")
        if not (values.get("text_config") or values).get("model_type"):
            raise ConfigurationError(f"{file} names no model_type, so what its layers keep is not known")
        return cls(values)

    def has(self, name: str) -> bool:
        """Whether it has a value that is not null, false, zero or empty."""
        return bool(self.values.get(name))

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these that is given: a whole number of at least 1. Raises ConfigurationError."""
        for name in names:
            if name in self.values:
                value = self.values[name]
                if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                    return value
                raise self.refused(f"its {name} is {value!r}, where one number for all layers was expected")
        if default is None:
            raise self.refused(f"it has no {names[0]}")
        return default

    def words(self, name: str) -> Sequence[str]:
        """A list of words, one for each layer; empty if it is not given. Raises ConfigurationError."""
        value = self.values.get(name) or ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.refused(f"its {name} is not a list with a word for each layer")
        return [str(each) for each in value]

    def indices(self, name: str) -> frozenset[int]:
        """A list of layers, counted from 0; empty if it is not given. Raises ConfigurationError."""
        value = self.values.get(name) or ()
        if not isinstance(value, Sequence) or not all(isinstance(each, int) for each in value):
            raise self.refused(f"its {name} is not a list of layers")
        return frozenset(value)

    def item_bytes(self, *names: str) -> int:
        """What a number takes of the type that the first of `names` says, else of the model's own, else of bfloat16.

        Raises ConfigurationError.
        """
        for name in (*names, "dtype", "torch_dtype"):
            value = self.values.get(name)
            if value is not None and value != "auto":
                return bytes_of(str(value).removeprefix("torch."))
        return bytes_of("bfloat16")

    def refused(self, reason: str) -> ConfigurationError:
        """What to raise: why this model's KV state is not known for certain, and what to do."""
        return ConfigurationError(
            f"cannot tell from its configuration what a model of type {self.family!r} keeps: {reason}; "
            "give --bytes-per-token instead"
        )


def bytes_of(dtype: str) -> int:
    """What a number takes, by the name that configurations and engines give to its type. Raises ConfigurationError."""
    if dtype not in ITEM_BYTES:
        raise ConfigurationError(f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
