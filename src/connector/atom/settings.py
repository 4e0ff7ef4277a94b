"""The options in `kv_transfer_config`, checked when ATOM starts. They have the names of the vLLM connector's:

{"kv_connector": "cpu_prefix_cache", "kv_connector_extra_config": {"cpu_bytes_to_use": 51539607552, "offload": "lazy"}}

An ATOM that cannot work with this connector is refused, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from connector.atom import geometry
from connector.atom.tier_settings import HASH, tier_of, tier_settings
from connector.common.options import BYTES, CHECKS, CODEC, TIER, checked
from connector.tier.cache import build_cache
from connector.tier.options import TierOption, tier_option
from cpu_prefix_cache import OFFLOAD_MODES, ConfigurationError, Device
from cpu_prefix_cache.deciding import RAW, CacheOptions, CPUPrefixCache, EngineSteps, EngineTraits, HybridChunkPlanner

FASTEST = "xxh3_128"  # hash of keys that no other process sees
ROLES = ("offload", "kv_both")
REPLACING_RUNNER = "atom.rollout.model_runner_ext.RLHFModelRunner"


@dataclass(frozen=True)
class Settings:
    """Settings that both halves are built from. Each rank has a host region of `host_bytes`."""

    config: Any  # ATOM's
    host_bytes: int
    tier: TierOption | None
    codec: str
    options: Mapping[str, Any]  # the options given, without BYTES, CODEC and TIER

    @classmethod
    def of(cls, config: Any) -> "Settings":
        """Raises ConfigurationError with a message that names what would work."""
        options = checked_options(config.kv_transfer_config)
        _check_engine(config)
        tier = options.pop(TIER, None)
        if tier is not None:
            tier_of(tier, config)  # raises
        return cls(config, options.pop(BYTES) // config.tp_world_size, tier, options.pop(CODEC, RAW), options)

    @property
    def revision_file(self) -> str | None:
        """Where the tier's revision is, if it may change."""
        return None if self.tier is None else self.tier.revision_file

    @property
    def hash(self) -> str:
        """The hash by which keys are digests."""
        return FASTEST if self.tier is None else HASH

    @property
    def is_lazy(self) -> bool:
        return self.options.get("offload", OFFLOAD_MODES[0]) == "lazy"

    def made_eager(self) -> "Settings":
        """The same for a device whose order of eviction is not known."""
        return replace(self, options={**self.options, "offload": "eager"})

    def planner(self, block_bytes: Sequence[int], units: int = 1) -> HybridChunkPlanner:
        """As `geometry.planner`. Raises ConfigurationError for a tier or a codec below a model with states."""
        if self.tier is not None and len(block_bytes) > 1:
            raise ConfigurationError(
                "a tier keeps blocks, and this model keeps a state in a slot of each request: leave the tier out"
            )
        if self.codec != RAW and len(block_bytes) > 1:
            raise ConfigurationError(
                f'codec "{self.codec}" is for keys and values, and this model keeps its states in the same blocks: '
                "leave it out"
            )
        return geometry.planner(self.config, block_bytes, units, in_pages=self.tier is not None, codec=self.codec)

    def host_blocks(self, planner: HybridChunkPlanner) -> int:
        """How many host blocks each rank has. Raises ConfigurationError if they do not hold one chunk."""
        blocks = self.host_bytes // planner.host_block_bytes
        if blocks < planner.host_blocks_per_chunk:
            least = planner.host_blocks_per_chunk * planner.host_block_bytes * self.config.tp_world_size
            raise ConfigurationError(
                f"{BYTES} must hold a block of {planner.grid_tokens} tokens on all ranks, at least {least} bytes"
            )
        return blocks

    def build(self, planner: HybridChunkPlanner, device: Device) -> CPUPrefixCache:
        """The cache, a TieredCache if there is a tier. Raises ConfigurationError."""
        tier = None if self.tier is None else tier_settings(self.tier, self.config, planner)
        return build_cache(
            planner,
            device,
            tier,
            host_blocks=self.host_blocks(planner),
            # ATOM decides where it keeps states, so each boundary is asked for one.
            options=CacheOptions(**self.options, checkpoint_interval=planner.grid_tokens),
            engine=EngineTraits(
                ranks=self.config.tp_world_size,
                steps=_steps(self.config, planner),
                waits_for_loads=False,  # in ATOM a request waits with blocks of its own, which it can as well fill
            ),
        )


def _steps(config: Any, planner: HybridChunkPlanner) -> EngineSteps:
    speculative = config.speculative_config
    return EngineSteps(
        # A request gets the blocks of its whole prompt when it is admitted, however small the steps of its prefill are:
        # those of the last one in a step come on top. (With the tokens of a step alone, of 256, and prompts of up to
        # 2,000, lazy lost 1,077 of 4,139 chunks.)
        max_tokens=config.max_num_batched_tokens + config.max_model_len,
        decode_tokens=1 + (speculative.num_speculative_tokens if speculative else 0),
        # ATOM asks its ranks when a step's forward pass has been launched. A copy that waits for the pass before has
        # not ended then, and is found when the next one has been launched.
        report_steps=2,
        groups=len(planner.groups),
        blocks_per_chunk=1,
        asks_in_decode=False,
    )


def _check_engine(config: Any) -> None:
    if not config.enable_prefix_caching:
        raise ConfigurationError("the host cache keeps what ATOM's own prefix cache evicts: start with prefix caching")
    if config.pipeline_parallel_size > 1:
        raise ConfigurationError(
            "ATOM does not pass on the completions of a connector under pipeline parallelism; "
            "start it with pipeline_parallel_size 1"
        )
    if config.enable_rapidserve:
        raise ConfigurationError("the host cache needs one process with all of the KV: start without enable_rapidserve")
    if config.runner_qualname == REPLACING_RUNNER:
        raise ConfigurationError(
            f"{REPLACING_RUNNER} replaces weights and KV, of which the host cache is not told; start without the cache"
        )
    if config.prefill_context_parallel_size > 1:
        raise ConfigurationError("prefill_context_parallel_size above 1 was not tried with a host cache; start with 1")


def checked_options(transfer: Mapping[str, Any]) -> dict[str, Any]:
    """The options given, TIER as a TierOption. Raises ConfigurationError if one is missing, unknown or out of range."""
    role = transfer.get("kv_role", "offload")
    if role not in ROLES:
        raise ConfigurationError(f"kv_role must be one of {', '.join(ROLES)} for a host cache; got {role!r}")
    return checked(transfer.get("kv_connector_extra_config"), {**CHECKS, TIER: tier_option})
