"""Time of a keeper's answers, as engines see it, at a steady rate of questions.

    python -m benchmarks.deciding.keeper_answers [--engines 8] [--rate 1000] [--seconds 10] [--chunks 64] [--json OUT]
    python -m benchmarks.deciding.keeper_answers --echo

A keeper and engines are processes of this machine. Each engine connects as engines do and sends a `run` for a prompt at
its own times, so that together they send `--rate` a second; it releases the lease, and now and then stores a prompt
that nobody has. Measured is from before the message is encoded until the answer is decoded, by an engine that waits for
it, without the engine's step around it.

Bar: 200 us at the 99th percentile. With fewer processors than engines most of it is waiting for one. With `--echo` a
process that answers all alike and at once has the keeper's place: what sockets and processes take here.
"""

import argparse
import json
import multiprocessing
import os
import random
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import environment, keeper, percentile
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.keeper.protocol import (
    ANSWERS,
    NAMESPACE_BYTES,
    NOBODY,
    Kind,
    Message,
    Received,
    encoded,
)
from cpu_prefix_cache.keeper.shape import spelled
from cpu_prefix_cache.messages.tier import KEY_BYTES

MICRO = 1e6
BAR = 200
SLOTS = 100_000
BLOCK_BYTES = 4096
MODEL = HybridChunkPlanner([PrefixGroup(name="full", block_tokens=16, block_bytes=4096)], max_model_len=16)
STORED_EVERY = 20
PROMPTS = 200  # that engines have in common


class Engine:
    """An engine's end of the socket, which waits for every answer."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._received = Received()
        self._next = 0
        hello = Message(Kind.HELLO, numbers=(BLOCK_BYTES, NOBODY, *spelled(MODEL)), keys=(bytes(NAMESPACE_BYTES),))
        self._socket.sendall(encoded(hello))
        self.files = socket.recv_fds(self._socket, 1 << 16, 2)[1]

    def ask(self, kind: Kind, keys: Sequence[bytes]) -> tuple[int, Message]:
        self._next += 1
        self._socket.sendall(encoded(Message(kind, self._next, (0,), keys)))
        while True:
            self._received.feed(self._socket.recv(1 << 20))
            for message in self._received:
                return self._next, message

    def send(self, message: Message) -> None:
        self._socket.sendall(encoded(message))


def prompt(number: int, chunks: int) -> list[bytes]:
    """Keys of a prompt, of which prompts with the same tens have the first half in common."""
    half = chunks // 2
    first = [f"{number // 10}-{at}".encode().ljust(KEY_BYTES) for at in range(half)]
    return first + [f"{number}-{at}".encode().ljust(KEY_BYTES) for at in range(half, chunks)]


def store(engine: Engine, keys: Sequence[bytes]) -> None:
    id, took = engine.ask(Kind.TAKE, keys)
    engine.send(Message(Kind.COMMIT, id, (took.numbers[2], False)))


def live(path: str, seed: int, options: argparse.Namespace, results: Any) -> None:
    engine, draw = Engine(path), random.Random(seed)
    for number in range(seed, PROMPTS, options.engines):
        store(engine, prompt(number, options.chunks))
    times = []
    began = due = time.perf_counter() + 0.5
    while due < began + options.seconds:
        due += draw.expovariate(options.rate / options.engines)
        time.sleep(max(0.0, due - time.perf_counter()))
        keys = prompt(draw.randrange(PROMPTS), options.chunks)
        asked = time.perf_counter()
        id, _ = engine.ask(Kind.RUN, keys)
        times.append(time.perf_counter() - asked)
        engine.send(Message(Kind.RELEASE, id))
        if len(times) % STORED_EVERY == 0:
            store(engine, prompt(draw.randrange(10**6, 10**9), options.chunks))
    results.put(times)


def echo(listener: socket.socket) -> None:
    """Answer every question, and all alike."""
    answers = {Kind.RUN: (0, 0), Kind.TAKE: (0, 0, 0)}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        received: dict[Any, Received] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    selector.register(connection, selectors.EVENT_READ, connection)
                    received[connection] = Received()
                    continue
                connection = key.data
                data = connection.recv(1 << 20)
                if not data:
                    selector.unregister(connection)
                    continue
                received[connection].feed(data)
                for message in received[connection]:
                    if message.kind is Kind.HELLO:
                        connection.sendall(bytes(1))
                    elif message.kind in answers:
                        answer = Message(ANSWERS[message.kind], message.id, answers[message.kind])
                        connection.sendall(encoded(answer))


@contextmanager
def echoing(path: str) -> Iterator[Any]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = multiprocessing.Process(target=echo, args=(listener,), daemon=True)
        process.start()
        yield process
        process.kill()


def main() -> None:
    options = arguments()
    print("\n".join(environment(["cpu-prefix-cache"])))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "kv.sock")
        with echoing(path) if options.echo else keeper(path, SLOTS * BLOCK_BYTES) as process:
            results = multiprocessing.Queue()
            engines = [
                multiprocessing.Process(target=live, args=(path, seed, options, results))
                for seed in range(options.engines)
            ]
            for engine in engines:
                engine.start()
            times = [each for _ in engines for each in results.get()]
            busy = processor_seconds(process.pid) / options.seconds
    report(times, busy, options)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(times: Sequence[float], busy: float, options: argparse.Namespace) -> None:
    rate = len(times) / options.seconds
    shares = {name: percentile(times, share) * MICRO for name, share in (("50", 0.5), ("90", 0.9), ("99", 0.99))}
    print(f"{options.engines} engines, {rate:.0f} questions a second of {options.chunks} chunks")
    print(", ".join(f"p{name} {value:.0f} us" for name, value in shares.items()))
    each = busy / rate * MICRO
    print(f"the keeper was busy {busy:.0%} of one processor: {each:.0f} us a question, with its release and stores")
    print(f"bar {BAR} us: {'met' if shares['99'] <= BAR else 'missed'}")
    if options.json:
        row = {"machine": environment(["cpu-prefix-cache"]), "rate": rate, "us": shares, "busy_us": each}
        options.json.write_text(json.dumps(row, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1000.0, help="questions a second, of all engines")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chunks", type=int, default=64, help="chunks of a prompt")
    parser.add_argument("--echo", action="store_true", help="no keeper")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
