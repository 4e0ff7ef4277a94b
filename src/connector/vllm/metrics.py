"""Statistics of the cache in vLLM's /metrics and in its log.

    in the scheduler   CacheCounts       the cache's statistics: counts since the last report, and present levels
    in each worker     TransferTimes     the bytes and seconds of each transfer that succeeded on this rank
                       TierMoves         what the tier of this rank has read, written, and left in a store
    between processes  CacheStats        a report of either; vLLM aggregates those of all ranks, both halves, and steps
    in the frontend    CachePromMetrics  the same numbers under the names in METRICS

A report is a flat dict: for each series a number, or a list of observations. Series of a tier below host memory exist
only where there is one, and those that nobody counts in a keeper's pool (UNKNOWN_IN_POOL) only without one.

A number that vLLM's OffloadingConnector has, too, has its name and labels (OFFLOADING). One that counts something else,
such as chunks in place of calls, keeps a name of its own.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.common.options import POOL, TIER
from connector.vllm.sessions import OUTCOMES
from connector.vllm.touched import PROMETHEUS, check_names
from cpu_prefix_cache.deciding import CPUPrefixCache, Direction, KeptCache, TieredCache, TransferPlan

if TYPE_CHECKING:  # it imports what copies, and the scheduler does not
    from cpu_prefix_cache.copying import SlotStatistics

PREFIX = "vllm:cpu_prefix_cache_"
OFFLOADING = "vllm:kv_offload_"
DIRECTIONS = tuple(direction.value for direction in Direction)
TIER_DIRECTIONS = ("read", "write")
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Kind(enum.Enum):
    COUNT = "count"  # only grows; a report has the increase since the one before
    LEVEL = "level"  # goes up and down; the scheduler's latest value counts
    TIMES = "times"  # observations, one for each transfer and rank


@dataclass(frozen=True)
class Metric:
    """One metric, its name without the prefix: one series, or one for each of the label's `values`.

    A report has the name as key, and with several values `name:value`.
    """

    name: str
    kind: Kind
    help: str
    label: str | None = None
    values: Sequence[str] = ()
    buckets: Sequence[float] = ()
    prefix: str = PREFIX

    def series(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The key of each series in a report, and the values of its own labels."""
        if self.label is None:
            yield self.name, ()
        for value in self.values:
            yield (f"{self.name}:{value}" if len(self.values) > 1 else self.name), (value,)


METRICS = (
    Metric("hit_tokens", Kind.COUNT, "Prompt tokens of admitted requests that loads from the host provide."),
    Metric("store_bytes", Kind.COUNT, "Bytes that all ranks together have stored to the host.", prefix=OFFLOADING),
    Metric("load_bytes", Kind.COUNT, "Bytes that all ranks together have loaded from the host.", prefix=OFFLOADING),
    Metric("evicted_chunks", Kind.COUNT, "Chunks and checkpoints evicted from the host to make room."),
    Metric(
        "evicted_unused_chunks",
        Kind.COUNT,
        "Of these, those that no request was ever given: they were stored in vain.",
        "kind",
        ("chunk", "checkpoint"),
    ),
    Metric(
        "dropped_chunks",
        Kind.COUNT,
        "Times a chunk was not stored: no host block could be evicted, the chunk was declined, its copy failed or was "
        "cancelled, or its bytes do not fit the codec.",
        "reason",
        ("pool_full", "declined", "failed", "unfit"),
    ),
    Metric("failed_loads", Kind.COUNT, "Loads that failed or were cancelled; their tokens were computed again."),
    Metric("lost_before_store_chunks", Kind.COUNT, "Chunks the device evicted before lazy tried to store them."),
    Metric(
        "union_misses",
        Kind.COUNT,
        "Prompts that device and host together could have resumed later than either of them alone.",
    ),
    Metric(
        "next_use_hints",
        Kind.COUNT,
        "Requests with a hint of their next use: used as it is or as the nearest possible one, or not used.",
        "outcome",
        ("accepted", "clipped", "malformed"),
    ),
    Metric("resident_blocks", Kind.LEVEL, "Host blocks that are cached: found by key."),
    Metric("pinned_blocks", Kind.LEVEL, "Of these, at most how many are protected by loads, stores and leases."),
    Metric("ready_blocks", Kind.LEVEL, "Host blocks that every rank has prepared."),
    Metric("capacity_blocks", Kind.LEVEL, "All host blocks."),
    Metric("transfers_in_flight", Kind.LEVEL, "Transfers that are planned or in flight.", "direction", DIRECTIONS),
    Metric("off", Kind.LEVEL, "1 if the cache has turned itself off because copies kept failing, else 0."),
    Metric(
        "transfer_seconds",
        Kind.TIMES,
        "Seconds of each transfer on each rank, from the start of its step until a step found it done.",
        "direction",
        DIRECTIONS,
        SECONDS,
    ),
)


def _tiering(name: str, text: str) -> Metric:
    """A metric that vLLM has for each tier below the host. Here there is one."""
    return Metric(f"tiering_{name}", Kind.COUNT, text, "tier", ("1:tier",), prefix=OFFLOADING)


STATES = ("opening", "open", "read_only", "paused")
TIER_METRICS = (
    Metric("tier_hit_tokens", Kind.COUNT, "Prompt tokens of admitted requests that came from the tier by way of host."),
    _tiering("read_bytes", "Bytes that all ranks together have read from the tier."),
    _tiering("write_bytes", "Bytes that all ranks together have written to the tier."),
    _tiering("read_time", "Seconds in which the tier was read, added up over ranks."),
    _tiering("write_time", "Seconds in which the tier was written, added up over ranks."),
    Metric(
        "tier_requests",
        Kind.COUNT,
        "Requests of which the tier had more than the host: waited for it, waited in vain, or would have computed "
        "sooner; and those to which a shared store did not say in time what it has.",
        "outcome",
        ("asked", "late", "declined", "unanswered"),
    ),
    Metric(
        "tier_prefetch_hints",
        Kind.COUNT,
        "Hints of sessions that come again: of a known one, of an unknown one, or none that can be understood; and of "
        "the known ones, those that the tier was read for.",
        "outcome",
        (*OUTCOMES, "read"),
    ),
    Metric("tier_refused_slots", Kind.COUNT, "Slots that did not hold what they should; their tokens are misses."),
    Metric("tier_kept_values", Kind.COUNT, "Values with wrong bytes left in a shared store: too many came wrong."),
    Metric("tier_unsaved_chunks", Kind.COUNT, "Chunks that left the host before they could be written to the tier."),
    _tiering("promotion_job_failures", "Reads of the tier that failed."),
    _tiering("cascade_job_failures", "Writes to the tier that failed."),
    Metric("tier_found_chunks", Kind.COUNT, "Chunks that were there from before the start."),
    Metric("tier_resident_blocks", Kind.LEVEL, "Slots of the tier that are found by key, each of a host block's size."),
    Metric("tier_capacity_blocks", Kind.LEVEL, "All slots of the tier."),
    Metric("tier_state", Kind.LEVEL, "1 for the state that the tier is in, else 0.", "state", STATES),
)
UNKNOWN_IN_POOL = ("union_misses", "next_use_hints")
KINDS = {key: metric.kind for metric in (*METRICS, *TIER_METRICS) for key, _ in metric.series()}
TROUBLES = (
    "dropped_chunks:pool_full",
    "dropped_chunks:failed",
    "dropped_chunks:unfit",
    "failed_loads",
    "lost_before_store_chunks",
    "next_use_hints:malformed",
    "off",
    "tier_prefetch_hints:malformed",
    "tier_refused_slots",
    "tier_kept_values",
    "tier_unsaved_chunks",
    "tiering_promotion_job_failures",
    "tiering_cascade_job_failures",
    "tier_state:read_only",
    "tier_state:paused",
)


_SHOWN: dict[str, Any] = {}  # by name, what the last engine of this process shows


class CacheStats(KVConnectorStats):
    """A report of either half, or several aggregated. vLLM tests it for truth: no `__len__`, no `__bool__`."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "CacheStats":
        """A report from received data. The data are copied, since vLLM uses them elsewhere too."""
        return cls().aggregate(cls(dict(data)))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "CacheStats":
        """Add another report to this one. Levels are taken from `other`; for the rest the order does not matter."""
        for key, value in other.data.items():
            if KINDS[key] is Kind.TIMES:
                self.data.setdefault(key, []).extend(value)
            elif KINDS[key] is Kind.COUNT:
                self.data[key] = self.data.get(key, 0) + value
            else:
                self.data[key] = value
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line. TROUBLES are included only if they are not 0."""
        summary: dict[str, int | float] = {"hit_tokens": self.data.get("hit_tokens", 0)}
        for direction, word in (("store", "stored"), ("load", "loaded")):
            summary[f"{word}_gb"] = round(self.data.get(f"{direction}_bytes", 0) / 1e9, 3)
            summary[f"{word}_gb_per_second"] = round(self._rate(direction), 1)
        if self.data.get("capacity_blocks"):
            summary["resident_share"] = round(self.data["resident_blocks"] / self.data["capacity_blocks"], 3)
        if self.data.get("tier_capacity_blocks"):
            summary["tier_hit_tokens"] = self.data.get("tier_hit_tokens", 0)
            for direction in TIER_DIRECTIONS:
                num_bytes = self.data.get(f"tiering_{direction}_bytes", 0)
                summary[f"tier_{direction}_gb"] = round(num_bytes / 1e9, 3)
        return summary | {key.replace(":", "_"): self.data[key] for key in TROUBLES if self.data.get(key)}

    def _rate(self, direction: str) -> float:
        """GB/s of one rank while it copies in this direction: all bytes over all seconds."""
        seconds = sum(self.data.get(f"transfer_seconds:{direction}", ()))
        return self.data.get(f"{direction}_bytes", 0) / 1e9 / seconds if seconds else 0.0


class CacheCounts:
    """Reports of the scheduler half: what the cache has done since the last report, and what it holds now."""

    def __init__(self, cache: CPUPrefixCache | KeptCache, prefetch_hints: Mapping[str, int]) -> None:
        """`prefetch_hints` is how many there were so far, by outcome."""
        self._cache, self._prefetch_hints = cache, prefetch_hints
        self._before: dict[str, int] = {}

    def take(self) -> CacheStats | None:
        """None when nothing has changed."""
        before, now = self._before, self._numbers()
        if now == before:
            return None
        self._before = now
        data = {key: value for key, value in now.items() if KINDS[key] is Kind.LEVEL}
        for key, value in now.items():
            if KINDS[key] is Kind.COUNT and value != before.get(key, 0):
                data[key] = value - before.get(key, 0)
        return CacheStats(data)

    def _numbers(self) -> dict[str, int]:
        numbers = self._all_numbers()
        if isinstance(self._cache, KeptCache):
            return {key: value for key, value in numbers.items() if key.partition(":")[0] not in UNKNOWN_IN_POOL}
        return numbers

    def _all_numbers(self) -> dict[str, int]:
        statistics = self._cache.statistics()
        pool = statistics.pool
        return {
            "hit_tokens": statistics.hit_tokens,
            "evicted_chunks": pool.evictions,
            "evicted_unused_chunks:chunk": pool.unused_chunks,
            "evicted_unused_chunks:checkpoint": pool.unused_checkpoints,
            "dropped_chunks:pool_full": statistics.store_refusals,
            "dropped_chunks:declined": statistics.store_declined,
            "dropped_chunks:failed": statistics.store_cancelled,
            "dropped_chunks:unfit": statistics.store_unfit,
            "failed_loads": statistics.loads_failed,
            "lost_before_store_chunks": statistics.lost_before_store,
            "union_misses": statistics.union_misses,
            "next_use_hints:accepted": statistics.hints.accepted,
            "next_use_hints:clipped": statistics.hints.clipped,
            "next_use_hints:malformed": statistics.hints.malformed,
            "resident_blocks": pool.cached,
            "pinned_blocks": pool.protected,
            "ready_blocks": pool.ready,
            "capacity_blocks": pool.capacity,
            "transfers_in_flight:store": statistics.storing,
            "transfers_in_flight:load": statistics.loading,
            "off": int(self._cache.is_off),
            **(_tier_numbers(self._cache, self._prefetch_hints) if isinstance(self._cache, TieredCache) else {}),
        }


def _tier_numbers(cache: TieredCache, prefetch_hints: Mapping[str, int]) -> dict[str, int]:
    statistics = cache.tier_statistics()
    below = statistics.cache
    return {
        "tier_hit_tokens": statistics.hit_tokens,
        "tier_requests:asked": statistics.asked,
        "tier_requests:late": statistics.late,
        "tier_requests:declined": statistics.declined,
        "tier_requests:unanswered": statistics.unanswered,
        **{f"tier_prefetch_hints:{outcome}": count for outcome, count in prefetch_hints.items()},
        "tier_prefetch_hints:read": statistics.read_ahead,
        "tier_refused_slots": statistics.refused,
        "tier_unsaved_chunks": statistics.unsaved,
        "tiering_promotion_job_failures": below.loads_failed,
        "tiering_cascade_job_failures": below.stores_failed,
        "tier_found_chunks": statistics.found,
        "tier_resident_blocks": below.pool.cached,
        "tier_capacity_blocks": below.pool.capacity,
        **{f"tier_state:{state}": int(state == statistics.state) for state in STATES},
    }


class TransferTimes:
    """Reports of a worker half. The `num_bytes` of a transfer are those that this rank copies."""

    def __init__(self) -> None:
        self._stats = CacheStats()

    def observe(self, transfer: TransferPlan, seconds: float) -> None:
        """Record a transfer that succeeded. One of which this rank has no share is not counted."""
        if transfer.num_bytes:
            direction = transfer.direction.value
            data = {f"{direction}_bytes": transfer.num_bytes, f"transfer_seconds:{direction}": [seconds]}
            self._stats.aggregate(CacheStats(data))

    def take(self) -> CacheStats | None:
        """None when nothing has ended."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, CacheStats()
        return stats


class TierMoves:
    """Bytes that the tier of a rank has moved since the last call, and what it has left in a store."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, statistics: "SlotStatistics") -> CacheStats | None:
        """None when nothing was moved."""
        now: dict[str, float] = {
            "tiering_read_bytes": statistics.bytes_read,
            "tiering_write_bytes": statistics.bytes_written,
            "tiering_read_time": statistics.read_seconds,
            "tiering_write_time": statistics.write_seconds,
            "tier_kept_values": statistics.kept,
        }
        before, self._before = self._before, now
        new = {key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)}
        return CacheStats(new) if new else None


class CachePromMetrics(KVConnectorPromMetrics):
    """METRICS in vLLM's metric classes, which show them in /metrics, and TIER_METRICS if there is a tier; with a pool
    those that are known there. All series exist from the first report on, at 0.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        check_names(self, PROMETHEUS)
        self._engines = per_engine_labelvalues
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        unknown = UNKNOWN_IN_POOL if POOL in options else ()
        self._metrics = (
            *(metric for metric in METRICS if metric.name not in unknown),
            *(TIER_METRICS if TIER in options else ()),
        )

    @cached_property
    def _series(self) -> Mapping[int, Mapping[str, Any]]:
        """By engine. Made with the first report: then connectors beside this one have made theirs."""
        series: dict[int, dict[str, Any]] = {engine: {} for engine in self._engines}
        for metric in self._metrics:
            shown = self._shown(metric)
            for engine, labels in self._engines.items():
                for key, own in metric.series():
                    series[engine][key] = shown.labels(*labels, *own)
        return series

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            series = self._series[engine_idx][key]
            if KINDS[key] is Kind.TIMES:
                for each in value:
                    series.observe(each)
            elif KINDS[key] is Kind.COUNT:
                series.inc(value)
            else:
                series.set(value)

    def _shown(self, metric: Metric) -> Any:
        """A series in place of that of an earlier engine of this process, as vLLM's own. Under a name of ours where an
        OffloadingConnector beside this connector has the common one.
        """
        name = metric.prefix + metric.name
        if name in _SHOWN:
            with suppress(KeyError):  # vLLM has taken it out
                REGISTRY.unregister(_SHOWN.pop(name))
        try:
            _SHOWN[name] = self._made(metric)
        except ValueError:
            if metric.prefix == PREFIX:
                raise
            return self._shown(replace(metric, prefix=PREFIX))
        return _SHOWN[name]

    def _made(self, metric: Metric) -> Any:
        labels = [*self._labelnames, *([] if metric.label is None else [metric.label])]
        fields: dict[str, Any] = dict(name=metric.prefix + metric.name, documentation=metric.help, labelnames=labels)
        if metric.kind is Kind.TIMES:
            return self._histogram_cls(**fields, buckets=list(metric.buckets))
        if metric.kind is Kind.COUNT:
            return self._counter_cls(**fields)
        return self._gauge_cls(**fields, multiprocess_mode="mostrecent")
