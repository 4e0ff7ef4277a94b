"""A small engine with two groups of full attention, a window and a state over the pool of a keeper.

A chunk takes three slots, two of one group and one of another, and two blocks of the window lie in it. Of each prompt
the engine looks at every byte that it has to resume from, whether it was computed or loaded. All are made of keys, as
in `host_engine.py`, and blocks are poisoned when they are handed out.
"""

import contextlib
import time

import torch

from cpu_prefix_cache import (
    ChainHasher,
    Hit,
    HostCache,
    HostOptions,
    NodePool,
    Pending,
    Prefix,
    State,
    Window,
    keys_and_values,
)
from cpu_prefix_cache.deciding import HybridChunkPlanner, KVCacheCoordinator, PooledDevice
from cpu_prefix_cache.kv_layout import states
from cpu_prefix_cache.pool.coordinator import new_pool
from cpu_prefix_cache.pool.taken import TakenCheckpoints
from tests.support.host_engine import PATIENCE, POISON, come_to_rest, contents
from tests.support.threads import pause
from tests.unit.keeper.pool_engine import settle

GRID, WINDOW_BLOCK, WINDOW = 8, 4, 14
BLOCK_BYTES = 384  # of a slot


def keys_of(prompt):
    return ChainHasher(GRID, "sha256").keys([ord(letter) for letter in prompt for _ in range(GRID)])


def layout_of(device_blocks, window_tokens=WINDOW, has_state=True, kind=Window):
    """Tensors of each group, and how they lie."""
    latent = torch.full((device_blocks, GRID, 24), POISON, dtype=torch.int16)
    attention = torch.full((2, 2, device_blocks, GRID, 12), POISON, dtype=torch.int16)
    window = torch.full((2, 1, device_blocks, WINDOW_BLOCK, 24), POISON, dtype=torch.int16)
    state = torch.full((device_blocks, 192), POISON, dtype=torch.int16)
    groups = [
        Prefix(keys_and_values(attention, block_dim=2), block_tokens=GRID),
        Prefix(states(latent), block_tokens=GRID, name="latent"),
        kind(keys_and_values(window, block_dim=2), block_tokens=WINDOW_BLOCK, window_tokens=window_tokens),
        State(states(state), block_tokens=GRID),
    ]
    return [attention, latent, window, state][: 3 + has_state], groups[: 3 + has_state]


class Taken(TakenCheckpoints):
    """Writes down what its pieces hold."""

    def __init__(self, engine):
        super().__init__(engine.coordinator)
        self.engine = engine

    def write(self, keys, depth, node):
        places = self.engine.planner.checkpoint(depth)
        for at, blocks in zip(places, self.engine.pool.checkpoints.to_write(node), strict=True):
            for block in blocks or ():
                self.engine.view(at.group, block).copy_(self.engine.piece(keys, at))


class HybridEngine:
    """`options` are those of `layout_of`."""

    def __init__(self, address, device_blocks=80, revision="1", weights=0, wrap_copier=None, **options):
        self.weights = weights
        self.tensors, groups = layout_of(device_blocks, **options)
        self.planner = HybridChunkPlanner([each.group for each in groups], max_model_len=1_000)
        self.pool = new_pool(self.planner, device_blocks, on_device=True)
        self.coordinator = KVCacheCoordinator(self.planner, self.pool, on_device=True)
        self.taken = Taken(self)
        self.host = HostCache(
            PooledDevice(self.pool),
            groups,
            pool=NodePool(address, model="hybrid", revision=revision),
            max_model_len=1_000,
            options=HostOptions(offload="eager", strict=True, wrap_copier=wrap_copier),
        )
        self.nodes = []  # of the request that runs
        self.staged = None  # the checkpoint that its load fills
        self.pin = None

    # Bytes

    def view(self, group, block):
        tensor = self.tensors[group]
        return tensor[block] if tensor.dim() < 5 else tensor[:, :, block]

    def chunk(self, key):
        """Contents of it in each group of full attention."""
        return [contents(b"%d " % group + key, self.view(group, 0).shape, self.weights) for group in (0, 1)]

    def views(self, chunk):
        return [self.view(group, block) for group, block in enumerate(self.pool.blocks_of([chunk]))]

    def piece(self, keys, at):
        return contents(b"%d %d " % (at.group, at.block) + keys[at.chunk], self.view(at.group, 0).shape, self.weights)

    def poisons(self, blocks):
        for block in blocks:
            for group in range(len(self.tensors)):
                self.view(group, block).fill_(POISON)

    def wrong(self, keys, depth, node=None):
        """Places that hold something else, of what resuming after so many chunks takes. The checkpoint is that node."""
        chunks = self.nodes[:depth]
        node = self.coordinator.resume_node(keys, depth) if node is None else node
        pieces = self.pool.checkpoints.pieces(node) if self.planner.needs_checkpoint(depth) else []
        found = [
            ("chunk", at)
            for at, (key, chunk) in enumerate(zip(keys, chunks, strict=False))
            if not all(map(torch.equal, self.views(chunk), self.chunk(key)))
        ]
        for at, blocks in zip(self.planner.checkpoint(depth), pieces, strict=True):
            found += [at for block in blocks if not torch.equal(self.view(at.group, block), self.piece(keys, at))]
        return found

    # Requests

    def allocates(self, keys, n0, boundary):
        """Chunks for all of the prompt behind the first `n0` tokens, and room for the checkpoint at the boundary."""
        start = n0 // GRID
        deepest = self.pool.find(keys[start - 1]) if start else None
        self.pin = self.pool.pin(self.coordinator.resume_node(keys, start)) if start else None
        new = self.pool.allocate(len(keys) - start)
        self.poisons(self.pool.blocks_of(new))
        self.nodes = [*(self.pool.path(deepest, start) if start else []), *new]
        if boundary > n0 and self.taken.are_needed(boundary):
            self.staged = self.taken.make_room(keys, n0, boundary)
            shared = self.shared(keys, start)
            places = self.planner.checkpoint(boundary // GRID)
            for at, blocks in zip(places, self.pool.checkpoints.pieces(self.staged), strict=True):
                if blocks != shared.get(at):
                    self.poisons(blocks)

    def shared(self, keys, depth):
        """Blocks of the pieces of the checkpoint after so many chunks, if it takes one."""
        if not self.taken.are_needed(depth * GRID):
            return {}
        pieces = self.pool.checkpoints.pieces(self.coordinator.resume_node(keys, depth))
        return dict(zip(self.planner.checkpoint(depth), pieces, strict=True))

    def serves(self, prompt):
        """The whole life of a request that runs alone. How many chunks were loaded; all bytes were right."""
        keys, until = keys_of(prompt), time.monotonic() + PATIENCE
        num_tokens = len(keys) * GRID + 1
        n0 = self.coordinator.longest_boundary(keys, 0, num_tokens)

        def allocate(start, boundary):
            self.allocates(keys, n0, boundary)
            stop = boundary // GRID
            return self.coordinator.destinations(self.nodes[start // GRID : stop], start // GRID, stop, self.staged)

        def starts():
            return self.host.start(prompt, keys, num_tokens=num_tokens, on_device=n0, allocate=allocate)

        while isinstance(answer := starts(), Pending):
            self.steps()
            pause(until, "it is Pending for ever")
        computed = n0
        if isinstance(answer, Hit):
            while not (ended := self.steps()):
                pause(until, "its load never ends")
            computed = ended[0][1]
        else:
            self.allocates(keys, n0, n0)
        loaded, depth = (computed - n0) // GRID, computed // GRID
        if loaded:
            assert not (wrong := self.wrong(keys, depth, self.staged)), f"{wrong} of {prompt} hold other bytes"
        self.finds(keys, n0 // GRID, depth)
        ends = [boundary for boundary in self.host.boundaries(prompt) if boundary > computed]
        for end in dict.fromkeys((*ends, len(keys) * GRID)):
            self.computes(prompt, keys, computed // GRID, end // GRID, has_checkpoint=end in ends)
            computed = end
        self.host.end(prompt, computed)
        self.leaves()
        return loaded

    def computes(self, id, keys, start, stop, has_checkpoint):
        self.host.begin_step()
        for key, chunk in zip(keys[start:stop], self.nodes[start:stop], strict=True):
            for view, held in zip(self.views(chunk), self.chunk(key), strict=True):
                view.copy_(held)
        self.finds(keys, start, stop)
        if has_checkpoint:
            node = self.taken.take(keys, keys, stop * GRID)
            if node is not None:
                self.taken.commit(node, keys[stop - 1], self.nodes[stop - 1], self.pool.touch(None))
                assert not (wrong := self.wrong(keys, stop)), f"{wrong} hold other bytes"
        self.host.end_step({id: stop * GRID})

    def finds(self, keys, start, stop):
        """The device finds these chunks from now on, and the checkpoint that a load has brought."""
        chunks = self.nodes[start:stop]
        parent = self.nodes[start - 1] if start else self.pool.root
        there = self.pool.resident_run(keys, start, stop) - start  # of a prompt whose checkpoint was evicted
        if there:
            self.pool.abort(chunks[:there])
            parent = self.pool.find(keys[start + there - 1])
            self.nodes[start : start + there] = self.pool.path(parent, there)
        self.pool.commit(chunks[there:], keys[start + there : stop], parent, self.pool.touch(None))
        if chunks:
            pin = self.pool.pin(self.nodes[stop - 1])
            if self.pin is not None:
                self.pool.unpin(self.pin)
            self.pin = pin
        if self.staged is not None and stop > start:
            self.taken.commit(self.staged, keys[stop - 1], self.nodes[stop - 1], self.pool.touch(None))
            self.staged = None
        elif self.staged is not None:  # its load has failed
            self.pool.abort([self.staged])
            self.staged = None

    def leaves(self):
        if self.pin is not None:
            self.pool.unpin(self.pin)
        self.nodes, self.pin = [], None

    # Steps

    def steps(self):
        self.host.begin_step()
        return self.host.end_step({})

    def rests(self):
        come_to_rest(self)

    def forgets(self):
        """The device evicts all that waits."""
        freed = self.pool.take(self.pool.capacity)
        self.poisons(self.pool.blocks_of(freed))
        self.pool.abort(freed)

    def stores(self, prompt):
        """Serve a prompt, and forget it on the device."""
        loaded = self.serves(prompt)
        self.rests()
        self.forgets()
        settle(self.host.cache)
        return loaded

    @property
    def is_whole(self):
        """Whether nothing on the device is in use."""
        return self.pool.num_available == self.pool.capacity

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):
            self.host.close()
