"""The option `pool`: the pool that a keeper has for the engines of this machine, in place of host memory of their own.

    "pool": "unix:/run/kv/kv.sock"
    "pool": {"address": "unix:/run/kv/kv.sock", "revision_file": "/run/revision"}

    the ranks        one joins the pool for all (`rank_pool.py`): only they know in which order rows lie
    the scheduler    takes the seat, and decides

A slot has the rows of all ranks of an engine. vLLM starts the ranks first, in the same process or in others. They meet
at an address that no other engine has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig

from connector.common.options import BYTES, POOL, TIER
from connector.tier.namespace import digest
from connector.tier.revision import REVISION_FILE, check_file, read_revision
from connector.vllm.tier_namespace import engine_namespace
from connector.vllm.tier_options import check_names
from connector.vllm.weights import source_of, weights_of_all
from cpu_prefix_cache import ConfigurationError, Device, NodePool
from cpu_prefix_cache.deciding import HybridChunkPlanner, KeptCache, check_takes
from cpu_prefix_cache.tier import Namespace

KEYS = ("address", "model", "revision", REVISION_FILE, "connect_seconds")
NEVER = (BYTES, TIER, "store_after", "min_store_tokens", "checkpoint_interval")  # beside a pool
ALWAYS = {"offload": "eager", "policy": "lru"}


@dataclass(frozen=True)
class PoolOption:
    """The pool as the operator gives it: for all engines, and perhaps without the names of a model and of weights."""

    pool: NodePool
    revision_file: str | None = None

    @classmethod
    def of(cls, spelled: Any) -> "PoolOption":
        """Raises ConfigurationError."""
        given = {"address": spelled} if isinstance(spelled, str) else spelled
        if not isinstance(given, Mapping) or "address" not in given:
            raise ConfigurationError(
                f"a {POOL} is a text such as unix:/run/kv/kv.sock, or a dictionary with {KEYS[0]}, and perhaps "
                f"{', '.join(KEYS[1:])}; got {spelled!r}"
            )
        if unknown := sorted(given.keys() - set(KEYS)):
            raise ConfigurationError(f"unknown key {unknown[0]!r} in a {POOL}; known keys are {', '.join(KEYS)}")
        file = given.get(REVISION_FILE)
        check_file(file, given.get("revision"), place=POOL)
        fields: dict[str, Any] = {name: value for name, value in given.items() if name != REVISION_FILE}
        return cls(NodePool(**fields), file)

    def of_engine(self, vllm_config: VllmConfig) -> NodePool:
        """The pool with the names of this engine's model and weights. Raises ConfigurationError."""
        file, pool = self.revision_file, self.pool
        revision = pool.revision if file is None else read_revision(file)
        check_names(POOL, vllm_config, revision is not None)
        return replace(
            pool,
            model=pool.model or source_of(vllm_config.model_config),
            revision=revision or weights_of_all(vllm_config, POOL),
            hash=vllm_config.cache_config.prefix_caching_hash_algo,
        )


def pool_option(_: str, spelled: Any) -> PoolOption:
    """The check of this option, as in `connector/common/options.py`. Raises ConfigurationError."""
    return PoolOption.of(spelled)


@dataclass(frozen=True)
class EnginePool:
    """The pool of one engine, whose first rank gives the seat at `meeting`. The order of rows, which ranks know, is not
    in the namespace yet.
    """

    pool: NodePool
    namespace: Namespace
    meeting: str
    planner: HybridChunkPlanner

    def build(self, device: Device, ranks: int, min_load_tokens: int = 0) -> KeptCache:
        """The deciding half, in the scheduler. Raises ConfigurationError."""
        messenger = self.pool.taken(self.meeting).messenger(self.planner)
        return KeptCache(self.planner, device, messenger, ready_slots=0, ranks=ranks, min_load_tokens=min_load_tokens)

    def __str__(self) -> str:
        return f"the {POOL} at {self.pool.address}"


def engine_pool(
    option: PoolOption, options: Mapping[str, Any], vllm_config: VllmConfig, planner: HybridChunkPlanner, hashes: int
) -> EnginePool:
    """For an engine with these other `options`, and so many `hashes` to a chunk. Raises ConfigurationError."""
    _check_options(options)
    _check_engine(vllm_config)
    check_takes(planner)
    pool = option.of_engine(vllm_config)
    namespace = engine_namespace(pool, planner, vllm_config, planner.grid_tokens // hashes, planner.ranks)
    # all processes of an engine know these, and no other engine has both, even if somebody gives two one engine_id
    ids = [str(vllm_config.kv_transfer_config.engine_id), str(vllm_config.instance_id)]
    return EnginePool(pool, namespace, f"cpu-prefix-cache-{digest(ids)[:32]}", planner)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in NEVER:
        if name in options:
            raise ConfigurationError(
                f"with a {POOL} there is no {name}: how large it is, and what leaves it, is the keeper's choice, and "
                "what is computed is stored at once; leave it out"
            )
    for name, only in ALWAYS.items():
        if options.get(name, only) != only:
            raise ConfigurationError(f"with a {POOL} {name} must be {only!r}; got {options[name]!r}")


def _check_engine(vllm_config: VllmConfig) -> None:
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        raise ConfigurationError(
            f"a {POOL} publishes no KV events, since what is in it is of all engines; start vLLM without KV events, or "
            f"give it {BYTES} of its own"
        )
