"""HostOptions: choices for a HostCache, each checked, so that another value ends in a sentence that names it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import is_whole
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.offload.device import Device

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.copier.base import Copier

CopierWrapper = Callable[["Copier", Sequence[Sequence["torch.Tensor"]]], "Copier"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions(CacheOptions):
    """CacheOptions, and how a HostCache copies and checks.

    With `threads` (default: on CUDA) copies are submitted by threads of ours, and `begin_step` returns at once. A load
    that takes longer than `load_seconds` has failed. With `strict` a call that has no effect raises MisuseError, and
    each block and number is looked at that a call gives. `wrap_copier` puts something around the copier, for tests.

    Raises ConfigurationError.
    """

    threads: bool | None = None
    load_seconds: float | None = None
    strict: bool = False
    wrap_copier: CopierWrapper | None = None

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)
        check_options(
            threads=self.threads,
            load_seconds=self.load_seconds,
            strict=self.strict,
            wrap_copier=self.wrap_copier,
        )


# A class has the members of its instances, and is none.
_DEVICE = _Kind(
    "an instance of QueueDevice, PooledDevice or another Device",
    lambda value: isinstance(value, Device) and not isinstance(value, type),
)
_OPTIONS: Mapping[str, _Kind] = {
    "device": _DEVICE,
    "host_bytes": _whole(0, "bytes (48 GiB are 48 << 30)"),
    "max_model_len": _whole(1),
    "max_step_tokens": _whole(1),
    "options": _a(HostOptions, "HostOptions(policy=..., offload=...)"),
    "chunk_tokens": _or_none(_whole(1)),
    "policy": _a(str, "the name of a policy"),
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


USUAL_HOST = HostOptions()
_OF_KEEPER = ("offload", "policy", "store_after", "min_store_tokens", "checkpoint_interval")  # are not the engine's


def check_pool_options(host_bytes: object, below: object, options: HostOptions) -> None:
    """Raise ConfigurationError for the first option that an engine does not choose in the pool of a node."""
    usual = replace(USUAL_HOST, offload="eager")
    given = [("host_bytes", host_bytes, None), ("below", below, None)]
    given += [(name, getattr(options, name), getattr(usual, name)) for name in _OF_KEEPER]
    for name, value, must in given:
        if value != must:
            raise ConfigurationError(
                f"with a pool {name} must be {must!r}, got {value!r}: how large it is, and what leaves it, is the "
                "keeper's choice, and what is computed is stored at once"
            )
    if options.min_load_tokens is None:
        raise ConfigurationError("with a pool min_load_tokens must be a number: no rate is measured for it")
