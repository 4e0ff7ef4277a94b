"""The smallest engine with a queue of free blocks and reference counts: a trial for `check_device`."""

from collections import deque
from typing import NamedTuple

from cpu_prefix_cache.offload.queue_device import QueueDevice


class SmallRequest(NamedTuple):
    keys: list
    blocks: list
    computed: list  # of one number of chunks


class SmallEngine(QueueDevice):
    """Also its own device. Its index knows the latest block of a key."""

    chunk_blocks = 1

    def __init__(self, num_blocks, hands_out_first=True):
        super().__init__(num_blocks, hands_out_first=hands_out_first)
        self.device = self
        self.free_blocks = deque(range(num_blocks))
        self.counts = [0] * num_blocks
        self.keys = [None] * num_blocks
        self.by_key = {}

    # five members of a QueueDevice

    def block(self, key):
        return self.by_key.get(key)

    def key(self, block):
        return self.keys[block]

    def queue(self):
        return self.free_blocks

    def users(self, block):
        return self.counts[block]

    def use(self, blocks, by):
        for block in blocks:
            self.counts[block] += by

    # the engine's own part

    def take(self, keys, cached, tokens):
        found = [self.by_key[key] for key in keys[:cached]]
        if sum(block not in found for block in self.free_blocks) < len(keys) - cached:
            return None
        for block in found:
            if not self.counts[block]:
                self.free_blocks.remove(block)
            self.counts[block] += 1
        return SmallRequest(keys, found + [self.hand_out() for _ in keys[cached:]], [cached])

    def blocks(self, request):
        return [[block] for block in request.blocks]

    def hand_out(self):
        block = self.free_blocks.popleft()
        if self._hands_out_first:
            self.evicted(block)
        self.forget(block)
        self.counts[block] = 1
        return block

    def forget(self, block):
        if self.by_key.get(self.keys[block]) == block:
            del self.by_key[self.keys[block]]
        self.keys[block] = None

    def computed(self, request, chunks):
        for at in range(request.computed[0], chunks):
            self.keys[request.blocks[at]] = request.keys[at]
            self.by_key[request.keys[at]] = request.blocks[at]
        request.computed[0] = chunks

    def free(self, request):
        for block in reversed(request.blocks):
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free_blocks.append(block)
