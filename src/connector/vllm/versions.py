"""Which releases of vLLM the connector runs with, and how they differ. Checked when this module is imported, which is
before any other of the connector.

    before 0.30    are refused: failed loads cannot be reported to vLLM by request
    0.30 to 0.33   are tested; some windows are replayed and requests have hints from 0.31 on, and hits
                   have a source from 0.32 on
    later ones     run with a warning

A name of ADDED that a release should have and has not is refused: otherwise a name that vLLM has changed would count as
a feature that it does not have.
"""

import logging
import re
from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from cpu_prefix_cache import ConfigurationError

logger = logging.getLogger(__name__)

Release = tuple[int, int]
TESTED: tuple[Release, ...] = ((0, 30), (0, 31), (0, 32), (0, 33))  # tests/vllm/contracts has a file of each
FIRST, LAST = TESTED[0], TESTED[-1]
RANGE = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


class Addition(NamedTuple):
    """A name of a class or a module that the releases from `since` on have, and some earlier one has not."""

    since: Release
    owner: Any
    name: str

    def is_here(self) -> bool:
        if self.name in vars(self.owner) or self.name in vars(self.owner).get("__dataclass_fields__", ()):
            return True
        return isinstance(self.owner, type) and self.name in signature(self.owner).parameters


ADDED = (
    Addition(FIRST, KVConnectorOutput, "failed_recving"),
    Addition(FIRST, base, "KVConnectorTransferResults"),
    Addition(FIRST, base.KVConnectorBase_V1, "get_transfer_results"),
    Addition(FIRST, base.KVConnectorBase_V1, "requires_kv_delivery"),
    Addition(FIRST, base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"),
    Addition(FIRST, kv_cache_utils, "DEFAULT_NONE_HASH_SEED"),
    Addition(FIRST, kv_cache_interface.KVCacheConfig, "prefix_cache_retention_interval"),
    Addition(FIRST, kv_cache_interface.KVCacheTensor, "layers"),
    Addition(FIRST, kv_cache_interface.SlidingWindowSpec, "extra_retained_tokens"),
    Addition((0, 31), kv_cache_interface.SlidingWindowMLASpec, "bounded_replay"),
    Addition((0, 31), Request, "kv_hints"),
    Addition((0, 31), VllmConfig, "aux_output_config"),
    Addition((0, 31), kv_cache_utils, "to_event_extra_keys"),
    Addition((0, 32), base.KVConnectorBase_V1, "_cache_hit_source"),
)


def release_of(number: str) -> Release | None:
    """The first two numbers of a release. None for a build between releases, whose number means little."""
    numbers = re.match(r"(\d+)\.(\d+)", number)
    return (int(numbers[1]), int(numbers[2])) if numbers and "dev" not in number else None


def check_release(number: str) -> None:
    """Raises ConfigurationError for a release that is too old, or without a name that it should have."""
    release = release_of(number)
    if release is not None and release < FIRST:
        raise ConfigurationError(
            f"CPUPrefixCacheConnector does not run with vLLM {number}: before 0.30 vLLM cannot be told which requests' "
            f"loads have failed; use {RANGE}"
        )
    for added in ADDED:
        if (release is None or release >= added.since) and not added.is_here():
            raise ConfigurationError(
                f"CPUPrefixCacheConnector does not fit vLLM {number}: {added.owner.__name__} has no {added.name}; use "
                f"a release that it is tested with, {RANGE}"
            )


check_release(vllm.__version__)


def warn_if_untested() -> None:
    """Warn if this release of vLLM is outside the tested range."""
    release = release_of(vllm.__version__)
    if release is None or release > LAST:
        logger.warning("CPUPrefixCacheConnector was tested with vLLM %s; this is %s", RANGE, vllm.__version__)


def replayed_tokens(spec: Any) -> int:
    """The tokens of a window that vLLM does not cache, but computes again after each hit (`bounded_replay`); of all
    others 0. Before 0.31 there are none.
    """
    return int(spec.sliding_window) if vars(spec).get("bounded_replay", False) else 0


def returns_routed_experts(vllm_config: VllmConfig) -> bool:
    """Whether answers have the experts of each token (`--enable-return-routed-experts`)."""
    holder = vars(vllm_config).get("aux_output_config", vllm_config.model_config)  # before 0.31 the model's
    return bool(vars(holder)["enable_return_routed_experts"])


def hint_actions(request: Request) -> Sequence[Any]:
    """The actions that an orchestrator has attached to a request. Before 0.31 there are none."""
    envelope = vars(request).get("kv_hints")
    return () if envelope is None else envelope.actions


def session_of(request: Request) -> str | None:
    """The session that a request belongs to. Before 0.31 there are none."""
    session: str | None = vars(request).get("session_id")
    return session


def keys_have_adapter_paths() -> bool:
    """Whether block hashes depend on the path of an adapter. Before 0.32 on its name alone."""
    release = release_of(vllm.__version__)
    return release is not None and release >= (0, 32)


def sleeps_can_be_refused() -> bool:
    """Whether an engine does not go to sleep when the reset of its connector has failed. Before 0.31 it does.

    A build whose version is no release's is one of later code.
    """
    release = release_of(vllm.__version__)
    return release is None or release >= (0, 31)


_to_event_extra_keys = vars(kv_cache_utils).get("to_event_extra_keys")


def event_extra_keys(extra_keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The extra keys of a block's hash, in the form of events. Before 0.31 hashes have that form, too."""
    if extra_keys is None or _to_event_extra_keys is None:
        return extra_keys
    published: list[tuple[Any, ...] | None] = _to_event_extra_keys([extra_keys])
    return published[0]


def host_hit_source() -> Any:
    """vLLM's name for hits on the host in its statistics; None before 0.32, which has no such names."""
    if "_cache_hit_source" not in vars(base.KVConnectorBase_V1):
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.HOST


def zeroes_new_blocks(config: kv_cache_interface.KVCacheConfig) -> bool:
    """Whether workers write zeros into new blocks before they get a step: states, and groups whose layers have
    KV of several precisions. True of a release without the field.
    """
    return bool(getattr(config, "needs_kv_cache_zeroing", True))


def defers_frees() -> bool:
    """Whether vLLM, where steps overlap, returns a block to its pool when the steps that use it have ended."""
    from vllm.v1.core.sched.scheduler import Scheduler  # here: it imports connectors itself

    return "_drain_deferred_frees" in vars(Scheduler)
