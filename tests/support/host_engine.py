"""An engine around a HostCache on the CPU, with real bytes: what each chunk holds is made of its key.

A prompt is letters, one to a chunk. Requests are computed by writing down what their chunks hold; with other `weights`
they hold something else. Blocks are poisoned when they are handed out, so what a load leaves is right, or it shows.
"""

import time
from hashlib import shake_128

import torch

from cpu_prefix_cache import ChainHasher, Hit, HostCache, Pending, Prefix, keys_and_values
from tests.support.host_options import with_options
from tests.support.poison import poison
from tests.support.small_engine import SmallEngine
from tests.support.threads import pause

GRID = 4
POISON = -1
SHAPE = (2, 2, GRID, 3)  # of a chunk: K and V, layers, tokens, width; int16
CHUNK_BYTES = 2 * 2 * GRID * 3 * 2
PATIENCE = 20.0


def keys_of(prompt):
    return ChainHasher(GRID, "sha256").keys([ord(letter) for letter in prompt for _ in range(GRID)])


def contents(key, shape=SHAPE, weights=0):
    made = shake_128(key + weights.to_bytes(2, "little")).digest(2 * torch.Size(shape).numel())
    return torch.frombuffer(bytearray(made), dtype=torch.int16).view(shape)


def come_to_rest(engine):
    """Step until its host cache is not busy."""
    until = time.monotonic() + PATIENCE
    while engine.host.is_busy:
        engine.steps()
        pause(until, "it never comes to rest")


def allocating(blocks):
    """The blocks that a load fills, as a function: here the request's own blocks."""
    return lambda start, boundary: blocks[start // GRID : boundary // GRID]


class HostEngine:
    """`options` are those of the HostCache, whose device is a SmallEngine. `kv` is [2, layers, blocks, GRID, width]."""

    def __init__(self, device_blocks=8, weights=0, kv=None, codec="none", **options):
        self.blocks = SmallEngine(device_blocks)
        self.weights = weights
        self.kv = torch.full((2, 2, device_blocks, GRID, 3), POISON, dtype=torch.int16) if kv is None else kv
        self.host = HostCache(
            self.blocks,
            [Prefix(keys_and_values(self.kv, block_dim=2), block_tokens=GRID, codec=codec)],
            max_model_len=1_000,
            **with_options(**{"offload": "eager", "strict": True, **options}),
        )
        poison(self.blocks, "hand_out", self.host, self.kv, POISON)
        self.keys = {}
        self.tables = {}
        self.computed = {}
        self.requests = {}

    def contents(self, key):
        return contents(key, weights=self.weights)

    def starts(self, id, prompt, n0=None, table=None):
        """With the chunks the device has, and new ones for the rest. `table` makes of the blocks what is
        given in their place, or a function that gives it."""
        keys = keys_of(prompt)
        cached = next((at for at, key in enumerate(keys) if self.blocks.find(key) is None), len(keys))
        request = self.blocks.take(keys, cached, ())
        blocks = request.blocks
        n0 = cached * GRID if n0 is None else n0
        given = allocating(blocks) if table is None else table(blocks)
        allocate = given if callable(given) else lambda start, boundary: given
        answer = self.host.start(id, keys, num_tokens=len(prompt) * GRID + 1, on_device=n0, allocate=allocate)
        if isinstance(answer, Pending):
            self.blocks.free(request)
        else:
            self.keys[id] = keys
            self.tables[id] = blocks
            self.computed[id] = n0
            self.requests[id] = request
        return answer

    def steps(self, *ids):
        """A step that computes the whole prompts of these requests. What loads brought is on the device after it."""
        self.host.begin_step()
        for id in ids:
            for key, block in list(zip(self.keys[id], self.tables[id], strict=True))[self.computed[id] // GRID :]:
                self.kv[:, :, block] = self.contents(key)
            self.has(id, len(self.keys[id]) * GRID)
        return self.resumes(self.host.end_step({id: self.computed[id] for id in ids}))

    def resumes(self, ended):
        for id, tokens in ended:
            if id in self.requests:
                self.has(id, tokens)
        return ended

    def has(self, id, tokens):
        self.blocks.computed(self.requests[id], tokens // GRID)
        self.computed[id] = tokens

    def ends(self, id, preempted=False):
        self.host.end(id, self.computed.pop(id), preempted=preempted)
        self.blocks.free(self.requests.pop(id))
        del self.keys[id], self.tables[id]

    def serves(self, prompt):
        """The whole life of a request that runs alone. How many chunks were loaded; all bytes were right."""
        until = time.monotonic() + PATIENCE
        while isinstance(answer := self.starts(prompt, prompt), Pending):
            self.steps()
            pause(until, "it is Pending for ever")
        before = self.computed[prompt]
        while isinstance(answer, Hit) and not self.steps():
            pause(until, "its load never ends")
        loaded = (self.computed[prompt] - before) // GRID
        self.steps(prompt)
        wrong = [letter for letter, is_right in zip(prompt, self.right(prompt), strict=True) if not is_right]
        assert not wrong, f"chunks {wrong} of {prompt} hold other bytes"
        self.ends(prompt)
        return loaded

    def rests(self):
        come_to_rest(self)

    def forgets(self):
        """The device evicts all that waits."""
        for block in self.blocks.free_blocks:
            self.blocks.forget(block)
            self.kv[:, :, block] = POISON

    def right(self, id):
        """Whether its block holds it, of each chunk of the request."""
        return list(map(self.is_right, self.tables[id], self.keys[id]))

    def is_right(self, block, key):
        """All bits are those of its key."""
        return torch.equal(self.kv[:, :, block].view(torch.int16), self.contents(key).view(torch.int16))

    def is_at_rest(self):
        self.host.cache.check_valid()
        now = self.host.statistics().cache
        assert now.running == now.storing == now.loading == now.pool.pinned == 0
        return self.is_whole and not self.host.is_busy

    @property
    def is_whole(self):
        """Whether all its blocks are free."""
        return len(self.blocks.free_blocks) == self.blocks.num_blocks
