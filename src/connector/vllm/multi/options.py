"""The options in `kv_connector_extra_config`, beside the list of connectors, checked when vLLM starts.

    connectors                   as for vLLM's MultiConnector: the kv-transfer-config of each
    deadline_seconds             how long a request waits for a connector that does not know yet what it has
    load_bytes_per_second        how fast a connector loads, until it has loaded something; of one rank
    prefill_tokens_per_second    how fast prompts are computed; measured if it is not given

The second and third are one number for all connectors, or a list with one for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from connector.common.options import check_known
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import USUAL_BYTES_PER_SECOND

CONNECTORS, DEADLINE = "connectors", "deadline_seconds"
LOAD_RATE, PREFILL_RATE = "load_bytes_per_second", "prefill_tokens_per_second"
OPTIONS = (CONNECTORS, DEADLINE, LOAD_RATE, PREFILL_RATE)

# More than a lookup in another machine takes, and than a load of 16 GB over PCIe 4.0, for which CPUPrefixCacheConnector
# lets other requests with the same prefix wait.
USUAL_DEADLINE = 0.5

# Low on purpose: until prefill was measured, what is found is loaded, and so loads are measured, too.
ASSUMED_PREFILL = 1000.0


@dataclass(frozen=True)
class Options:
    """`deadlines` and `load_rates` have one number for each connector. `prefill_rate` is None if it is measured."""

    deadlines: tuple[float, ...]
    load_rates: tuple[float, ...]
    prefill_rate: float | None

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "Options":
        """Raises ConfigurationError with a message that names the remedy."""
        given: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        check_known(given, OPTIONS)
        connectors = given.get(CONNECTORS)
        if not isinstance(connectors, list) or not connectors:
            raise ConfigurationError(f"{CONNECTORS} is a list with the kv-transfer-config of each; got {connectors!r}")
        prefill = given.get(PREFILL_RATE)
        return cls(
            deadlines=_numbers(DEADLINE, given.get(DEADLINE, USUAL_DEADLINE), len(connectors), can_be_zero=True),
            load_rates=_numbers(LOAD_RATE, given.get(LOAD_RATE, USUAL_BYTES_PER_SECOND), len(connectors)),
            prefill_rate=None if prefill is None else _number(PREFILL_RATE, prefill),
        )


def _numbers(name: str, value: Any, count: int, can_be_zero: bool = False) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ConfigurationError(f"{name} is one number, or one for each of {count} connectors; got {len(values)}")
    return tuple(_number(name, each, can_be_zero) for each in values)


def _number(name: str, value: Any, can_be_zero: bool = False) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf") or (value == 0 and not can_be_zero):
        raise ConfigurationError(f"{name} is a number {'from 0 on' if can_be_zero else 'above 0'}; got {value!r}")
    return float(value)
