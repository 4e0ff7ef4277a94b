"""An engine on a tier of files, that serves until it is ended: engine.py TIER_FOLDER TALK_FOLDER [control].

A block's bytes follow from its key and from how often the weights were replaced, so every block that a load brings
is compared whole. Blocks are poisoned when they are handed out. An error in a step ends the process.

TALK_FOLDER/told   orders of `watch.py`: resets in all, the story it is in, whether to end
TALK_FOLDER/seen   a report of the engine, after each step

Controls: "unchecked" takes checksums for granted, and "mapped" writes into a mapped file of the tier in each step.
"""

import hashlib
import json
import logging
import mmap
import os
import random
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import torch

from batching_engine import Blocks, BlocksDevice
from cpu_prefix_cache import FileTier, Hit, HostCache, HostOptions, Pending, Prefix, keys_and_values
from cpu_prefix_cache.slab import records
from cpu_prefix_cache.tiers import tier_cache

TOKENS = 32  # of a block
CHUNKS = 16  # of a document, and of each prompt, which is a document and one token
PROMPT = CHUNKS * TOKENS + 1
DOCUMENTS = 100
HOST_DOCUMENTS = 20
DEVICE_DOCUMENTS = 8
SLOTS = 2000
BLOCK_BYTES = 8192
TIER_BYTES = SLOTS * (BLOCK_BYTES + records.SIZE) + (64 << 10)
STEP_TOKENS, STEP_SECONDS = 64, 0.005  # slow enough that reading saves time
POISON = -1
SEEN_BYTES = 1024


class Request:
    def __init__(self, id, document):
        self.id = id
        self.table = []
        self.computed = 0
        self.keys = [hashlib.sha256(f"{document}/{at}".encode()).digest() for at in range(CHUNKS)]


class Engine:
    """`seen` is its report; `weights` is how often they were replaced."""

    def __init__(self, folder, weights):
        num_blocks = DEVICE_DOCUMENTS * (CHUNKS + 1)
        self.kv = torch.full((2, num_blocks, TOKENS, BLOCK_BYTES // 2 // TOKENS // 8), POISON, dtype=torch.int64)
        self.blocks, self.weights = Blocks(num_blocks), weights
        self.host = HostCache(
            BlocksDevice(self.blocks),
            [Prefix(keys_and_values(self.kv, block_dim=1), block_tokens=TOKENS)],
            host_bytes=HOST_DOCUMENTS * CHUNKS * BLOCK_BYTES,
            max_model_len=2 * PROMPT,
            max_step_tokens=STEP_TOKENS,
            options=HostOptions(offload="eager", threads=True),
            below=FileTier(folder, TIER_BYTES, model="patterns", revision="1", offload="eager", flush_seconds=0.0),
        )
        self.host.prepare()
        self.waiting = deque()
        self.running = []
        self.loading = {}
        self.draw = random.Random(os.getpid())
        self.count = 0
        self.compared = 0
        self.wrong = 0
        self.ended = 0
        self.processor = 0.0  # of the cache's calls, in this step

    def step(self):
        while len(self.waiting) < 4:
            self.count += 1
            self.waiting.append(Request(self.count, min(int(self.draw.expovariate(1 / 25)), DOCUMENTS - 1)))
        self.processor = 0.0
        for _ in range(len(self.waiting)):
            request = self.waiting.popleft()
            if len(self.running) + len(self.loading) >= 4 or not self._started(request):
                self.waiting.append(request)
        self._timed(self.host.begin_step)
        for request in self._computing():
            stop = min(request.computed + STEP_TOKENS, PROMPT)
            for at in range(request.computed // TOKENS, stop // TOKENS):
                self.kv[:, request.table[at]] = self._content(request.keys[at])
                self.blocks.computed(request.table[at], request.keys[at])
            request.computed = stop
        time.sleep(STEP_SECONDS)
        for id, resume_at in self._timed(self.host.end_step, {each.id: each.computed for each in self.running}):
            self._loaded(self.loading.pop(id), resume_at)
        for request in [each for each in self.running if each.computed == PROMPT]:
            self._end(request)

    def reset(self):
        """The weights are replaced. What runs ends first."""
        for request in [*self.running, *self.loading.values()]:
            self._end(request)
        self._timed(self.host.reset)
        self.blocks.block_of.clear()
        self.blocks.keys[:] = [None] * len(self.blocks.keys)
        self.weights += 1

    def seen(self):
        seen = self.host.statistics()
        return {
            "compared": self.compared,
            "wrong": self.wrong,
            "ended": self.ended,
            "host_tokens": seen.cache.hit_tokens - seen.tier.hit_tokens,
            "tier_tokens": seen.tier.hit_tokens,
            "stored": seen.tier.cache.chunks_stored,
            "refused": seen.tier.refused,
            "found": seen.tier.found,
            "state": seen.tier.state,
            "weights": self.weights,
        }

    def _started(self, request):
        cached = self.blocks.cached(request.keys)
        missing = CHUNKS + 1 - len(cached)
        if missing > len(self.blocks.queue) - sum(not self.blocks.users[block] for block in cached):
            return False

        def allocate(start, boundary):
            self.blocks.use(cached)
            request.table = cached + [self.blocks.hand_out() for _ in range(missing)]
            self.kv[:, request.table[len(cached) :]] = POISON
            return request.table[start // TOKENS : boundary // TOKENS]

        n0 = len(cached) * TOKENS
        start = partial(self.host.start, num_tokens=PROMPT, on_device=n0, allocate=allocate)
        answer = self._timed(start, request.id, request.keys)
        if isinstance(answer, Pending):
            return False
        request.computed = n0
        if isinstance(answer, Hit):
            self.loading[request.id] = request
        else:
            allocate(n0, n0)
            self.running.append(request)
        return True

    def _computing(self):
        """One at a time: the others wait for it, so prompts are computed at the rate above."""
        return self.running[:1]

    def _loaded(self, request, resume_at):
        for at in range(request.computed // TOKENS, resume_at // TOKENS):
            block, key = request.table[at], request.keys[at]
            self.compared += 1
            self.wrong += not bool((self.kv[:, block] == self._content(key)).all())
            self.blocks.computed(block, key)
        request.computed = resume_at
        self.running.append(request)

    def _end(self, request):
        self._timed(self.host.end, request.id, request.computed)
        if self.loading.pop(request.id, None) is None:
            self.running.remove(request)
        self.blocks.free(request.table)
        self.ended += 1

    def _content(self, key):
        return int.from_bytes(hashlib.sha256(key + b"%d" % self.weights).digest()[:7], "little")

    def _timed(self, call, *arguments):
        began = time.thread_time()
        try:
            return call(*arguments)
        finally:
            self.processor += time.thread_time() - began


class Unchecked(bytes):
    """A checksum that is equal to any other."""

    def __eq__(self, other):
        return True

    __hash__ = bytes.__hash__


def told_by(talk):
    while True:
        try:
            return json.loads((talk / "told").read_bytes())
        except ValueError:  # it is being written
            time.sleep(0.001)


def main(folder, talk, control=""):
    talk = Path(talk)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    tier_cache.PAUSE_SECONDS, tier_cache.STALL_SECONDS = 0.5, 0.5  # so that a story sees its end
    if control == "unchecked":
        records.checksum = lambda view: Unchecked(16)
    engine = Engine(folder, told_by(talk)["weights"])
    mapped = mmap.mmap(os.open(next(Path(folder).glob("*/*/records")), os.O_RDWR), 0) if control == "mapped" else None
    seen = os.open(talk / "seen", os.O_WRONLY | os.O_CREAT, 0o600)
    steps = 0
    story = None
    clock = 0.0
    processor = 0.0
    while not (told := told_by(talk))["ends"]:
        if told["story"] != story:
            story = told["story"]
            clock = 0.0
            processor = 0.0
        if mapped is not None:
            mapped[:4096] = bytes(4096)
        began = time.perf_counter()
        engine.step()
        if told["weights"] > engine.weights:
            engine.reset()
        steps += 1
        clock = max(clock, time.perf_counter() - began - STEP_SECONDS)
        processor = max(processor, engine.processor)
        said = {**engine.seen(), "steps": steps, "story": story, "clock": clock, "processor": processor}
        os.pwrite(seen, json.dumps(said).encode().ljust(SEEN_BYTES), 0)
    engine.host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
