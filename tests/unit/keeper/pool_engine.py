"""A small engine over the pool of a keeper, with real bytes: what each chunk holds is made of its key.

Blocks are poisoned when they are handed out, so what is on the device after a load is right, or it shows.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from hashlib import shake_128
from pathlib import Path

import torch

from cpu_prefix_cache import ChainHasher, HostCache, Miss, NodePool, Pending, Prefix, keys_and_values
from tests.support.small_engine import SmallEngine

GRID = 4
POISON = -1
SHAPE = (2, 2, GRID, 3)  # of a chunk: K and V, layers, tokens, width; int16
CHUNK_BYTES = 2 * 2 * GRID * 3 * 2
ROOT = Path(__file__).parents[3]
PATIENCE = 20.0


def keys_of(prompt):
    return ChainHasher(GRID, "sha256").keys([ord(letter) for letter in prompt for _ in range(GRID)])


def contents(key, weights=0):
    num_bytes = 2 * torch.Size(SHAPE).numel()
    made = shake_128(key + weights.to_bytes(2, "little")).digest(num_bytes)
    return torch.frombuffer(bytearray(made), dtype=torch.int16).view(SHAPE)


class KeeperProcess:
    """`cpu-prefix-cache keep`, which can be killed and started again."""

    def __init__(self, folder, slots=32, **options):
        self.path = str(folder / "kv.sock")
        self.slots, self.options = slots, {"settle-seconds": 0, "adopt-seconds": 5, **options}
        self.process = None
        self.start()

    def start(self):
        options = [f"--{name}={value}" for name, value in self.options.items()]
        command = [sys.executable, "-m", "cpu_prefix_cache.tools.cli", "keep", f"--socket={self.path}"]
        self.process = subprocess.Popen(
            [*command, f"--host-bytes={self.slots * CHUNK_BYTES}", *options],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert self.process.stdout.readline(), "the keeper did not start"

    def kill(self, sign=signal.SIGKILL):
        self.process.send_signal(sign)
        self.process.wait()
        self.process.stdout.close()

    @property
    def address(self):
        return f"unix:{self.path}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


class PoolEngine:
    """Requests are computed by writing down what their chunks hold. With other `weights` they hold something else."""

    def __init__(self, address, device_blocks=16, model="model", revision="1", weights=0, wrap_copier=None):
        self.blocks = SmallEngine(device_blocks)
        self.weights = weights
        self.kv = torch.full((2, 2, device_blocks, GRID, 3), POISON, dtype=torch.int16)
        self.host = HostCache(
            self.blocks,
            [Prefix(keys_and_values(self.kv, block_dim=2), block_tokens=GRID)],
            pool=NodePool(address, model=model, revision=revision),
            max_model_len=1_000,
            offload="eager",
            strict=True,
            wrap_copier=wrap_copier,
        )

    def serves(self, prompt):
        """The whole life of a request that runs alone. How many of its chunks were loaded; all bytes were right."""
        keys, now = keys_of(prompt), time.monotonic()
        while True:
            cached = next((at for at, key in enumerate(keys) if self.blocks.find(key) is None), len(keys))
            request = self.blocks.take(keys, cached, ())
            self.kv[:, :, request.blocks[cached:]] = POISON
            answer = self.host.start(
                prompt,
                keys,
                num_tokens=len(prompt) * GRID + 1,
                on_device=cached * GRID,
                allocate=lambda start, boundary, blocks=request.blocks: blocks[start // GRID : boundary // GRID],
            )
            if not isinstance(answer, Pending):
                break
            self.blocks.free(request)
            self.steps()
            assert time.monotonic() < now + PATIENCE, "it is Pending for ever"
        here = cached
        if not isinstance(answer, Miss):
            ended = []
            while not ended:
                self.host.begin_step()
                ended = self.host.end_step({})
            here = ended[0][1] // GRID
        for key, block in list(zip(keys, request.blocks, strict=True))[here:]:
            self.kv[:, :, block] = contents(key, self.weights)
        wrong = [prompt[at] for at, key in enumerate(keys) if not self.is_right(request.blocks[at], key)]
        assert not wrong, f"chunks {wrong} of {prompt} hold other bytes"
        self.blocks.computed(request, len(keys))
        self.host.begin_step()
        self.host.end_step({prompt: len(keys) * GRID + 1})
        self.host.end(prompt, len(keys) * GRID)
        self.blocks.free(request)
        return here - cached

    def is_right(self, block, key):
        return torch.equal(self.kv[:, :, block], contents(key, self.weights))

    def steps(self):
        self.host.begin_step()
        self.host.end_step({})

    def rests(self):
        """Step until nothing is under way."""
        until = time.monotonic() + PATIENCE
        while self.host.is_busy:
            self.steps()
            assert time.monotonic() < until, "it never comes to rest"

    def stores(self, prompt):
        """Serve a prompt, and forget it on the device."""
        self.serves(prompt)
        self.rests()
        self.forgets()

    def forgets(self):
        for block in self.blocks.free_blocks:
            self.blocks.forget(block)

    @property
    def is_whole(self):
        """Whether all its blocks are free."""
        return len(self.blocks.free_blocks) == self.blocks.num_blocks

    def close(self):
        self.host.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):
            self.close()
