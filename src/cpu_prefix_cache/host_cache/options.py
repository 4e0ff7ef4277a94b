"""Options of a HostCache: what each must be, so that another value ends in a sentence that names it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import is_whole
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.pool.admission import NO_THRESHOLDS, Thresholds


class _Kind(NamedTuple):
    words: str
    has: Callable[[object], bool]


def _whole(least: int, unit: str = "tokens") -> _Kind:
    return _Kind(f"a whole number of {unit}, at least {least}", lambda value: is_whole(value, least))


def _a(kind: type, words: str) -> _Kind:
    return _Kind(words, lambda value: isinstance(value, kind))


def _or_none(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.words}, or None", lambda value: value is None or kind.has(value))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0  # NaN is not


# A class has the members of its instances, and is none.
_DEVICE = _Kind(
    "an instance of QueueDevice, PooledDevice or another Device",
    lambda value: isinstance(value, Device) and not isinstance(value, type),
)
_OPTIONS: Mapping[str, _Kind] = {
    "device": _DEVICE,
    "host_bytes": _whole(0, "bytes (48 GiB are 48 << 30)"),
    "max_model_len": _whole(1),
    "chunk_tokens": _or_none(_whole(1)),
    "max_step_tokens": _whole(1),
    "policy": _a(str, "the name of a policy"),
    "thresholds": _a(Thresholds, "Thresholds(store_after=..., min_store_tokens=...)"),
    "checkpoint_interval": _or_none(_whole(1)),
    "min_load_tokens": _or_none(_whole(0)),
    "threads": _or_none(_a(bool, "True, False")),
    "load_seconds": _or_none(_Kind("a number of seconds above 0", _is_positive)),
    "strict": _a(bool, "True or False"),
    "wrap_copier": _or_none(_Kind("a function of the copier and the tensors", callable)),
}


def check_options(**given: object) -> None:
    """Raise ConfigurationError for the first option that is not what it must be."""
    for name, value in given.items():
        if not _OPTIONS[name].has(value):
            raise ConfigurationError(f"{name} must be {_OPTIONS[name].words}, got {value!r}")


def check_pool_options(**given: object) -> None:
    """Raise ConfigurationError for the first option that an engine does not choose in the pool of a node."""
    usual = {
        "offload": "eager",
        "policy": "lru",
        "thresholds": NO_THRESHOLDS,
        "min_load_tokens": given["min_load_tokens"],
    }
    for name, value in given.items():
        if value != usual.get(name):
            raise ConfigurationError(
                f"with a pool {name} must be {usual.get(name)!r}, got {value!r}: how large it is, and what leaves it, "
                "is the keeper's choice, and what is computed is stored at once"
            )
    if given["min_load_tokens"] is None:
        raise ConfigurationError("with a pool min_load_tokens must be a number: no rate is measured for it")
