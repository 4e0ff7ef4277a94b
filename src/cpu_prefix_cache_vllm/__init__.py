"""How vLLM finds the connectors by their names alone: the entry point in `vllm.general_plugins`.

    register()                      called by vLLM in each of its processes, whether a connector is used or not
    CPUPrefixCacheConnector         imported from `connector.vllm` when vLLM needs it
    CPUPrefixCacheMultiConnector    imported from `connector.vllm.multi`
    CPUPrefixCacheOffloadingConnector, and PrefixCacheTier for it: imported from `connector.vllm_tiers`
    AdaptivePolicy and others       imported from `connector.vllm_offloading`, for vLLM's own OffloadingConnector, which
                                    is given the name of this module

Another module named `connector` that comes first in sys.path, as one in the folder from which `python -m` was started,
hides the package. This one has a name that nobody else uses, so it can be found, and name the package in the way.
"""

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpu_prefix_cache import ConfigurationError

CONNECTORS = {
    "CPUPrefixCacheConnector": "connector.vllm",
    "CPUPrefixCacheMultiConnector": "connector.vllm.multi",
    "CPUPrefixCacheOffloadingConnector": "connector.vllm_tiers",
}
POLICIES = dict.fromkeys(("AdaptivePolicy", "ArcPolicy", "LruPolicy"), "connector.vllm_offloading")
MODULES = {**CONNECTORS, **POLICIES, "PrefixCacheTier": "connector.vllm_tiers"}
CONNECTOR = Path(__file__).resolve().parents[1] / "connector" / "__init__.py"


def register() -> None:
    """Give vLLM the connectors' names. A second call changes nothing: vLLM makes one at times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in CONNECTORS:
        with suppress(ValueError):  # that the name is known
            KVConnectorFactory.register_connector(name, __name__, name)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_nothing_hides(name)
    return vars(import_module(MODULES[name]))[name]


def _check_nothing_hides(name: str) -> None:
    """Looks where `connector` would be imported from, and imports nothing: it may be anything."""
    spec = find_spec("connector")
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != CONNECTOR:
        raise ConfigurationError(
            f"{spec.origin} hides the package of the same name that {name} is in, {CONNECTOR.parent}: rename it, or "
            "start vLLM from another folder, with a PYTHONPATH that does not lead to it"
        )
