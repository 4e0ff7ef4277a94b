"""Time until the keeper of a large pool finds again, from the start of its process on.

    python -m benchmarks.deciding.keeper_restart [--host-bytes 500GiB] [--block-bytes 2MiB] [--chunks 64] [--json OUT]

A keeper was killed, and an engine has both files of its pool, which is full. The region is a file of that size of which
no page is taken, because a keeper never looks into it; the records are as a keeper leaves them. The next keeper starts,
the engine hands it the files and asks for a prompt. Engines try to come back every .1 s.

Bar: 10 s, of which some tenths are what a supervisor takes to start it.
"""

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path

from benchmarks.common import environment, keeper
from benchmarks.deciding.keeper_answers import processor_seconds
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.keeper.names import named
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES, Kind, Message, Received, encoded
from cpu_prefix_cache.keeper.records import Records, records_bytes
from cpu_prefix_cache.keeper.shape import spelled
from cpu_prefix_cache.memory import shared_file
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.node.hello import RETRY_SECONDS, connect, greet
from cpu_prefix_cache.node.presence import lock

BAR = 10.0
NUMBER = 1  # of the engine
MODEL = HybridChunkPlanner([PrefixGroup(name="full", block_tokens=16, block_bytes=4096)], max_model_len=16)
NAMESPACE = bytes(NAMESPACE_BYTES)
PATIENCE = 300.0


def prompt(number: int, chunks: int) -> list[bytes]:
    return [hashlib.sha256(b"%d-%d" % (number, at)).digest() for at in range(chunks)]


def full_pool(host_bytes: int, block_bytes: int, chunks: int) -> list[int]:
    """The files of a pool that is full of prompts of so many chunks, in slots of any order."""
    num_slots = host_bytes // block_bytes
    files = [shared_file.make(num_slots * block_bytes), shared_file.make(records_bytes(num_slots))]
    records = Records(memoryview(mmap(files[1], records_bytes(num_slots))))
    records.begin(num_slots, block_bytes)
    slots = list(range(num_slots))
    random.Random(1).shuffle(slots)
    for first in range(0, num_slots, chunks):
        above = None
        names = named(NAMESPACE, prompt(first // chunks, chunks))
        for slot, name in zip(slots[first : first + chunks], names, strict=False):
            records.write([slot], name, above)
            above = name
    return files


def comes_back(path: str, files: Sequence[int], block_bytes: int, is_late: Callable[[], bool]) -> socket.socket:
    """As an engine does: hello with the files, until a keeper welcomes it."""
    hello = Message(Kind.HELLO, numbers=(block_bytes, NUMBER, *spelled(MODEL)), keys=(NAMESPACE,))
    while True:
        try:
            connected = connect(path)
            greet(connected, hello, files, is_late)
            return connected
        except OSError:
            time.sleep(RETRY_SECONDS)


def found(connected: socket.socket, keys: Sequence[bytes]) -> int:
    connected.sendall(encoded(Message(Kind.RUN, 1, (0,), keys)))
    received = Received()
    while True:
        received.feed(connected.recv(1 << 20))
        for message in received:
            return message.numbers[1]


def main() -> None:
    options = arguments()
    print("\n".join(environment(["cpu-prefix-cache"])))
    block_bytes = parse_bytes(options.block_bytes)
    files = full_pool(parse_bytes(options.host_bytes), block_bytes, options.chunks)
    num_slots = os.fstat(files[0]).st_size // block_bytes
    with tempfile.TemporaryDirectory() as folder, open(lock(files[1], NUMBER), "rb"):
        path = str(Path(folder) / "kv.sock")
        with socket.socket(socket.AF_UNIX) as before:
            before.bind(path)  # what a keeper that was killed leaves behind
        began = time.monotonic()
        with keeper(path, 1 << 30, stderr=subprocess.DEVNULL) as process:
            listens = time.monotonic() - began
            with comes_back(path, files, block_bytes, lambda: time.monotonic() > began + PATIENCE) as connected:
                hits = found(connected, prompt(num_slots // options.chunks // 2, options.chunks))
            finds = time.monotonic() - began
            busy, resident = processor_seconds(process.pid), resident_bytes(process.pid)
    if hits != options.chunks:
        raise SystemExit(f"{hits} of {options.chunks} chunks were found")
    print(f"{options.host_bytes} in {num_slots:,} slots of {options.block_bytes}, all of them with a record")
    print(f"it listens after {listens:.2f} s, and finds a prompt after {finds:.2f} s, of which it worked {busy:.2f} s")
    print(f"it takes {resident >> 20} MiB")
    print(f"bar {BAR:.0f} s: {'met' if finds <= BAR else 'missed'}")
    if options.json:
        row = {"slots": num_slots, "listens": listens, "finds": finds, "busy": busy, "resident_bytes": resident}
        options.json.write_text(json.dumps({"machine": environment(["cpu-prefix-cache"]), **row}, indent=1) + "\n")


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host-bytes", default="500GiB", help="size of the pool")
    parser.add_argument("--block-bytes", default="2MiB", help="size of a slot: 16 tokens of Llama 3.1 8B")
    parser.add_argument("--chunks", type=int, default=64, help="chunks of a prompt")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
