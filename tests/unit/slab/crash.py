"""Writes into a slab from four threads until it is killed. Run by test_crash.py: crash.py PATH SEED [careless].

A slot's bytes follow from its key, so that a reader of the slot can check them. With
`careless` the records are not cleared before the bytes are written over.
"""

import hashlib
import mmap
import random
import sys
import threading
from pathlib import Path

from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.slab.folder import Folder
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.tier import RankPart

SLOTS = 128
BLOCK = 256 << 10
THREADS = 4


def open_slab(path: str | Path) -> Slab:
    named = Namespace((("model", "crash"),))
    return Slab(Folder(FileTier(str(path), 1, keep_others=True), named, RankPart(SLOTS), BLOCK))


def content(key: bytes) -> bytes:
    """Bytes of the slot of this key. Every page of it differs from every page of any other."""
    return b"".join(hashlib.sha256(key + bytes([page])).digest() * 128 for page in range(BLOCK // 4096))


def key_of(seed: int, thread: int, count: int) -> bytes:
    return hashlib.sha256(f"{seed}/{thread}/{count}".encode()).digest()


def write(slab: Slab, seed: int, thread: int) -> None:
    """Runs of slots that no other thread has."""
    choose = random.Random(f"{seed}/{thread}")
    own = SLOTS // THREADS
    pages = [memoryview(mmap.mmap(-1, BLOCK)) for _ in range(3)]
    for count in range(0, 1 << 32, len(pages)):
        first = thread * own + choose.randrange(own - len(pages) + 1)
        keys = [key_of(seed, thread, count + at) for at in range(len(pages))]
        for page, key in zip(pages, keys, strict=True):
            page[:] = content(key)
        labels = [Label(key, b"", 0, 0, CHUNK, slab.next_generation + count) for key in keys]
        slab.write(range(first, first + len(pages)), pages, labels)


def main(path: str, seed: str, *careless: str) -> None:
    slab = open_slab(path)
    if careless:
        slab.records.clear = lambda slots: None  # type: ignore[method-assign]
    threads = [threading.Thread(target=write, args=(slab, int(seed), thread)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    print("go", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
