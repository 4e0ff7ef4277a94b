"""How each of the connectors has done, in vLLM's /metrics and in its log, beside their own metrics.

    in the scheduler   ChoiceCounts        what has changed since the last report
    between processes  ChoiceStats         a report; vLLM aggregates those of several steps
    in the frontend    ChoicePromMetrics   the same numbers under the names in METRICS

A report is a flat dict with the numbers of a Count: "wins:0:ExampleConnector", "misses:late:1:CPUPrefixCacheConnector".
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.multi.chooser import MISSES, Count
from connector.vllm.metrics import PREFIX

OWN = "CPUPrefixCacheMultiConnector"  # whose report it is, among those of the connectors
LEVEL = "pending"  # the latest value counts; of all others the sum
METRICS = {
    "queries": "Requests for which the connector was asked what it has.",
    "wins": "Those of them for which it has loaded: what it had saved the most time.",
    "tokens": "Prompt tokens that it has loaded.",
    "misses": "Those for which it had nothing, answered too late or with an error, or failed to load.",
    "seconds": "Seconds that its loads have taken; those that ended together count once.",
    LEVEL: "Requests that wait for its answer.",
}


class ChoiceStats(KVConnectorStats):
    """vLLM tests it for truth: no `__len__`, no `__bool__`."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "ChoiceStats":
        """A report from received data, copied."""
        return cls(dict(data))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "ChoiceStats":
        for key, value in other.data.items():
            self.data[key] = value if key.startswith(LEVEL) else self.data.get(key, 0) + value
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line."""
        return {key: round(value, 3) for key, value in sorted(self.data.items()) if value}


class ChoiceCounts:
    """`counts` are those of a Chooser, one for each of the connectors in `names`."""

    def __init__(self, names: Sequence[str], counts: Sequence[Count]) -> None:
        self._names, self._counts = names, counts
        self._before: dict[str, float] = {}

    def take(self) -> ChoiceStats | None:
        """None when nothing has changed."""
        before, now = self._before, dict(self._numbers())
        if now == before:
            return None
        self._before = now
        new = {key: value if key.startswith(LEVEL) else value - before.get(key, 0) for key, value in now.items()}
        return ChoiceStats({key: value for key, value in new.items() if value or key.startswith(LEVEL)})

    def _numbers(self) -> Iterator[tuple[str, float]]:
        for name, count in zip(self._names, self._counts, strict=True):
            for key, value in vars(count).items():
                if isinstance(value, dict):
                    yield from ((f"{key}:{reason}:{name}", number) for reason, number in value.items())
                else:
                    yield f"{key}:{name}", value


class ChoicePromMetrics(KVConnectorPromMetrics):
    """METRICS in vLLM's metric classes; all series exist from the start, at 0. `told` shows all other reports."""

    def __init__(
        self,
        names: Sequence[str],
        told: KVConnectorPromMetrics,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._told = told
        self._series: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for metric, text in METRICS.items():
            has_reasons = metric == "misses"
            shown = self._show(metric, text, [*labelnames, "connector", *(["reason"] if has_reasons else [])])
            reasons: list[tuple[str, ...]] = [(reason,) for reason in MISSES] if has_reasons else [()]
            for (engine, labels), name, reason in product(per_engine_labelvalues.items(), names, reasons):
                self._series[engine][":".join((metric, *reason, name))] = shown.labels(*labels, name, *reason)

    def _show(self, metric: str, text: str, labels: list[str]) -> Any:
        fields: dict[str, Any] = dict(name=f"{PREFIX}multi_{metric}", documentation=text, labelnames=labels)
        if metric == LEVEL:
            return self._gauge_cls(**fields, multiprocess_mode="mostrecent")
        return self._counter_cls(**fields)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        others = dict(transfer_stats_data)
        own = others.pop(OWN, {})
        self._told.observe(others, engine_idx)
        for key, value in own.items():
            series = self._series[engine_idx][key]
            if key.startswith(LEVEL):
                series.set(value)
            else:
                series.inc(value)
