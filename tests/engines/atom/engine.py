"""ATOM's engine on a CPU: its real Scheduler, BlockManager and aggregator around ranks that compute patterns.

A step is that of ATOM's EngineCore: schedule, metadata to the ranks, forward pass, completions from the ranks,
postprocess. All that crosses processes in ATOM is pickled here.

The KV of a token is a digest of the model's weights and all tokens up to it, and differs from rank to rank and layer to
layer. In each step a rank compares all that attention would read of a request with the truth. A block that was handed
out is poisoned before the forward pass, unless a load fills it.

A request computes with the weights of when it got its blocks. So what one of before a change computes after it is not
the truth of later ones, as on a GPU, where its KV is of both.
"""

import pickle
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import xxhash
from atom.config import KVCacheTensor
from atom.kv_transfer.disaggregation import KVOutputAggregator
from atom.kv_transfer.disaggregation.factory import KVConnectorFactory
from atom.kv_transfer.disaggregation.types import connector_metadata_has_work
from atom.model_engine.scheduler import ScheduledBatchOutput, Scheduler
from atom.model_engine.sequence import Sequence, SequenceStatus
from atom.sampling_params import SamplingParams

from connector.atom.plugin import register
from cpu_prefix_cache.deciding import Direction

LAYERS = 2
POISON = 0x5EEE
VOCABULARY = 997
EOS = VOCABULARY


def config_of(**said):
    """As much of ATOM's Config as its scheduler and the connector read."""
    plain = dict(
        kv_cache_block_size=4,
        num_kvcache_blocks=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=0,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        dcp_config=SimpleNamespace(interleave_size=1),
        enable_rapidserve=False,
        runner_qualname="atom.model_engine.model_runner.ModelRunner",
        tp_world_size=1,
        max_model_len=256,
        bos_token_id=1,
        eos_token_id=EOS,
        stop_token_ids=[],
        scheduler_delay_factor=0.0,
        speculative_config=None,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    return SimpleNamespace(**plain | said)


def transfer_config(host_blocks, ranks=1, block_tokens=4, **options):
    num_bytes = host_blocks * ranks * block_tokens * LAYERS * 2 * 8
    extra = {"cpu_bytes_to_use": num_bytes, **options}
    return {"kv_connector": "cpu_prefix_cache", "kv_connector_extra_config": extra}


def digest(before, token):
    """The KV of a token, by that of the token before it."""
    return xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + token.to_bytes(4, "little")) >> 2


class Truth:
    """The KV of all tokens of a sequence, as it should be."""

    def __init__(self, weights=0):
        self.weights = weights
        self.tokens, self.kv = [], []

    def upto(self, tokens, stop):
        if self.tokens != tokens[: len(self.tokens)]:
            self.tokens, self.kv = [], []
        for token in tokens[len(self.tokens) : stop]:
            self.kv.append(digest(self.kv[-1] if self.kv else self.weights, token))
            self.tokens.append(token)
        return np.array(self.kv[:stop], dtype=np.int64)


class Rank:
    """One rank: KV of some layers, which differs from rank to rank and layer to layer, and the connector's worker.

    Ranks that share a context have its tokens in turn.
    """

    def __init__(self, config, number):
        self.number, self.block_tokens = number, config.kv_cache_block_size
        self.shares = config.decode_context_parallel_size
        shape = config.num_kvcache_blocks, self.block_tokens
        self.layers = [[torch.full(shape, POISON, dtype=torch.int64) for _ in "kv"] for _ in range(LAYERS)]
        tensors = [tensor for layer in self.layers for tensor in layer]
        self.planes = [(tensor.numpy(), at + 1 + 10 * number) for at, tensor in enumerate(tensors)]
        self.connector = None
        if config.kv_transfer_config:
            self.connector = KVConnectorFactory.create_connector(config, "worker")
            self.connector.register_kv_caches(*self.registered(), num_blocks=config.num_kvcache_blocks)

    def registered(self):
        """The KV as ATOM registers it: by layer, and as regions."""
        layers = enumerate(self.layers)
        return {f"layer_{at}": KVCacheTensor(at, keys, values, None, None) for at, (keys, values) in layers}, None

    def poison(self, block):
        for plane, _ in self.planes:
            plane[block] = POISON

    def holds(self, table, truth):
        """Whether the first tokens have the KV of `truth`, as far as it is on this rank."""
        mine, blocks, places = self._find(table, 0, len(truth))
        return all(np.array_equal(plane[blocks, places], truth[mine] + mark) for plane, mark in self.planes)

    def write(self, table, start, truth):
        """The KV of the tokens from `start` on; the last ones of `truth`."""
        mine, blocks, places = self._find(table, start, len(truth))
        for plane, mark in self.planes:
            plane[blocks, places] = truth[mine] + mark

    def _find(self, table, start, stop):
        """Positions of tokens, and their blocks and places in these."""
        positions = np.arange(start, stop)
        mine = positions[positions % self.shares == self.number % self.shares]
        local = mine // self.shares
        return mine, np.array(table, dtype=np.int64)[local // self.block_tokens], local % self.block_tokens


@dataclass
class Counts:
    steps: int = 0
    wrong: int = 0  # times a sequence read KV that was not the truth
    unwritten: int = 0  # blocks that were to be stored before all of their tokens were computed
    compared: int = 0  # tokens
    finished: Counter = field(default_factory=Counter)  # by the reason


class Engine:
    """With `defers` the tokens of a step are known when the next one has been launched, as on ATOM's GPUs."""

    rank, sequence = Rank, {}  # the class of its ranks, and options of its sequences

    def __init__(self, config, defers=False):
        register()
        self.config, self.defers = config, defers
        self.weights = 0
        self.sampled = {}  # request -> token, of the last batch that gave any
        self.ranks = [self.rank(config, number) for number in range(config.tp_world_size)]
        self.scheduler = self.new_scheduler()
        self.manager = self.scheduler.block_manager
        self.connector = self.scheduler.kv_connector
        self.aggregator = KVOutputAggregator(world_size=config.tp_world_size)
        self.counts = Counts()
        self.truths = {}
        self.outputs = {}
        self.given = []  # blocks that were handed out, and are not poisoned yet
        self._note_what_is_handed_out()
        self._note_weights_of_requests()
        self.sequences = {}
        while self.connector is not None and self.connector.has_pending_work():
            self.idle()

    def new_scheduler(self):
        return Scheduler(self.config)

    def _note_what_is_handed_out(self):
        pool = self.manager.kv
        allocate = pool.allocate

        def noting(block):
            self.given.append(block)
            return allocate(block)

        pool.allocate = noting

    def _poison_given(self, loaded=()):
        given, self.given = set(self.given).difference(loaded), []
        for rank in self.ranks:
            for block in given:
                rank.poison(block)

    def _note_weights_of_requests(self):
        allocate = self.manager.allocate

        def allocate_and_note(seq, *cached):
            if self.is_of_before(seq):
                self.truths[seq.id] = Truth(self.weights)
            return allocate(seq, *cached)

        self.manager.allocate = allocate_and_note

    # Weights

    def change_weights(self):
        """Tokens have other KV from now on, and ATOM clears its cache."""
        self.weights += 1
        self.manager.clear_cache()

    def is_of_before(self, seq):
        """Whether the weights have changed since this request got its blocks."""
        return self.truths[seq.id].weights != self.weights

    # Requests

    def add(self, tokens, num_output=1, **said):
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        seq = Sequence(list(tokens), self.config.kv_cache_block_size, sampling_params=sampling, **self.sequence, **said)
        self.truths[seq.id], self.sequences[seq.id] = Truth(self.weights), seq
        self.scheduler.add(seq)
        return seq

    def abort(self, seq):
        seq.status = SequenceStatus.ABORTED

    @property
    def is_idle(self):
        return self.scheduler.is_finished() and not (self.connector and self.connector.has_pending_work())

    # Steps, as EngineCore makes them

    def step(self):
        """One turn of EngineCore.busy_loop. The sequences that ended."""
        self.counts.steps += 1
        if self.scheduler.is_finished():
            self.idle()
            return []
        result = self.scheduler.schedule()
        ended = self.scheduler.take_rejected()
        if result is None:
            self.idle()
            return self._forget(ended)
        batch, seqs = result
        if batch.connector_meta_output is not None:
            self._to_ranks(batch.connector_meta_output)
        self._poison_given()
        output = self._forward(batch, seqs) if batch.req_ids else None
        self._poll()
        if output is not None:
            ended += self.scheduler.postprocess(seqs.values(), output, batch=batch)
        return self._forget(ended)

    def idle(self):
        if self.connector is None:
            return
        meta = self.connector.build_connector_meta()
        if connector_metadata_has_work(meta):
            self._to_ranks(meta)
        self._poll()

    def run(self, steps=10_000):
        """Step until nothing is left to do."""
        for _ in range(steps):
            if self.is_idle:
                return
            self.step()
        raise RuntimeError(f"the engine is not idle after {steps} steps")

    def _to_ranks(self, meta):
        stores = [each for each in meta.plan.transfers if each.direction is Direction.STORE]
        blocks = [block for each in stores for copy in each.copies for block in copy.device_blocks]
        self.counts.unwritten += sum(
            (plane[blocks] == POISON).any(1).sum() for rank in self.ranks for plane, _ in rank.planes
        )
        for rank in self.ranks:
            rank.connector.start_load_kv(pickle.loads(pickle.dumps(meta)))
        loads = (each for each in meta.plan.transfers if each.direction is Direction.LOAD)
        self._poison_given(block for load in loads for copy in load.copies for block in copy.device_blocks)

    def _poll(self):
        if self.connector is None:
            return
        outputs = [pickle.loads(pickle.dumps(rank.connector.get_finished())) for rank in self.ranks]
        self.scheduler._update_from_kv_xfer_finished(self.aggregator.aggregate(outputs))

    def _forget(self, ended):
        for seq in ended:
            self.counts.finished[seq.leave_reason] += 1
            self.outputs[seq.id] = list(seq.completion_token_ids)
            self.truths.pop(seq.id, None)
            self.sequences.pop(seq.id, None)
        return ended

    # The model

    def _forward(self, batch, seqs):
        is_prefill = batch.total_seqs_num_prefill > 0
        sampled = {}
        for at, seq in enumerate(seqs.values()):
            start = batch.num_cached_tokens[at] if is_prefill else seq.num_tokens - 1
            stop = start + int(batch.num_scheduled_tokens[at])
            sampled[seq.id] = self._compute(seq, start, stop, is_prefill)
        if not self.defers:
            return output_of(sampled)
        if not batch.produces_output():
            return ScheduledBatchOutput(list(batch.req_ids), [], None, None, None)
        before, self.sampled = self.sampled, sampled
        return output_of(before, is_deferred_out=True)

    def _compute(self, seq, start, stop, is_prefill):
        """Read what comes before `start`, write up to `stop`, and sample by the last token's KV."""
        tokens = seq.token_ids
        if not is_prefill and seq.id in self.sampled:  # the sequence has a token that stands in for it
            tokens = [*tokens[:start], self.sampled[seq.id]]
        truth = self.truths[seq.id].upto(tokens, stop)
        for rank in self.ranks:
            self.counts.compared += start
            self.counts.wrong += not rank.holds(seq.block_table, truth[:start])
            rank.write(seq.block_table, start, truth)
        return int(truth[-1]) % VOCABULARY


def output_of(sampled, **said):
    none = np.zeros(len(sampled), dtype=np.int32)
    return ScheduledBatchOutput(list(sampled), [(token,) for token in sampled.values()], none, none, None, **said)


def serve(engine, tokens, num_output=1, **said):
    seq = engine.add(tokens, num_output, **said)
    engine.run()
    return seq
