"""Reads a model's config.json, as Hugging Face writes it, or what is known by a name (named_models.py).

If the language model is one part of several, its values are in a `text_config`, which override those around it. Values
of a `linear_attn_config` have its name and a dot before theirs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.named_models import NAMED

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}
MOST = 10**12  # of a number in a configuration
LINEAR = "linear_attn_config"
NO_WINDOW = {"use_sliding_window": False}

# Values that published configurations leave out, because they are defaults of the class that reads them.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "head_dim": 64},
    "kimi_linear": {"mamba_ssm_dtype": "float32"},
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
    """The values of one configuration. `family` is its model_type without the suffix of a model's language part."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        text = values.get("text_config")
        merged = {**values, **{name: value for name, value in text.items() if value is not None}} if text else values
        part = merged.get(LINEAR)
        if isinstance(part, Mapping):
            merged = {**merged, **{f"{LINEAR}.{name}": value for name, value in part.items()}}
        self.family = str(merged.get("model_type", "")).removesuffix("_text")
        self.values: Mapping[str, Any] = {**DEFAULTS.get(self.family, {}), **_without_nulls(merged)}

    @classmethod
    def read(cls, path: Path) -> "ModelConfig":
        """Read a config.json, or the one in a folder; or take the shape of a model that is known by its name.

        Raises ConfigurationError if it is missing or malformed.
        """
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            return cls(_named(file))
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
        """The value of the first name that is given, else `default`.

        Raises ConfigurationError if it is no whole number of at least 1, or neither a value nor a default is given.
        """
        for name in names:
            if name in self.values:
                value = self.values[name]
                if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST:
                    return value
                raise self.refused(f"its {name} is {value!r}, where one number for all layers was expected")
        if default is None:
            raise self.refused(f"it has no {names[0]}")
        return default

    def count(self, name: str) -> int:
        """A whole number of at least 0; 0 if it is not given. Raises ConfigurationError for any other value."""
        value = self.values.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            raise self.refused(f"its {name} is {value!r}, where a whole number was expected")
        return value

    def words(self, name: str) -> Sequence[str]:
        """A list with a word for each layer; empty if not given. Raises ConfigurationError for any other value."""
        value = self.values.get(name) or ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.refused(f"its {name} is not a list with a word for each layer")
        return [str(each) for each in value]

    def indices(self, name: str) -> frozenset[int]:
        """A list of layers, counted from 0; empty if not given. Raises ConfigurationError for any other value."""
        value = self.values.get(name) or ()
        if not isinstance(value, Sequence) or not all(isinstance(each, int) for each in value):
            raise self.refused(f"its {name} is not a list of layers")
        return frozenset(value)

    def item_bytes(self, *names: str) -> int:
        """Bytes of a number: of the dtype under the first of `names`, else of the model's dtype, else of bfloat16.

        Raises ConfigurationError for an unknown dtype.
        """
        return bytes_of(self.dtype(*names))

    def dtype(self, *names: str) -> str:
        """Dtype under the first of `names`, else the model's, else bfloat16, as torch names it."""
        for name in (*names, "dtype", "torch_dtype"):
            value = self.values.get(name)
            if value is not None and value != "auto":
                return str(value).removeprefix("torch.")
        return "bfloat16"

    def refused(self, reason: str) -> ConfigurationError:
        """The error to raise if the model's KV state does not follow from its configuration with certainty."""
        return ConfigurationError(
            f"cannot tell from its configuration what a model of type {self.family!r} keeps: {reason}; "
            "give --bytes-per-token instead"
        )


def _named(path: Path) -> Mapping[str, Any]:
    """Raises ConfigurationError for another name."""
    values = NAMED.get(str(path).lower())
    if values is None:
        raise ConfigurationError(
            f"there is no file {path}, and no model of that name is known: give the model's config.json, or one of "
            f"{', '.join(NAMED)}"
        )
    return values


def bytes_of(dtype: str) -> int:
    """Bytes of a number of this dtype. Raises ConfigurationError for an unknown one."""
    if dtype not in ITEM_BYTES:
        raise ConfigurationError(f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
