"""A real engine with the host's prefix cache in it, whose copies a test can hold up or spoil.

    with CachedEngine(folder, offload="eager", copies=Copies()) as engine:
        engine.answer(prompts)
        engine.forget()
        with engine.copies.failing(Direction.LOAD):
            engine.answer(prompts)
        engine.check_nothing_leaked()

Its options are those of the connector; those of vLLM's are in `engine`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import connector.vllm.worker as worker_module
from connector.vllm import CPUPrefixCacheConnector
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.deciding import CPUPrefixCache, Direction, GroupCopy
from cpu_prefix_cache.messages.stats import CacheStatistics
from tests.support.faults import damaging
from tests.vllm.models import MODELS, some_tokens
from tests.vllm.real_engine import BLOCK, PATIENCE, Answer, RealEngine, cold_answers

HOST_BYTES = 2**25  # several times as much as 100 blocks of the device
CONNECTOR = "CPUPrefixCacheConnector"
NAP_SECONDS = 0.0005

BLOCKS = 12
PROMPTS = [some_tokens(BLOCKS * BLOCK + 5, seed) for seed in range(8)]
GROUPS = {"llama": ["prefix-0"], "qwen3": ["prefix-0"], "gemma3": ["window-0", "window-1", "prefix-2"]}


def ours(**options: object) -> dict[str, object]:
    """The configuration of our connector as one of several."""
    extra = dict(cpu_bytes_to_use=HOST_BYTES, offload="eager", reset="with_connector") | options
    return dict(
        kv_connector=CONNECTOR,
        kv_connector_module_path="connector.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )


@cache
def folder_of(model: str) -> Path:
    """Where a model of MODELS lies, as long as this process lives."""
    where = TemporaryDirectory()
    _folders.append(where)
    return MODELS[model](Path(where.name))


_folders: list[TemporaryDirectory] = []  # to be removed at exit


@cache
def expected_of(model: str) -> list[Answer]:
    """Answers of an engine without a connector to PROMPTS. Not to be called while another engine lives: vLLM has one
    connector a process."""
    return cold_answers(folder_of(model), PROMPTS)


class CachedEngine(RealEngine):
    """`cache`: options of the connector, beside its memory. `copies`: the fate of its copies. Where they have one,
    requests wait for their loads; else the first step that computes does.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host_bytes: int = HOST_BYTES,
        copies: "Copies | None" = None,
        engine: dict[str, object] | None = None,
        **cache: object,
    ) -> None:
        self.copies = copies
        with ExitStack() as around:
            if copies is not None:
                around.enter_context(copies.in_place())
            said = dict(cpu_bytes_to_use=host_bytes) | ({} if copies is None else dict(sync_load_bytes=0)) | cache
            super().__init__(folder, **dict(connector=CONNECTOR, extra=said) | (engine or {}))

    @property
    def halves(self) -> list[tuple[object, object]]:
        """The scheduler's half and the worker's of each of our connectors."""
        both = [self.connectors.scheduler, self.connectors.worker]
        all_of = [getattr(connector, "sub_connectors", [connector]) for connector in both]
        pairs = zip(*all_of, strict=True)
        return [(one.scheduler, other.worker) for one, other in pairs if isinstance(one, CPUPrefixCacheConnector)]

    @property
    def half(self) -> object:
        return self.halves[0][0]

    @property
    def cache(self) -> CPUPrefixCache:
        return self.half.cache

    @property
    def statistics(self) -> CacheStatistics:
        return self.cache.statistics()

    def close(self) -> None:
        if self.copies is not None:
            self.copies.go_on()  # or its threads would never end
        super().close()

    # Actions of a test

    def flood(self, prompts: int = 10, tokens: int = 330) -> None:
        """Other prompts, one after another, until nothing of before is left on a device of 100 blocks."""
        for _ in range(prompts):
            self.answer([some_tokens(tokens, ("flood", next(self._numbers)))], max_tokens=1)
        self.rest()

    def end_copies_in_their_step(self) -> None:
        """From now on: what becomes of requests then does not depend on how fast this machine is."""
        for _, worker in self.halves:
            worker.results = partial(_after, worker._worker.drain, worker.results)

    def step_until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        stop = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < stop, "it does not come to that"
            self.step()

    def request(self, name: str) -> object:
        """vLLM's Request of what was submitted, as long as its scheduler has it."""
        return next(each for id, each in self.scheduler.requests.items() if id.rsplit("-", 1)[0] == name)

    def status(self, name: str) -> str:
        return self.request(name).status.name

    def count_preemptions(self) -> list[str]:
        """A list of all requests that are preempted from now on."""
        preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def noted(request, *arguments, **options):
            preempted.append(request.request_id)
            return preempt(request, *arguments, **options)

        self.scheduler._preempt_request = noted
        return preempted

    # Findings of a test

    def on_host(self, prompt: Sequence[int]) -> int:
        """After how many of its tokens a prompt could be resumed from the host alone."""
        return self.cache.coordinator.longest_boundary(self.hashes(prompt), 0, len(prompt))

    def check_nothing_leaked(self) -> None:
        """At rest every block of the device is free, nothing on the host is held, and nobody is remembered."""
        self.rest()
        pool = self.pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # S7.4
        assert len(pool.free_block_queue.get_all_free_blocks()) == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert not self.scheduler.requests
        for half, worker in self.halves:
            statistics = half.cache.statistics()
            assert (statistics.running, statistics.storing, statistics.loading) == (0, 0, 0)
            assert (statistics.pool.pinned, statistics.pool.writing, statistics.pool.retired) == (0, 0, 0)
            assert not len(half._requests) and not half._requests.any_awaited
            assert not (half._step.loads or half._step.readmitted)
            assert not worker._waiting
            half.cache.check_valid()


def _after(first: Callable[[], object], then: Callable[[], object]) -> object:
    first()
    return then()


class Copies:
    """The fate of copies, between the connector's threads and the copier that it has chosen.

    begun     the directions of all copies begun
    holding   copies begun move their bytes, all of them, only when the test lets them go on
    blocking  the thread that takes up the next copy gets no further until then; those behind it have not begun
    failing   copies begun fail, and have moved nothing
    damaged   the name of a group of which every load damages one block: the control of whatever compares answers

    Where there are several connectors, it concerns the first alone.
    """

    def __init__(self, damaged: str | None = None) -> None:
        self.damaged = damaged
        self.begun: list[Direction] = []
        self.held: set[Direction] = set()
        self.blocked: set[Direction] = set()
        self.failed: dict[Direction, type[BaseException]] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """An engine that starts meanwhile copies by way of this one."""
        choose, chosen = worker_module.choose_copier, []
        spoil = choose if self.damaged is None else damaging(choose, self.damaged)

        def choose_and_wrap(*arguments, **options):
            choice = (choose if chosen else spoil)(*arguments, **options)
            chosen.append(choice)
            return choice if len(chosen) > 1 else replace(choice, copier=_Copier(self, choice.copier))

        with patch.object(worker_module, "choose_copier", choose_and_wrap):
            yield

    def count(self, direction: Direction) -> int:
        return self.begun.count(direction)

    def holding(self, direction: Direction) -> AbstractContextManager[None]:
        return _among(self.held, direction)

    def blocking(self, direction: Direction) -> AbstractContextManager[None]:
        return _among(self.blocked, direction)

    @contextmanager
    def failing(self, direction: Direction, error: type[BaseException] = OSError) -> Iterator[None]:
        self.failed[direction] = error
        try:
            yield
        finally:
            del self.failed[direction]

    def go_on(self) -> None:
        self.held.clear()
        self.blocked.clear()


@contextmanager
def _among(directions: set[Direction], direction: Direction) -> Iterator[None]:
    directions.add(direction)
    try:
        yield
    finally:
        directions.discard(direction)


class _Copier(Copier):
    def __init__(self, copies: Copies, copier: Copier) -> None:
        self._copies = copies
        self._copier = copier

    def here(self) -> Event:
        return self._copier.here()

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        self._copies.begun.append(direction)
        while direction in self._copies.blocked:
            time.sleep(NAP_SECONDS)
        if direction in self._copies.failed:
            raise self._copies.failed[direction]("the link is down")
        begin = partial(self._copier.submit, direction, copies, after)
        return _Held(lambda: direction in self._copies.held, begin) if direction in self._copies.held else begin()


class _Held(Event):
    """The event of a copy that begins only when it may end: its bytes come as late as they may."""

    def __init__(self, is_held: Callable[[], bool], begin: Callable[[], Event]) -> None:
        self._is_held = is_held
        self._begin = begin
        self._mark: Event | None = None

    def passed(self) -> bool:
        if self._mark is None and not self._is_held():
            self._mark = self._begin()
        return self._mark is not None and self._mark.passed()

    def unfit(self) -> Sequence[int]:
        return () if self._mark is None else self._mark.unfit()

    def until_passed(self) -> None:
        while not self.passed():
            time.sleep(NAP_SECONDS)
