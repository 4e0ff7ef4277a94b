"""nano-vllm with a host cache: the calls of a HostCache by its scheduler and its block manager.

`nano_vllm.patch` has the engine's side: keys of 16 bytes that are computed once, a queue of sequences that are loading,
`abort`, and the calls of `Host`.
"""

from cpu_prefix_cache import HostCache, Miss, Prefix, QueueDevice, keys_and_values


class Blocks(QueueDevice):
    def __init__(self, manager):
        super().__init__(len(manager.blocks), hands_out_first=True)
        self.manager = manager

    def block(self, key):
        return self.manager.hash_to_block_id.get(key)

    def key(self, block):
        key = self.manager.blocks[block].hash
        return None if key == -1 else key

    def queue(self):
        return self.manager.free_block_ids

    def users(self, block):
        return self.manager.blocks[block].ref_count

    def use(self, blocks, by):
        for block in blocks:
            self.manager.blocks[block].ref_count += by
            (self.manager.used_block_ids.add if self.users(block) else self.manager.used_block_ids.remove)(block)


class Host:
    """`kv_cache` is the engine's [2, layers, blocks, block tokens, heads, width]; `options` are those of HostCache."""

    def __init__(self, scheduler, kv_cache, **options):
        self.scheduler, self.manager = scheduler, scheduler.block_manager
        self.manager.host, self.device = self, Blocks(self.manager)
        layout = Prefix(keys_and_values(kv_cache, block_dim=2), block_tokens=self.manager.block_size)
        self.cache = HostCache(self.device, [layout], **options)

    def start(self, seq, cached):
        """Whether the sequence computes now. If not, it is parked."""
        size = self.manager.block_size

        def allocate(start, boundary):
            self.manager.allocate(seq, cached)
            return seq.block_table[start // size : boundary // size]

        keys = self.manager.keys(seq, seq.num_tokens // size)
        n0 = cached * size
        answer = self.cache.start(seq.seq_id, keys, num_tokens=seq.num_tokens, on_device=n0, allocate=allocate)
        return answer == Miss()

    def end(self, seq):
        if seq.block_table:  # it was started
            self.cache.end(seq.seq_id, seq.num_cached_tokens, preempted=not seq.is_finished)

    def end_step(self, seqs):
        """Sequences whose loads have ended compute from there. Those that wait for another's load look up again."""
        computed = ((seq.seq_id, seq.num_cached_tokens) for seq in seqs)
        ended = dict(self.cache.end_step(computed) if seqs else self.cache.drain())
        for seq in [seq for seq in self.scheduler.loading if seq.seq_id in ended or not seq.block_table]:
            seq.num_scheduled_tokens = ended.get(seq.seq_id, 0) - seq.num_cached_tokens
            self.manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            self.scheduler.loading.remove(seq)
            self.scheduler.waiting.appendleft(seq)
