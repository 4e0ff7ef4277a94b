"""HostOptions: choices for a HostCache, each checked, so that another value ends in a sentence that names it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import is_whole
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.offload.device import Device

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.copier.base import Copier

CopierWrapper = Callable[["Copier", Sequence[Sequence["torch.Tensor"]]], "Copier"]


def check_option(name: str, value: object, is_right: bool, words: str) -> None:
    """Raise ConfigurationError unless an option is right, with the words for one that is."""
    if not is_right:
        raise ConfigurationError(f"{name} must be {words}, got {value!r}")


def check_host_bytes(host_bytes: object) -> None:
    check_option("host_bytes", host_bytes, is_whole(host_bytes), "a whole number of bytes (48 GiB are 48 << 30)")


def check_tokens_of(**options: object) -> None:
    """Each of these options is a number of tokens."""
    for name, value in options.items():
        check_option(name, value, is_whole(value, 1), "a whole number of tokens, at least 1")


def check_device(device: object) -> None:
    is_right = isinstance(device, Device) and not isinstance(device, type)  # a class has the members of its instances
    check_option("device", device, is_right, "an instance of QueueDevice, PooledDevice or another Device")


def check_options(options: object) -> None:
    check_option("options", options, isinstance(options, HostOptions), "HostOptions(policy=..., offload=...)")


def _are_seconds(value: object) -> bool:
    if value is None:
        return True
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
        check_option("strict", self.strict, isinstance(self.strict, bool), "True or False")
        is_right = self.threads is None or isinstance(self.threads, bool)
        check_option("threads", self.threads, is_right, "True, False, or None")
        is_right = _are_seconds(self.load_seconds)
        check_option("load_seconds", self.load_seconds, is_right, "a number of seconds above 0, or None")
        is_right = self.wrap_copier is None or callable(self.wrap_copier)
        check_option("wrap_copier", self.wrap_copier, is_right, "a function of the copier and the tensors, or None")


USUAL_HOST = HostOptions()
_BY_KEYS = ("policy", "threads", "load_seconds", "wrap_copier")
_OF_KEEPER = ("offload", "policy", "store_after", "min_store_tokens", "checkpoint_interval")  # are not the engine's


def check_keyed_options(options: HostOptions) -> None:
    """Raise ConfigurationError for the first option that blocks by keys do not have."""
    for name in (each.name for each in fields(options) if each.name not in _BY_KEYS):
        value, must = getattr(options, name), getattr(USUAL_HOST, name)
        check_option(name, value, value == must, f"{must!r} for blocks by keys, which have {', '.join(_BY_KEYS)}")


def check_pool_options(host_bytes: object, below: object, options: HostOptions) -> None:
    """Raise ConfigurationError for the first option that an engine does not choose in the pool of a node."""
    usual = HostOptions(offload="eager")
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
