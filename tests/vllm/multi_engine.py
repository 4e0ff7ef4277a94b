"""A real engine with several connectors of which the one that saves the most time loads.

with ChoosingEngine(folder, ours(), ours()) as engine:
    engine.slow_down(0)
    engine.answer(prompts)
    engine.forget()
    engine.answer(prompts)
    assert engine.count(1).wins == 8
"""

from collections.abc import Sequence
from pathlib import Path

from connector.multi.chooser import Chooser, Count
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.deciding import Direction, GroupCopy
from cpu_prefix_cache.testing import MeddlingCopier
from tests.vllm.real_cache import CachedEngine, Copies

MULTI = "CPUPrefixCacheMultiConnector"
SLOW_SECONDS = 0.1


def of_tests(name: str) -> dict[str, object]:
    return dict(kv_connector=name, kv_connector_module_path="tests.vllm.multi_children", kv_role="kv_both")


def example(folder: Path) -> dict[str, object]:
    """vLLM's, which keeps whole prompts in files, knows one group only, and loads in the step."""
    extra = dict(shared_storage_path=str(folder))
    return dict(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra)


FROZEN = of_tests("FrozenConnector")
BROKEN = of_tests("BrokenConnector")
SAVING = of_tests("SavingConnector")


class ChoosingEngine(CachedEngine):
    """`said` are the options beside the list. `Copies` are those of the first of ours."""

    def __init__(
        self,
        folder: Path,
        *connectors: dict[str, object],
        said: dict[str, object] | None = None,
        copies: Copies | None = None,
        **engine: object,
    ) -> None:
        extra = dict(connectors=list(connectors)) | (said or {})
        choosing = dict(connector=MULTI, module="connector.vllm.multi", extra=extra, log_stats=True, blocks=200)
        super().__init__(folder, copies=copies or Copies(), engine=choosing | engine)

    @property
    def chooser(self) -> Chooser:
        return self.connectors.scheduler.chooser

    def slow_down(self, at: int, clock: "Clock") -> None:
        """From now on each load of this one of ours takes SLOW_SECONDS by the clock."""
        copies = self.halves[at][1]._worker
        copies._copier = _SlowCopier(copies._copier, clock)

    def count(self, at: int) -> Count:
        return self.chooser.counts[at]

    def check_nothing_leaked(self) -> None:
        super().check_nothing_leaked()
        steps = self.connectors.scheduler._steps
        assert not (self.chooser._asked or self.chooser._failed or self.chooser._admitted)
        assert not (steps._receiving or steps._planned or steps._begun)
        assert all(not loads._under_way for loads in self.chooser._loads)
        assert all(count.pending == 0 for count in self.chooser.counts)


class Clock:
    """Replaces the clock by which the engine's loads and waits are measured: the test sets it."""

    def __init__(self, engine: ChoosingEngine) -> None:
        self.now = 1000.0
        engine.chooser._clock = lambda: self.now


class _SlowCopier(MeddlingCopier):
    def __init__(self, copier: Copier, clock: Clock) -> None:
        super().__init__(copier)
        self._clock = clock

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> Event:
        event = super().copy(direction, copies)
        if direction is Direction.LOAD:
            self._clock.now += SLOW_SECONDS
        return event
