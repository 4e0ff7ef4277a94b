"""A tier of this library as a secondary tier of vLLM's OffloadingConnector: one of its `secondary_tiers` is

    {"type": "PrefixCacheTier", "module_path": "cpu_prefix_cache_vllm", "tier": "file:/nvme/kv:1TiB"}

of CPUPrefixCacheOffloadingConnector (`connector.py`), which lets it know the engine.

vLLM's manager has all of its host memory in one view, a row for each chunk, and calls in the scheduler's process:

    lookup              may a chunk be loaded? One key at a time, without those before it
    submit_store        keep these rows, which stay as they are until the job has ended
    submit_load         fill these rows
    on_schedule_end     once a step: what was looked up, and is not known, is asked of a store that machines share
    get_finished_jobs   once a step: what has ended, and of a load which chunks are good
    drain_jobs          all must end; a reset, which is the only caller, follows

A row holds what all ranks have of a chunk, and its bytes are those of a slot: for the tier there is one rank, and a
thread of its own writes and reads its files. vLLM does not notify a tier of new weights, only of resets. Requests wait
until a load has ended, so one whose files hang ends without them.
"""

import time
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from connector.tier.options import TierOption
from connector.tier.revision import new_revision
from connector.vllm.tier_options import tier_of
from connector.vllm_tiers.namespace import row_namespace
from cpu_prefix_cache import ConfigurationError, FileTier, SharedTier
from cpu_prefix_cache.copying import OpeningTier
from cpu_prefix_cache.deciding import BlockName, JobEnded, KeyedTier, Piece, StateGroup
from cpu_prefix_cache.tier import RankPart

START_SECONDS = 5.0  # the start takes in so long what the files hold; the rest comes step by step
PAUSE_SECONDS = 0.002
STALL_SECONDS = 10.0  # in which no slice of a load has been read: loads are given up (slab/tier_copier.py)
RESULTS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}
WITH_CONNECTOR, NEVER = "with_connector", "never"


class PrefixCacheTier(SecondaryTierManager):
    """vLLM's calls, passed on to the deciding and to the copying half of one tier."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        tier: Any = None,
        reset: str = WITH_CONNECTOR,
        backpressure_detector: Any = None,
        **unknown: Any,
    ) -> None:
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}  # since 0.31
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        _check_options(tier, reset, unknown)
        config, engine = offloading_spec.config, _engine()
        option = TierOption.of(tier)
        self._revision_file = option.revision_file
        below = _tier_of(option, engine)
        self._resets = reset == WITH_CONNECTOR
        self._view = primary_kv_view.cast("B")  # of its own, which ends with the tier
        region = torch.frombuffer(self._view, dtype=torch.uint8).view(len(primary_kv_view), -1)
        blocks, self._row_bytes = region.shape
        slots = below.slots(self._row_bytes, blocks)
        ask_seconds = below.options(slots).ask_seconds
        groups = 1 + max((group.group_id for group in config.groups), default=0)
        self._tier = KeyedTier(slots, host_blocks=blocks, block_bytes=self._row_bytes, ask_seconds=ask_seconds)
        self._rank: OpeningTier | None = below.opening(
            row_namespace(below, engine, config, self._row_bytes),
            region,
            [_piece(number, self._row_bytes) for number in range(groups)],
            RankPart(slots, stall_seconds=STALL_SECONDS),
        )
        self._jobs: dict[int, TransferJob] = {}
        self._finished: list[JobResult] = []
        self._take_in()

    # vLLM's calls

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return RESULTS[self._tier.has(_name(key))]

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._tier.store(*self._submitted(job_metadata))
        self._carry_out()

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._tier.load(*self._submitted(job_metadata))
        self._carry_out()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._carry_out()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._carry_out()
        self._tier.passed(time.monotonic())
        finished, self._finished = self._finished, []
        return finished

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._tier.touch([_name(key) for key in keys])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        if self._rank is not None:
            self._rank.drain()
        self._carry_out()
        if self._resets:
            self._tier.reset(new_revision(self._revision_file))
            self._carry_out()

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()
            self._rank = None
            self._view.release()  # vLLM unmaps its memory now

    # Between the halves

    def _carry_out(self) -> None:
        """Give the copying half what is planned, and the deciding half what has ended."""
        if self._rank is not None:
            self._rank.run(self._tier.plan())
            self._finished += map(self._result, self._tier.report(self._rank.report()))

    def _take_in(self) -> None:
        until = time.monotonic() + START_SECONDS
        self._carry_out()
        while not self._tier.is_whole and self._rank is not None and self._rank.tier and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)
            self._carry_out()

    def _submitted(self, job: TransferJob) -> tuple[int, list[BlockName], list[int]]:
        self._jobs[job.job_id] = job
        return job.job_id, [_name(key) for key in job.keys], [int(row) for row in job.chunk_ids]

    def _result(self, ended: JobEnded) -> JobResult:
        job = self._jobs.pop(ended.job)
        good = [key for key in job.keys if _name(key) not in ended.lost]
        return JobResult(ended.job, not ended.lost, tuple(good) if ended.lost and job.is_promotion else None)


def _check_options(tier: Any, reset: str, unknown: dict[str, Any]) -> None:
    """Raises ConfigurationError for an option that is unknown, missing or wrong."""
    if unknown:
        raise ConfigurationError(
            f"a PrefixCacheTier has no option {', '.join(map(repr, unknown))}; give it tier, and perhaps reset"
        )
    if tier is None:
        raise ConfigurationError("a PrefixCacheTier needs the option tier, such as file:/nvme/kv:1TiB")
    if reset not in (WITH_CONNECTOR, NEVER):
        raise ConfigurationError(f"reset of a PrefixCacheTier is {WITH_CONNECTOR} or {NEVER}, got {reset!r}")


def _engine() -> VllmConfig:
    """The configuration of the engine that is being made. Raises ConfigurationError where vLLM does not say."""
    engine = get_current_vllm_config_or_none()
    if engine is None:
        raise ConfigurationError(
            "a PrefixCacheTier must know what KV depends on, and vLLM's connector does not say; take the kv_connector "
            "CPUPrefixCacheOffloadingConnector in place of OffloadingConnector, with the same options"
        )
    if not engine.cache_config.enable_prefix_caching:
        raise ConfigurationError(
            "vLLM's prefix caching is off, by option or because KV of this model depends on later tokens, so keys do "
            "not name what KV depends on; start vLLM with prefix caching, or without a PrefixCacheTier"
        )
    return engine


def _tier_of(option: TierOption, engine: VllmConfig) -> FileTier | SharedTier:
    """The tier that the option describes, for this engine. Raises ConfigurationError."""
    if option.tier.offload == "lazy" or option.tier.policy != "lru":
        raise ConfigurationError(
            "vLLM stores every chunk at once and asks for single ones, so this tier is eager, and its policy is lru: "
            "leave offload and policy out"
        )
    return tier_of(option, engine)


def _piece(number: int, num_bytes: int) -> Piece:
    """Piece of a group that takes all of a row, whatever is in it."""
    return Piece(StateGroup(name=f"group {number}", block_tokens=1, block_bytes=num_bytes), 1, 1, num_bytes)


def _name(key: OffloadKey) -> BlockName:
    return BlockName(get_offload_block_hash(key), get_offload_group_idx(key))
