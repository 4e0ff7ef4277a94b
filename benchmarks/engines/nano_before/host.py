"""nano-vllm on the parts as they were before HostCache, for `nano_step.py --before`.

What an author wrote then: twelve members of a Device, region, copier, worker and cache by hand, and which load belongs
to which request. It goes with the same patch of the engine as `examples/nano_vllm/host.py`, so keys are hashed once.
"""

import time
from types import SimpleNamespace

from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import CPUPrefixCache, Direction, Hit, HybridChunkPlanner, Pending, PrefixGroup, Request
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.parts import Role, blocks_first, canonical


class Blocks:
    null_block = None

    def __init__(self, manager):
        self.manager = manager
        self.num_chunks = len(manager.blocks)

    def find(self, key):
        block = self.manager.hash_to_block_id.get(key)
        return None if block is None else (block,)

    def find_all(self, keys):
        return [self.find(key) for key in keys]

    def find_checkpoint(self, checkpoint):
        return None

    def key(self, block):
        key = self.manager.blocks[block].hash
        return key if self.manager.hash_to_block_id.get(key) == block else None

    def soonest_evicted(self, after):
        is_behind = after is None
        for block in self.manager.free_block_ids:
            if is_behind:
                yield block, self.key(block)
            is_behind |= block == after

    def is_waiting(self, block, key):
        return not self.manager.blocks[block].ref_count and self.key(block) == key

    def are_waiting(self, blocks):
        return [not self.manager.blocks[block].ref_count for block in blocks]

    def has_waiting(self, blocks):
        return len(self.manager.free_block_ids) >= blocks

    def hold(self, blocks):
        for block in blocks:
            if not self.manager.blocks[block].ref_count:
                self.manager.free_block_ids.remove(block)
                self.manager.used_block_ids.add(block)
            self.manager.blocks[block].ref_count += 1
        return blocks

    def freed(self, hold):
        for block in hold:
            self.manager.blocks[block].ref_count -= 1
        free = [block for block in reversed(hold) if not self.manager.blocks[block].ref_count]
        self.manager.used_block_ids.difference_update(free)
        return free

    def release(self, hold, before):
        free, queue = self.freed(hold), self.manager.free_block_ids
        if before is None:
            queue.extend(free)
            return
        at = queue.index(before)
        for block in reversed(free):
            queue.insert(at, block)

    def release_in_place(self, hold, behind):
        free, queue = self.freed(hold), self.manager.free_block_ids
        at = 0 if behind is None else queue.index(behind) + 1
        for block in reversed(free):
            queue.insert(at, block)


class Host:
    def __init__(self, scheduler, kv_cache, *, host_bytes, max_model_len, max_step_tokens, options):
        self.scheduler, self.manager = scheduler, scheduler.block_manager
        self.manager.host = self
        parts = [
            blocks_first(layer, role, tensor)
            for role, layers in zip((Role.KEY, Role.VALUE), kv_cache, strict=True)
            for layer, tensor in enumerate(layers)
        ]
        tensors = [canonical(parts)]
        block_bytes = sum(rows.shape[1] for rows in tensors[0])
        size = self.manager.block_size
        group = PrefixGroup(name="attention", block_tokens=size, block_bytes=block_bytes)
        planner = HybridChunkPlanner([group], max_model_len=max_model_len)
        arena = HostArena(host_bytes // planner.host_block_bytes, planner.host_block_bytes)
        copier = options.wrap_copier(choose_copier(planner, tensors, arena.blocks, pinned=arena).copier, tensors)
        self.worker = CopyWorker(0, copier, arena)
        self.host_cache = CPUPrefixCache(
            planner,
            Blocks(self.manager),
            host_blocks=host_bytes // planner.host_block_bytes,
            offload=options.offload,
            max_step_tokens=max_step_tokens,
        )
        self.loads, self.sequences = {}, {}
        self.cache = SimpleNamespace(begin_step=self.begin_step, statistics=self.host_cache.statistics)

    def start(self, seq, cached):
        size = self.manager.block_size
        now = time.monotonic()
        id = str(seq.seq_id)
        request = Request(id, self.manager.keys(seq, seq.num_tokens // size), seq.num_tokens)
        answer = self.host_cache.lookup(request, cached * size, now)
        if isinstance(answer, Pending):
            return False
        boundary = answer.boundary if isinstance(answer, Hit) else None
        self.sequences[id] = seq
        self.host_cache.admit(request, cached * size, boundary, now)
        if boundary is None:
            return True
        self.manager.allocate(seq, cached)
        destinations = seq.block_table[cached : boundary // size]
        self.loads[self.host_cache.load(id, boundary, [destinations], now)] = seq, boundary
        return False

    def begin_step(self):
        self.worker.run(self.host_cache.step())
        self.host_cache.catch_up()

    def end(self, seq):
        if seq.block_table:
            del self.sequences[str(seq.seq_id)]
            end = self.host_cache.finished if seq.is_finished else self.host_cache.preempted
            end(str(seq.seq_id), seq.num_cached_tokens)

    def end_step(self, seqs):
        if not seqs:
            self.worker.drain()
        for id in self.host_cache.due():
            self.host_cache.computed(id, self.sequences[id].num_cached_tokens)
        ended = []
        for resolved in self.host_cache.report(self.worker.report()):
            if resolved.direction is Direction.LOAD:
                seq, boundary = self.loads.pop(resolved.id)
                if resolved.ok:
                    seq.num_scheduled_tokens = boundary - seq.num_cached_tokens
                    self.manager.hash_blocks(seq)
                    seq.num_cached_tokens = boundary
                ended.append(seq)
        for seq in [seq for seq in self.scheduler.loading if seq in ended or not seq.block_table]:
            self.scheduler.loading.remove(seq)
            self.scheduler.waiting.appendleft(seq)
