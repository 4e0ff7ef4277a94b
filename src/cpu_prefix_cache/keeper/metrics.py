"""Metrics of a keeper: its pool, what engines ask and store, and the tier below, as text that Prometheus reads.

A number that vLLM shows of an engine's cache, too (docs/vllm.md), has the last part of its name there. One that counts
something else, such as questions in place of admitted requests, has a name of its own.

>>> print(spelled([Metric("leases", GAUGE, "Leases.", {"": 2})]), end="")
# HELP cpu_prefix_cache_leases Leases.
# TYPE cpu_prefix_cache_leases gauge
cpu_prefix_cache_leases 2
>>> print(spelled([Metric("evicted", COUNTER, "Evicted.", {'kind="chunk"': 3})]).splitlines()[-1])
cpu_prefix_cache_evicted_total{kind="chunk"} 3
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cpu_prefix_cache.messages.stats import KeeperStatistics, TierStatistics

PREFIX = "cpu_prefix_cache_"
COUNTER, GAUGE = "counter", "gauge"  # a counter only grows, while one keeper runs
STATES = ("opening", "open", "read_only", "paused")


class Metric(NamedTuple):
    """`values` are by the label, as it is spelled; by "" where there is none."""

    name: str
    kind: str
    help: str
    values: Mapping[str, float]


def metrics_of(keeper: KeeperStatistics, tier: TierStatistics | None) -> Iterator[Metric]:
    pool = keeper.pool
    yield _gauge("engines", "Engines that have joined.", keeper.engines)
    yield _gauge("leases", "Prompts that were found, and are not loaded yet.", keeper.leases)
    yield _gauge("writes", "Stores of engines that are under way.", keeper.writes)
    yield _counter("questions", "Prompts that engines have asked for.", keeper.questions)
    yield _counter("asked_chunks", "Chunks of these prompts.", keeper.asked_chunks)
    yield _counter("hit_chunks", "Of these, those after which a request could resume.", keeper.hit_chunks)
    yield _counter("stored_chunks", "Chunks and checkpoints that engines have stored.", keeper.stored)
    yield _gauge("resident_blocks", "Slots that are cached: found by key.", pool.cached)
    yield _gauge("pinned_blocks", "Of these, at most how many are protected by leases and stores.", pool.protected)
    yield _gauge("capacity_blocks", "All slots.", pool.capacity)
    yield _counter("evicted_chunks", "Chunks and checkpoints evicted to make room.", pool.evictions)
    unused = {"chunk": pool.unused_chunks, "checkpoint": pool.unused_checkpoints}
    text = "Of these, those that no request was ever given: they were stored in vain."
    yield Metric("evicted_unused_chunks", COUNTER, text, _labelled("kind", unused))
    if tier is not None:
        yield _counter("tier_hit_chunks", "Of the hits, those that the tier was read for.", keeper.tier_hit_chunks)
        yield from _of_tier(tier)


def _of_tier(tier: TierStatistics) -> Iterator[Metric]:
    cache = tier.cache
    outcomes = {"asked": tier.asked, "late": tier.late, "declined": tier.declined, "unanswered": tier.unanswered}
    text = "Questions of whose prompts the tier had more: read, read too late, or sooner computed; not told in time."
    yield Metric("tier_requests", COUNTER, text, _labelled("outcome", outcomes))
    yield _counter("tiering_read_bytes", "Bytes that were read from the tier.", cache.bytes_loaded)
    yield _counter("tiering_write_bytes", "Bytes that were written to the tier.", cache.bytes_stored)
    yield _counter("tiering_read_time", "Seconds in which the tier was read.", tier.read_seconds)
    yield _counter("tiering_write_time", "Seconds in which the tier was written.", tier.write_seconds)
    yield _counter("tiering_promotion_job_failures", "Reads of the tier that failed.", cache.loads_failed)
    yield _counter("tiering_cascade_job_failures", "Writes to the tier that failed.", cache.stores_failed)
    yield _counter("tier_refused_slots", "Slots that did not hold what they should.", tier.refused)
    yield _counter(
        "tier_kept_values", "Values with wrong bytes left in a shared store: too many came wrong.", tier.kept
    )
    yield _counter("tier_unsaved_chunks", "Chunks that left the pool before they were written.", tier.unsaved)
    yield _counter("tier_found_chunks", "Chunks that were there from before, or from others.", tier.found)
    yield _gauge("tier_resident_blocks", "Slots of the tier that are found by key.", cache.pool.cached)
    yield _gauge("tier_capacity_blocks", "All slots of the tier.", cache.pool.capacity)
    states = {state: int(state == tier.state) for state in STATES}
    yield Metric("tier_state", GAUGE, "1 for the state that the tier is in, else 0.", _labelled("state", states))


def spelled(metrics: Iterable[Metric]) -> str:
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric))


def _lines(metric: Metric) -> Iterator[str]:
    name = f"{PREFIX}{metric.name}{'_total' if metric.kind == COUNTER else ''}"
    yield f"# HELP {name} {metric.help}"
    yield f"# TYPE {name} {metric.kind}"
    for label, value in metric.values.items():
        yield f"{name}{{{label}}} {value}" if label else f"{name} {value}"


def _counter(name: str, help: str, value: float) -> Metric:
    return Metric(name, COUNTER, help, {"": value})


def _gauge(name: str, help: str, value: float) -> Metric:
    return Metric(name, GAUGE, help, {"": value})


def _labelled(label: str, values: Mapping[str, float]) -> Mapping[str, float]:
    return {f'{label}="{name}"': value for name, value in values.items()}
