"""A store whose server is frozen, or killed and started again, while 100 requests a second come to the HostCache above.

    PYTHONPATH=src:examples python -m benchmarks.tiers.tiers_frozen [--json FILE]

A real redis-server on this machine, and an engine that computes in its sleep: each step of 10 ms computes 600 tokens.
Prompts are a document of 2,048 tokens and a question. Places of the document:

    hot      the host: 40 documents, 80 % of the requests
    known    the store, and this process knows it, but the host has room for a third of them: 10 %
    unseen   the store alone, each requested once: another process has stored them, so the store is queried: 10 %

Printed for the time before, while the server is away, and after: the time of one step in calls of the HostCache (start,
begin_step, end_step, end), in seconds of the clock and of the processor; how long requests waited, and how long beyond
the deadline they got their answer; and how many tokens of prompts the host had. Loaded blocks are compared.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from batching_engine import Blocks, BlocksDevice
from benchmarks.common import print_environment
from cpu_prefix_cache import Hit, HostCache, HostOptions, Pending, Prefix, SharedTier, keys_and_values
from cpu_prefix_cache.stores.settings import ASK_SECONDS
from tests.stores.servers import RedisServer, missing

BLOCK_TOKENS, DOCUMENT_BLOCKS = 32, 64
QUESTION = BLOCK_TOKENS + 1
PROMPT = BLOCK_TOKENS * DOCUMENT_BLOCKS + QUESTION
BLOCK_BYTES = 8 << 10
# Documents
HOT = 40
KNOWN = 60
UNSEEN = 320
HOST_DOCUMENTS = HOT + KNOWN // 3
DEVICE_DOCUMENTS = 48
STEP_SECONDS, STEP_TOKENS = 0.01, 600
REQUESTS_A_SECOND = 100
MOST_MS = 1e3 * ASK_SECONDS + 5
# Seconds
WARM = 8.0
BEFORE = 6.0
AWAY = 4.0
AFTER = 12.0


class Request:
    def __init__(self, id: int, document: int) -> None:
        own = [f"{document}:{at}" for at in range(DOCUMENT_BLOCKS)] + [f"question {id} of {document}"]
        self.id, self.keys = id, [hashlib.sha256(each.encode()).digest() for each in own]
        self.table: list[int] = []
        self.computed = 0
        self.waited_from = self.deadline = 0.0
        self.lacked_blocks = False  # of the device: then its waiting is not the store's


class Phase:
    """Observations in one part of a run."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []  # clock and processor
        self.calls: dict[str, float] = {}  # the longest of each
        self.waits: list[float] = []
        self.beyond: list[float] = []  # the deadline
        self.tokens = self.host_tokens = self.tier_tokens = 0

    def shown(self) -> dict[str, Any]:
        clock, cpu = (sorted(each) for each in zip(*self.steps, strict=True))
        at99 = int(len(clock) * 0.99)
        return {
            "step_ms": {"p50": 1e3 * clock[len(clock) // 2], "p99": 1e3 * clock[at99], "max": 1e3 * clock[-1]},
            "step_cpu_ms": {"p50": 1e3 * cpu[len(cpu) // 2], "p99": 1e3 * cpu[at99], "max": 1e3 * cpu[-1]},
            "steps": len(clock),
            "steps_above_the_bar": sum(1e3 * each > MOST_MS for each in clock),
            "call_max_ms": {name: 1e3 * each for name, each in self.calls.items()},
            "waited": len(self.waits),
            "wait_max_ms": 1e3 * max(self.waits, default=0.0),
            "beyond_deadline_max_ms": 1e3 * max(self.beyond, default=0.0),
            "host_hit_ratio": self.host_tokens / self.tokens,
            "store_hit_ratio": self.tier_tokens / self.tokens,
        }


class Engine:
    """Starts each request as it fits, and computes the oldest first. Only the host keeps prefixes."""

    def __init__(self, url: str, ask_seconds: float = ASK_SECONDS) -> None:
        num_blocks = DEVICE_DOCUMENTS * (DOCUMENT_BLOCKS + 2)
        self.kv = torch.zeros(2, num_blocks, BLOCK_TOKENS, BLOCK_BYTES // 2 // BLOCK_TOKENS // 8, dtype=torch.float64)
        self.blocks = Blocks(num_blocks)
        self.host = HostCache(
            BlocksDevice(self.blocks),
            [Prefix(keys_and_values(self.kv, block_dim=1), block_tokens=BLOCK_TOKENS)],
            host_bytes=HOST_DOCUMENTS * (DOCUMENT_BLOCKS + 1) * BLOCK_BYTES,
            max_model_len=2 * PROMPT,
            max_step_tokens=STEP_TOKENS,
            options=HostOptions(offload="eager", threads=True),
            below=SharedTier(url, model="frozen", revision="1", ask_seconds=ask_seconds),
        )
        self.host.prepare()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.loading: dict[int, Request] = {}
        self.phase = Phase()
        self._spent = (0.0, 0.0)

    def step(self) -> None:
        self._spent = (0.0, 0.0)
        began = time.monotonic()
        for _ in range(len(self.waiting)):
            request = self.waiting.popleft()
            if not self._start(request):
                self.waiting.append(request)
        self._call("begin_step", self.host.begin_step)
        self._compute()
        time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))
        computed = {each.id: each.computed for each in self.running}
        for id, resume_at in self._call("end_step", lambda: self.host.end_step(computed)):
            self._loaded(self.loading.pop(id), resume_at)
        for request in [each for each in self.running if each.computed == PROMPT]:
            self._call("end", lambda request=request: self.host.end(request.id, PROMPT))
            self.running.remove(request)
            self.blocks.free(request.table)
        self.phase.steps.append(self._spent)

    def _start(self, request: Request) -> bool:
        if len(self.blocks.queue) < len(request.keys) + 1:
            request.lacked_blocks = True
            return False

        def allocate(start: int, boundary: int) -> list[int]:
            request.table = [self.blocks.hand_out() for _ in range(len(request.keys) + 1)]
            return request.table[start // BLOCK_TOKENS : boundary // BLOCK_TOKENS]

        answer = self._call(
            "start",
            lambda: self.host.start(request.id, request.keys, num_tokens=PROMPT, on_device=0, allocate=allocate),
        )
        now = time.monotonic()
        if isinstance(answer, Pending):
            request.waited_from, request.deadline = request.waited_from or now, answer.deadline
            return False
        if request.waited_from and not request.lacked_blocks:
            self.phase.waits.append(now - request.waited_from)
            self.phase.beyond.append(now - request.deadline)
        if isinstance(answer, Hit):
            self.loading[request.id] = request
        else:
            allocate(0, 0)
            self.running.append(request)
        return True

    def _compute(self) -> None:
        left = STEP_TOKENS
        for request in self.running:
            tokens = min(left, PROMPT - request.computed)
            first, request.computed = request.computed // BLOCK_TOKENS, request.computed + tokens
            for at in range(first, request.computed // BLOCK_TOKENS):
                self.kv[0, request.table[at], 0, 0] = self.kv[1, request.table[at], -1, -1] = number(request.keys[at])
                self.blocks.computed(request.table[at], request.keys[at])
            left -= tokens

    def _loaded(self, request: Request, resume_at: int) -> None:
        here = request.table[: resume_at // BLOCK_TOKENS]
        expected = torch.tensor([number(key) for key in request.keys[: len(here)]], dtype=torch.float64)
        for each in self.kv[0, here, 0, 0], self.kv[1, here, -1, -1]:
            if not torch.equal(each, expected):
                raise RuntimeError("a load brought other bytes than were stored")
        for block, key in zip(here, request.keys, strict=False):
            self.blocks.computed(block, key)
        request.computed = resume_at
        self.running.append(request)

    def _call(self, name: str, act: Callable[[], Any]) -> Any:
        clock, cpu = time.perf_counter(), time.thread_time()
        result = act()
        seconds = time.perf_counter() - clock
        self._spent = self._spent[0] + seconds, self._spent[1] + time.thread_time() - cpu
        self.phase.calls[name] = max(seconds, self.phase.calls.get(name, 0.0))
        return result


def number(key: bytes) -> float:
    return float(int.from_bytes(key[:6], "little"))


class Traffic:
    """Requests, 100 a second, and what the engine did with them in each phase."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._random = random.Random(0)
        self._next = 0
        self._unseen = iter(range(HOT + KNOWN, HOT + KNOWN + UNSEEN))

    def run(self, seconds: float, each_step: Callable[[], None] = lambda: None) -> Phase:
        engine, phase = self.engine, Phase()
        engine.phase, before = phase, engine.host.statistics()
        began, first = time.monotonic(), self._next
        while (now := time.monotonic()) < began + seconds:
            while self._next - first < (now - began) * REQUESTS_A_SECOND:
                engine.waiting.append(Request(self._next, self._document()))
                self._next += 1
            engine.step()
            each_step()
        after = engine.host.statistics()
        phase.tokens = (self._next - first) * PROMPT
        phase.tier_tokens = after.tier.hit_tokens - before.tier.hit_tokens
        phase.host_tokens = after.cache.hit_tokens - before.cache.hit_tokens - phase.tier_tokens
        return phase

    def _document(self) -> int:
        of = self._random.random()
        if of < 0.80:
            return self._random.randrange(HOT)
        return HOT + self._random.randrange(KNOWN) if of < 0.90 else next(self._unseen)


class Watch:
    """When the tier paused and was open again, and when something was read from it, in seconds from now on."""

    def __init__(self, host: HostCache) -> None:
        self._host, self._began = host, time.monotonic()
        self._state, self._chunks = host.statistics().tier.state, self._loaded
        self.changes: list[tuple[float, str]] = []
        self.read_at: float | None = None

    @property
    def _loaded(self) -> int:
        return self._host.statistics().tier.cache.chunks_loaded

    def look(self) -> None:
        seen, now = self._host.statistics().tier, time.monotonic() - self._began
        if seen.state != self._state:
            self._state = seen.state
            self.changes.append((now, seen.state))
        if self.read_at is None and self._loaded > self._chunks:
            self.read_at = now


def fill(url: str) -> None:
    """Another process's work: all documents are in the store."""
    engine = Engine(url, ask_seconds=60.0)
    for document in range(HOT + KNOWN + UNSEEN):
        engine.waiting.append(Request(-1 - document, document))
    while engine.waiting or engine.running or engine.loading or engine.host.is_busy:
        engine.step()
    engine.host.close()


@contextmanager
def redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.thaw()
        server.kill()


def beside(act: Callable[[], None]) -> None:
    """In a thread: the engine does not wait for the end or the start of a process."""
    threading.Thread(target=act).start()


def measured(leave: str, come_back: str) -> dict[str, Any]:
    """`leave` and `come_back` are what happens to the server."""
    with tempfile.TemporaryDirectory() as folder, redis(Path(folder)) as server:
        fill(server.url())
        engine = Engine(server.url())
        traffic = Traffic(engine)
        traffic.run(WARM)
        phases = {"before": traffic.run(BEFORE)}
        beside(getattr(server, leave))
        away = Watch(engine.host)
        phases["away"] = traffic.run(AWAY, away.look)
        load = os.getloadavg()[0]
        beside(getattr(server, come_back))
        back = Watch(engine.host)
        phases["after"] = traffic.run(AFTER, back.look)
        seen = engine.host.statistics().tier
        engine.host.close()
    return {
        "what": f"{leave}, {come_back}",
        "load": load,
        "phases": {name: each.shown() for name, each in phases.items()},
        "away": away.changes,
        "back": back.changes,
        "read_again_after_s": back.read_at,
        "questions": seen.questions,
        "unanswered": seen.unanswered,
        "refused": seen.refused,
        "late": seen.late,
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['what']} (load of the machine {row['load']:.1f})")
    print("          step ms: p50    p99    max   CPU max   waited, most ms, beyond deadline   host had   store had")
    for name, each in row["phases"].items():
        clock, cpu = each["step_ms"], each["step_cpu_ms"]
        print(
            f"{name:12}{clock['p50']:10.2f} {clock['p99']:6.2f} {clock['max']:6.2f} {cpu['max']:9.2f} "
            f"{each['waited']:8} {each['wait_max_ms']:8.1f} {each['beyond_deadline_max_ms']:16.1f} "
            f"{each['host_hit_ratio']:10.1%} {each['store_hit_ratio']:11.1%}"
        )
        print(
            f"{'':12}{each['steps']} steps, {each['steps_above_the_bar']} above the bar; longest calls: "
            + ", ".join(f"{call} {ms:.2f} ms" for call, ms in each["call_max_ms"].items())
        )
    print("away: " + (", ".join(f"{state} after {at:.2f} s" for at, state in row["away"]) or "no change"))
    print("back: " + (", ".join(f"{state} after {at:.2f} s" for at, state in row["back"]) or "no change"), end="; ")
    print("not read again" if row["read_again_after_s"] is None else f"read after {row['read_again_after_s']:.2f} s")
    most, cpu = (max(each[of]["max"] for each in row["phases"].values()) for of in ("step_ms", "step_cpu_ms"))
    print(
        f"bar: no step above {MOST_MS:.0f} ms in the scheduler: {most:.1f} ms by the clock, {cpu:.1f} ms of processor"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)  # each transfer that fails is logged with its traceback
    print_environment(["cpu-prefix-cache", "torch", "redis"])
    if "redis" in (lacks := missing()):
        raise SystemExit(f"not measured: {lacks['redis']}")
    rows = []
    for leave, come_back in (("freeze", "thaw"), ("kill", "start")):
        rows.append(measured(leave, come_back))
        show(rows[-1])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
