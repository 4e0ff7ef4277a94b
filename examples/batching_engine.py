"""A small batching engine with a host cache: the example of docs/adding_an_engine.md.

    python examples/batching_engine.py

    waiting    a queue; its head is started, or nobody is
    running    computes: a part of its prompt in each step, then a token of its answer
    loading    parked, while the host cache loads a part of its prompt into its blocks
    ended      finished or aborted, from whichever state; a preempted request goes back to the head of the queue

A request is started when there are blocks for all of its tokens so far. When a running request needs a block and there
is none, the request that was started last is preempted.
"""

import random
from collections import deque
from itertools import takewhile

from cpu_prefix_cache import ChainHasher, Hit, HostCache, Miss, Pending, Prefix, QueueDevice, keys_and_values
from tiny_model import TinyModel

BLOCK_TOKENS = 16


class Blocks:
    """The engine's device blocks: in use (users > 0), or in the queue, where blocks keep their keys until they leave"""

    def __init__(self, num_blocks):
        self.queue = deque(range(num_blocks))
        self.users = [0] * num_blocks
        self.keys = [None] * num_blocks
        self.block_of = {}
        self.evicted = lambda block: None  # of the host cache, if there is one

    def cached(self, keys):
        """The blocks of the longest prefix that the device has."""
        return list(takewhile(lambda block: block is not None, map(self.block_of.get, keys)))

    def use(self, blocks):
        for block in blocks:
            if not self.users[block]:
                self.queue.remove(block)
            self.users[block] += 1

    def hand_out(self):
        block = self.queue.popleft()
        self.evicted(block)
        if self.block_of.get(self.keys[block]) == block:
            del self.block_of[self.keys[block]]
        self.keys[block], self.users[block] = None, 1
        return block

    def computed(self, block, key):
        """Its KV is written: from now on it is found."""
        self.keys[block] = key
        self.block_of.setdefault(key, block)

    def free(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.queue.append(block)


class BlocksDevice(QueueDevice):
    """Answers to the host cache about device blocks."""

    def __init__(self, blocks):
        super().__init__(num_blocks=len(blocks.users), hands_out_first=True)
        self.blocks = blocks
        blocks.evicted = self.evicted

    def block(self, key):
        return self.blocks.block_of.get(key)

    def key(self, block):
        return self.blocks.keys[block]

    def queue(self):
        return self.blocks.queue

    def users(self, block):
        return self.blocks.users[block]

    def use(self, blocks, by):
        for block in blocks:
            self.blocks.users[block] += by


class Request:
    def __init__(self, id, prompt, num_output):
        self.id = id
        self.tokens = list(prompt)
        self.end = len(prompt) + num_output
        self.num_prompt = len(prompt)
        self.keys = []  # of full chunks of its tokens; grows as it is computed
        self.table, self.computed = [], 0  # device blocks; tokens with KV
        self.logits = []  # of each token of the answer

    @property
    def answer(self):
        return self.tokens[self.num_prompt :]


class Engine:
    """Computes at most `step_tokens` tokens in a step, of at most `max_running` requests. `options`: of HostCache."""

    def __init__(self, num_blocks, *, step_tokens=64, max_running=6, **options):
        self.step_tokens, self.max_running = step_tokens, max_running
        self.blocks, self.model = Blocks(num_blocks), TinyModel(num_blocks, BLOCK_TOKENS)
        self.hasher = ChainHasher(BLOCK_TOKENS)
        self.waiting = deque()
        self.running = []
        self.loading = {}  # by id
        layout = Prefix(keys_and_values(self.model.kv, block_dim=2), block_tokens=BLOCK_TOKENS)
        self.host = HostCache(BlocksDevice(self.blocks), [layout], max_step_tokens=step_tokens, **options)

    @property
    def is_idle(self):
        return not (self.waiting or self.running or self.loading or self.host.is_busy)

    def add(self, request):
        self.waiting.append(request)

    def abort(self, request):
        if request in self.waiting:
            self.waiting.remove(request)  # the host cache does not know it
        else:
            self._end(request)

    def step(self):
        """Requests that have finished."""
        while self.waiting and len(self.running) + len(self.loading) < self.max_running and self._start():
            pass
        batch = self._schedule()
        self.host.begin_step()
        for request, tokens in batch:
            self._compute(request, tokens)
        computed = ((request.id, request.computed) for request, _ in batch)
        ended = self.host.end_step(computed) if batch else self.host.drain()
        for id, resume_at in ended:
            self._resume(self.loading.pop(id), resume_at)
        finished = [request for request, _ in batch if len(request.tokens) == request.end]
        for request in finished:
            self._end(request)
        return finished

    def _start(self):
        """Start the head of the queue. Whether the next one may be tried."""
        request = self.waiting[0]
        self.hasher.extend(request.keys, request.tokens)
        cached = self.blocks.cached(request.keys[: (len(request.tokens) - 1) // BLOCK_TOKENS])
        missing = -(-len(request.tokens) // BLOCK_TOKENS) - len(cached)
        if missing > len(self.blocks.queue) - sum(not self.blocks.users[block] for block in cached):
            return False

        def allocate(start, boundary):
            self.blocks.use(cached)
            request.table = cached + [self.blocks.hand_out() for _ in range(missing)]
            return request.table[start // BLOCK_TOKENS : boundary // BLOCK_TOKENS]

        n0 = len(cached) * BLOCK_TOKENS
        n = len(request.tokens)
        match self.host.start(request.id, request.keys, num_tokens=n, on_device=n0, allocate=allocate):
            case Pending():
                return False
            case Hit():
                self.loading[request.id] = request
            case Miss():
                allocate(n0, n0)
                self.running.append(request)
        request.computed = n0
        self.waiting.popleft()
        return True

    def _resume(self, request, resume_at):
        """Its load has ended. What it brought is in the request's blocks, and can be found from now on."""
        self._keep(request, resume_at)
        self.running.append(request)

    def _schedule(self):
        """Running requests, each with the tokens that it computes in this step and blocks for them."""
        batch, left = [], self.step_tokens
        for request in list(self.running):
            tokens = min(len(request.tokens) - request.computed, left)
            if tokens and request in self.running and self._make_room(request, request.computed + tokens):
                batch.append((request, tokens))
                left -= tokens
        return [(request, tokens) for request, tokens in batch if request in self.running]

    def _make_room(self, request, tokens):
        """Give the request blocks for so many tokens. If it had to be preempted for that, False."""
        while len(request.table) * BLOCK_TOKENS < tokens:
            if self.blocks.queue:
                request.table.append(self.blocks.hand_out())
                continue
            last = self.running[-1]
            self._end(last, preempted=True)
            self.waiting.appendleft(last)
            if last is request:
                return False
        return True

    def _compute(self, request, tokens):
        stop = request.computed + tokens
        logits = self.model.forward(request.tokens[:stop], request.computed, request.table)
        if stop == len(request.tokens):
            request.logits.append(logits)
            request.tokens.append(int(logits.argmax()))
        self._keep(request, stop)

    def _keep(self, request, computed):
        """The request has KV of so many tokens: its full blocks can be found."""
        self.hasher.extend(request.keys, request.tokens[:computed])
        for at in range(request.computed // BLOCK_TOKENS, computed // BLOCK_TOKENS):
            self.blocks.computed(request.table[at], request.keys[at])
        request.computed = computed

    def _end(self, request, preempted=False):
        """Finished, aborted or preempted, running or loading: report it to the host cache, then free its blocks."""
        self.host.end(request.id, request.computed, preempted=preempted)
        if self.loading.pop(request.id, None) is None:
            self.running.remove(request)
        self.blocks.free(request.table)
        request.table, request.computed = [], 0


def prompts(number, seed=0):
    """Questions about documents of which the device has room for two."""
    draw = random.Random(seed)
    documents = [[draw.randrange(50) for _ in range(draw.randrange(100, 300))] for _ in range(6)]
    for _ in range(number):
        yield draw.choice(documents) + [draw.randrange(50) for _ in range(draw.randrange(1, 20))]


def main():
    engine = Engine(num_blocks=40, host_bytes=4 << 20, max_model_len=1_000)
    for id, prompt in enumerate(prompts(60)):
        engine.add(Request(id, prompt, num_output=20))
    num_tokens = sum(len(request.tokens) for request in engine.waiting)
    while not engine.is_idle:
        engine.step()
    seen = engine.host.statistics().cache
    print(f"{num_tokens} tokens of prompts, {seen.hit_tokens} of them loaded from the host")
    print(f"{seen.chunks_stored} chunks stored, {seen.chunks_loaded} loaded")
    engine.host.close()


if __name__ == "__main__":
    main()
