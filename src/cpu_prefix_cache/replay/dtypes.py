"""How many bytes a number takes, by the names that configurations and engines give to its type."""

from collections.abc import Mapping

from cpu_prefix_cache.errors import ConfigurationError
from cpu_prefix_cache.replay.model_config import ModelConfig

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}


def bytes_of(dtype: str) -> int:
    """Raises ConfigurationError for a type that is not known."""
    if dtype not in ITEM_BYTES:
        raise ConfigurationError(f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def item_bytes(config: ModelConfig, *names: str) -> int:
    """Of the type that the first of `names` in the configuration says, else the model's own; bfloat16 without any."""
    for name in (*names, "dtype", "torch_dtype"):
        value = config.values.get(name)
        if value is not None and value != "auto":
            return bytes_of(str(value).removeprefix("torch."))
    return bytes_of("bfloat16")
