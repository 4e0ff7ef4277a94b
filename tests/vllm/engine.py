"""vLLM's real scheduler around our connector, and workers that copy patterns instead of KV.

    Engine          vocabulary of the tests: submit, abort, reset, step, drain
    FakeModel       what a forward pass reads and writes, through the block tables that workers have
    FakeRank        executes StepPlans late, in pieces, sometimes wrongly, and reports

A pattern stands for the bytes of a block: which group they are of, and for each hash in it, and for what is behind the
last of them, all tokens these bytes depend on. With blocks of 4, after a step that has computed 10 tokens:

    block               0       1       2
    tokens              0...3   4...7   8, 9
    attention           0-3     0-7     0-9       what token 10 still sees of it must be right, and in the table
    state               (null)  0-7     0-9       the running state lives in the block of the last token: at a boundary
                                                  it stays behind, and goes on as a copy in the next block

A rank reads a source as soon as it gets the plan, before the step of that plan computes anything, and again just before
it reports, when nothing but our holds and pins has kept the bytes in place. Both must be the same. It writes at the one
moment or the other.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.vllm.ended_loads import EndedLoads
from connector.vllm.groups import planner_for, sharers_of
from connector.vllm.messages import WorkerReports
from connector.vllm.metrics import TransferTimes
from connector.vllm.pool_view import _place
from connector.vllm.rank_tier import Onlooker
from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import CPUPrefixCache, Direction, RankReport
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.slab.records import SIZE
from cpu_prefix_cache.slab.sizing import SMALL_FILES_BYTES
from tests.vllm.fake_tier import FakeTier

BLOCK = 4
MAX_MODEL_LEN = 256
HEADS = dict(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
ATTENTION = FullAttentionSpec(**HEADS)
NULL = 0  # vLLM's block that stands for no block
POISON = "poison"
ZERO = "zero"
TORN = "torn"
AT_ONCE, NEVER = 0, inf
STEP_SECONDS = 0.01

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
RUNNING = RequestStatus.RUNNING
PREEMPTED = RequestStatus.PREEMPTED

Device = dict[int, object]  # what is in each block of one rank


# Models, as lists of groups


def full(layers: int = 2, block: int = BLOCK) -> KVCacheGroupSpec:
    return _group("full", layers, FullAttentionSpec(**HEADS | dict(block_size=block)))


def latent(layers: int = 2, block: int = BLOCK) -> KVCacheGroupSpec:
    """MLA: the same bytes on every rank."""
    return _group("latent", layers, MLAAttentionSpec(**HEADS | dict(num_kv_heads=1, block_size=block)))


def head(layers: int = 2) -> KVCacheGroupSpec:
    """One KV head on each rank, of the two that the model has."""
    return _group("head", layers, FullAttentionSpec(**HEADS | dict(num_kv_heads=1)))


def window(tokens: int, layers: int = 2, block: int = BLOCK) -> KVCacheGroupSpec:
    """Every token sees `tokens` of them, itself included."""
    return _group("window", layers, SlidingWindowSpec(**HEADS | dict(block_size=block), sliding_window=tokens))


def replayed(tokens: int, layers: int = 1, block: int = BLOCK) -> KVCacheGroupSpec:
    """A window that vLLM does not cache, but computes again after each hit. There are none before 0.31."""
    heads = HEADS | dict(num_kv_heads=1, block_size=block)
    return _group("replayed", layers, SlidingWindowMLASpec(**heads, sliding_window=tokens, bounded_replay=True))


def local(tokens: int, layers: int = 2, block: int = BLOCK) -> KVCacheGroupSpec:
    """Every token sees those of its own local chunk of `tokens`."""
    heads = HEADS | dict(block_size=block)
    return _group("local", layers, ChunkedLocalAttentionSpec(**heads, attention_chunk_size=tokens))


def state(layers: int = 2, block: int = BLOCK, mode: str = "align") -> KVCacheGroupSpec:
    """Mamba. A page weighs five times what a block of attention does, and takes several host blocks."""
    shapes, dtypes = ((3, 64), (16, 68)), (torch.float32, torch.float32)
    spec = MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, mamba_cache_mode=mode)
    return _group("state", layers, spec)


def _group(name: str, layers: int, spec: object) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"{name}.{at}" for at in range(layers)], spec)


def one_group(num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer.0", "layer.1"], ATTENTION)])


def vllm_config(
    folder: Path,
    *,
    step_tokens: int = 48,
    max_requests: int = 8,
    connector: str = "CPUPrefixCacheConnector",
    module: str = "connector.vllm",
    max_model_len: int = MAX_MODEL_LEN,
    **extra: object,
) -> VllmConfig:
    """The configuration of a two-layer Llama that nobody loads."""
    model = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=64)
    model |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000)
    model |= dict(max_position_embeddings=max_model_len)
    (folder / "config.json").write_text(json.dumps(model))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=step_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )


def drafting(method: str, drafts: int = 3, **fields: object) -> SpeculativeConfig:
    """So many drafts a step, of a drafter that nobody loads."""
    config = object.__new__(SpeculativeConfig)
    vars(config).update(method=method, num_speculative_tokens=drafts, **fields)
    return config


# A forward pass over the blocks of one group. Blocks are counted from token 0, and named with the token that
# what they hold goes up to


class AttentionGroup:
    """Full, window or chunked-local attention."""

    def __init__(self, at: int, spec: object, block: int) -> None:
        self.at = at
        self.block = block
        self._spec = spec

    def pattern(self, prefixes: Sequence[object]) -> tuple[object, ...]:
        """`prefixes` end where hashes do, and where the block is filled to."""
        return self.at, *prefixes

    def holds(self, content: object, pattern: Sequence[object]) -> bool:
        """Whether a block holds this. It may hold more, of whoever it was copied from."""
        return isinstance(content, tuple) and content[: len(pattern)] == pattern

    def begins(self, start: int, hit: int) -> int:
        """The token from which on a step writes that goes on at token `start` after a hit of `hit` tokens."""
        return max(start, hit)

    def reads(self, start: int, since: int = 0) -> Iterator[tuple[int, int]]:
        """The blocks that token `start` sees of the tokens before it. Windows that are replayed begin with `since`."""
        first = self._first_seen(start)
        if first < start:
            yield from self._blocks(first, start)

    def writes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The blocks that a step writes which computes tokens [start, stop)."""
        return self._blocks(start, stop)

    def _first_seen(self, start: int) -> int:
        if isinstance(self._spec, SlidingWindowSpec):
            return max(0, start - self._spec.sliding_window + 1)
        if isinstance(self._spec, ChunkedLocalAttentionSpec):
            return start - start % self._spec.attention_chunk_size
        return 0

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for at in range(start // self.block, -(-stop // self.block)):
            yield at, min((at + 1) * self.block, stop)


class ReplayedGroup(AttentionGroup):
    """A window that is computed again after a hit."""

    @property
    def tokens(self) -> int:
        return self._spec.sliding_window

    def begins(self, start: int, hit: int) -> int:
        return start

    def reads(self, start: int, since: int = 0) -> Iterator[tuple[int, int]]:
        first = max(since, self._first_seen(start))
        if first < start:
            yield from self._blocks(first, start)


class RingGroup(AttentionGroup):
    """Scratch in one block, of which nothing is cached."""

    def reads(self, start: int, since: int = 0) -> Iterator[tuple[int, int]]:
        return iter(())

    def writes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield 0, stop


class StateGroup:
    """Recurrent state in align mode: `preprocess_mamba` and the kernels of vLLM's worker."""

    def __init__(self, at: int, block: int) -> None:
        self.at = at
        self.block = block
        self._running: dict[str, int] = {}  # request -> the block that has its running state

    def pattern(self, prefixes: Sequence[object]) -> tuple[object, ...]:
        return self.at, "state", prefixes[-1]

    def holds(self, content: object, pattern: Sequence[object]) -> bool:
        return content == pattern

    def begins(self, start: int, hit: int) -> int:
        return start

    def reads(self, start: int, since: int = 0) -> Iterator[tuple[int, int]]:
        if start:
            yield (start - 1) // self.block, start

    def writes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield (stop - 1) // self.block, stop

    def move(self, id: str, start: int, stop: int, table: Sequence[int], devices: Sequence[Device]) -> None:
        """Copy the running state to the block in which the step ends."""
        source, target = self._running.get(id, (start - 1) // self.block), (stop - 1) // self.block
        assert source == (start - 1) // self.block, f"{id}: the state that goes on is not that of token {start}"
        self._running[id] = target
        assert table[target] != NULL, f"{id} has no block for its running state"
        if start and source != target:
            for device in devices:
                device[table[target]] = device.get(table[source])

    def forget(self, id: str) -> None:
        self._running.pop(id, None)


def _group_of(at: int, spec: object, block: int) -> AttentionGroup | StateGroup:
    if isinstance(spec, MambaSpec):
        return StateGroup(at, block)
    if isinstance(spec, CircularBufferSpec):
        return RingGroup(at, spec, block)
    return AttentionGroup(at, spec, block) if spec.prefix_cacheable else ReplayedGroup(at, spec, block)


class FakeModel:
    """Tokens and block tables as the workers know them, and the forward pass.

    A pattern is made of prefixes, each of which stands for all tokens before some token.
    """

    def __init__(self, specs: Sequence[object], blocks: Sequence[int], hash_tokens: int) -> None:
        """`blocks` are the tokens that a block of each group covers."""
        self.groups = [_group_of(at, spec, block) for at, (spec, block) in enumerate(zip(specs, blocks, strict=True))]
        self._replayed = max((group.tokens for group in self.groups if isinstance(group, ReplayedGroup)), default=0)
        self.cached = [group for group, spec in zip(self.groups, specs, strict=True) if spec.prefix_cacheable]
        self._states = [group for group in self.groups if isinstance(group, StateGroup)]
        self._attention = [group for group in self.groups if isinstance(group, AttentionGroup)]
        self._unit = hash_tokens
        self.tokens: dict[str, list[int]] = {}
        self._requests: dict[str, Request] = {}
        self._chain: dict[str, list[int]] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._named: dict[bytes, tuple[object, bytes | None]] = {}  # hash -> the prefix that ends with it, and the last

    def begin(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.tokens[request.request_id] = list(request.prompt_token_ids)
        self._chain[request.request_id] = [0]

    def end(self, id: str) -> None:
        del self.tokens[id], self._chain[id], self._requests[id]

    def prefix(self, id: str, end: int) -> object:
        tokens = self.tokens[id]
        chain = self._chain[id]
        unit = self._unit
        while len(chain) * unit <= end:
            at = len(chain) * unit
            chain.append(hash((chain[-1], *tokens[at - unit : at])))
        whole, part = divmod(end, unit)
        return chain[whole] if not part else (chain[whole], *tokens[end - part : end])

    def pattern(self, id: str, group: AttentionGroup | StateGroup, end: int) -> tuple[object, ...]:
        """Pattern that a request has in the block of a group that is filled up to token `end`."""
        start = (end - 1) // group.block * group.block
        ends = [*range(start + self._unit, end, self._unit), end]
        return group.pattern([self.prefix(id, each) for each in ends])

    def hasher(self, hash_blocks: Callable[[Request], list[bytes]]) -> Callable[[Request], list[bytes]]:
        """vLLM's hasher of blocks, listened to."""

        def hashes(request: Request) -> list[bytes]:
            known, new = request.block_hashes, hash_blocks(request)
            last = known[-1] if known else None
            for at, key in enumerate(new, start=len(known)):
                before = 0 if last is None else self._named[last][0]
                tokens = request.all_token_ids[at * self._unit : (at + 1) * self._unit]
                self._named[key] = hash((before, *tokens)), last
                last = key
            return new

        return hashes

    def promised(self, name: bytes) -> object:
        """Pattern of a full block that vLLM hashed by this name."""
        group = self.groups[get_group_id(name)]
        prefixes: list[object] = []
        last: bytes | None = get_block_hash(name)
        while last is not None and len(prefixes) < group.block // self._unit:
            prefix, last = self._named[last]
            prefixes.append(prefix)
        return group.pattern(prefixes[::-1])

    def forward(
        self, output: object, devices: Sequence[Device], held: Callable[[str], Sequence[Sequence[int]]]
    ) -> dict[str, list[int]]:
        """A step on every rank, after a look at all that it reads, which the request must still have as its own.

        What is sampled for each request.
        """
        steps = self._begin_step(output)
        for id, start, _ in steps:
            self._check_held(id, start, held(id))
        self._move_states(steps, devices)
        for id, start, stop in steps:
            for group in self._attention:
                self.check(id, group, self._begins(id, group, start), self._tables[id], devices)
            self._write(id, start, stop, devices)
        return {id: self._sample(id, stop) for id, _, stop in steps}

    def check(
        self,
        id: str,
        group: AttentionGroup | StateGroup,
        start: int,
        tables: Sequence[Sequence[int]],
        devices: Sequence[Device],
        what: str = "reads wrong KV",
    ) -> None:
        """A request can go on at token `start`, as far as one group is concerned."""
        table = tables[group.at]
        for at, end in group.reads(start, self._since(id)):
            assert table[at] != NULL, f"{id} needs block {at} of group {group.at} for token {start}, and it is null"
            right = self.pattern(id, group, end)
            for device in devices:
                whole = group.holds(device.get(table[at]), right)
                assert whole, f"{id} {what} before token {end} in group {group.at}"

    def _since(self, id: str) -> int:
        """The token from which on a request has computed windows again that vLLM does not cache."""
        return self._requests[id].replay_start if self._replayed else 0

    def _begins(self, id: str, group: AttentionGroup | StateGroup, start: int) -> int:
        """Where a step begins to write. What vLLM replays, other groups have already."""
        since = self._since(id)
        return group.begins(start, since + self._replayed if since else 0)

    def _begin_step(self, output: object) -> list[tuple[str, int, int]]:
        """Update the tables as a worker does. Which tokens of which request are computed."""
        cached = output.scheduled_cached_reqs
        for id in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            for group in self._states:
                group.forget(id)
        for id in output.finished_req_ids:
            self._tables.pop(id, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        for id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if id in cached.resumed_req_ids:
                self._tables[id] = [[] for _ in self.groups]
            if new_blocks is not None:
                for table, blocks in zip(self._tables[id], new_blocks, strict=True):
                    table.extend(blocks)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [(id, starts[id], starts[id] + count) for id, count in output.num_scheduled_tokens.items()]

    def _check_held(self, id: str, start: int, held: Sequence[Sequence[int]]) -> None:
        for group in self.groups:
            for at, _ in group.reads(self._begins(id, group, start), self._since(id)):
                here, there = self._tables[id][group.at][at], held[group.at][at]
                assert here == there, f"{id} reads block {here} of group {group.at}, and has {there}"

    def _move_states(self, steps: Sequence[tuple[str, int, int]], devices: Sequence[Device]) -> None:
        """States of all requests are read before any is written."""
        for group in self._states:
            for id, start, _ in steps:
                self.check(id, group, start, self._tables[id], devices)
            for id, start, stop in steps:
                group.move(id, start, stop, self._tables[id][group.at], devices)
            for id, start, stop in steps:
                moved = self._tables[id][group.at][(stop - 1) // group.block]
                kept = not start or all(device[moved] == self.pattern(id, group, start) for device in devices)
                assert kept, f"{id} lost its state"

    def _write(self, id: str, start: int, stop: int, devices: Sequence[Device]) -> None:
        for group in self.groups:
            table = self._tables[id][group.at]
            for at, end in group.writes(self._begins(id, group, start), stop):
                assert table[at] != NULL, f"{id} has no block {at} in group {group.at} to write to"
                pattern = self.pattern(id, group, end)
                for device in devices:
                    device[table[at]] = pattern

    def _sample(self, id: str, stop: int) -> list[int]:
        """The next token: a function of the ones before, so that a request computed again gives the same again."""
        known = len(self.tokens[id])
        assert stop <= known, "a token was scheduled that nobody knows yet"
        if stop < known:
            return []
        token = hash((self.prefix(id, known), 1)) % 997
        self.tokens[id].append(token)
        return [token]


class Part(NamedTuple):
    """Content of one host block: its number among the host blocks of a piece, and the patterns of all the piece."""

    number: int
    patterns: tuple[object, ...]


class Copy:
    """A transfer that a rank has begun: what its sources were, and which blocks it reads and writes, early or late."""

    def __init__(
        self, plan: object, epoch: int, sources: Sequence[object], is_early: bool, fails: bool, steps_left: int
    ) -> None:
        self.plan = plan
        self.epoch = epoch
        self.sources = sources
        self.is_early = is_early
        self.fails = fails
        self.steps_left = steps_left
        self.steps = 0
        self.cancelled = False
        self.is_store = plan.direction is Direction.STORE
        on_host = {("host", block) for copy in plan.copies for block in copy.host_blocks}
        on_device = {("device", block) for copy in plan.copies for block in copy.device_blocks}
        self.reads, self.writes = (on_device, on_host) if self.is_store else (on_host, on_device)


@dataclass
class FakeRank:
    """`sharers` ranks have one host region together. Of a piece with lanes adjacent ones have the same: a host block
    then has what is in each lane. Those that have the same deal out stores by the first host block of a piece.
    """

    rank: int
    random: random.Random
    failure_rate: float
    slowest: int
    host_blocks: int
    pieces: Sequence[object]  # the planner's
    host: dict[int, object]
    sharers: int = 1
    pace: float | None = None  # so many steps after their own copies end, or NEVER; None: when their time has come
    lost_reports: float = 0.1
    tier: FakeTier | Onlooker | None = None
    ready: int = 0
    computes: bool = False  # the step under way
    timed: int | None = None
    device: Device = field(default_factory=dict)
    before: Device = field(default_factory=dict)  # before the compute of the last step
    held: dict[int, tuple[object, int]] = field(default_factory=dict)  # plans that follow others, and their epochs
    lent: dict[int, tuple[object, list[object]]] = field(default_factory=dict)  # loads in exchange, and their sources
    given_up: set[int] = field(default_factory=set)  # stores of what loads overwrite that have failed
    copies: dict[int, Copy] = field(default_factory=dict)
    waits_for: dict[int, str] = field(default_factory=dict)  # load -> request
    times: TransferTimes = field(default_factory=TransferTimes)
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    polls: int = 0

    def __post_init__(self) -> None:
        self.ended = EndedLoads(lambda: self.polls * STEP_SECONDS)

    def prepare(self, output: object) -> None:
        """Do what a worker does with blocks before it looks at a step's plan."""
        for block in output.new_block_ids_to_zero or ():
            self.device[block] = ZERO
        for copy in output.kv_cache_block_copies or ():
            self.device[copy.dst_block_id] = self.device.get(copy.src_block_id)

    def begin(self, metadata: object) -> None:
        """Take a step's plan, before the step computes."""
        plan = metadata.plan
        self._check_early(plan)
        self.computes, self.timed = metadata.computes, metadata.timed
        self.waits_for |= metadata.requests
        for transfer in plan.transfers:
            self.held[transfer.id] = transfer, plan.epoch
        for id in plan.cancelled:
            if id in self.copies:
                self.copies[id].cancelled = True
            elif id in self.held:
                self.given_up.update(self.held.pop(id)[0].after)
                self.failed.add(id)
                self.lent.pop(id, None)
        self._begin_held()
        for id in metadata.computed_on:
            self._load_now(id)
        self.done = {id for id in self.done if id >= plan.resolved_below}
        self.failed = {id for id in self.failed if id >= plan.resolved_below}
        if self.tier is not None:
            self.tier.run(metadata.tier)
            if isinstance(self.tier, FakeTier):
                self._check_tier_apart(self.tier)

    def _check_early(self, plan: object) -> None:
        """Check that what an early store reads was there before the compute of the step before."""
        stores = (each for each in plan.transfers if each.is_early and each.direction is Direction.STORE)
        for copy in (copy for store in stores for copy in store.copies):
            for block in copy.device_blocks:
                assert self.before.get(block) == self.device.get(block), f"block {block} was not there so early"
        self.before = dict(self.device)

    def _begin_held(self) -> None:
        """Begin what follows no store that goes on."""
        begun = []
        for id, (transfer, epoch) in list(self.held.items()):
            is_store = transfer.direction is Direction.STORE
            if not is_store and any(each in self.copies or each in self.held for each in transfer.after):
                continue
            for load in transfer.after if is_store else ():  # an exchange: the store writes what the load has read
                assert transfer.id in self.held[load][0].after
                self.lent.setdefault(load, (self.held[load][0], self._read(self.held[load][0])))
            copy = self._new_copy(transfer, epoch)
            self._check_apart(copy)
            if not copy.is_store:
                self.device |= {block: POISON for _, block in copy.writes}
            self.copies[id] = copy
            begun.append(copy)
            del self.held[id]
        for copy in begun:
            if copy.is_early:
                self._write(copy)

    def _load_now(self, id: int) -> None:
        """Carry out a load that compute of this step reads, and before it what it follows. It does not fail: an engine
        would stop."""
        while id in self.held:
            followed = [each for each in self.held[id][0].after if each in self.copies]
            assert followed, f"load {id}, which is computed on, follows what does not begin"
            for store in followed:
                self._end(store)
            self._begin_held()
        copy = self.copies[id]
        assert not (copy.plan.failed or copy.cancelled)
        if copy.fails:
            copy.fails = False
            self._write(copy)
        self._end(id)

    def _end(self, id: int) -> bool:
        """End a copy. Whether it went well."""
        copy = self.copies.pop(id)
        may_change = self.lent.pop(id, None) is not None or copy.plan.holds_compute  # its sources were read before
        may_change |= id in self.given_up  # it registers nothing
        assert may_change or self._read(copy.plan) == copy.sources, (
            "a source has changed while it was copied"
        )  # S7.1, S7.2
        ok = not (copy.fails or copy.cancelled)
        if not ok and not copy.is_store:
            self.given_up.update(copy.plan.after)
        if not copy.is_early:
            self._write(copy)
        (self.done if ok else self.failed).add(id)
        if ok:
            self.times.observe(copy.plan, copy.steps * STEP_SECONDS)
        return ok

    def _check_tier_apart(self, tier: FakeTier) -> None:
        for copy in self.copies.values():
            blocks = {("host", block) for block in tier.written_by_loads}
            assert blocks.isdisjoint(copy.reads | copy.writes), "used while the tier writes it"
            assert copy.writes.isdisjoint(("host", block) for block in tier.read_by_stores), "written while it is saved"

    def poll(self) -> KVConnectorOutput:
        """Let time pass: finish what is due. A report may be lost, as the next one repeats it; a request id may not."""
        self.polls += 1
        for id, copy in list(self.copies.items()):
            copy.steps_left -= 1
            copy.steps += 1
            if copy.steps_left >= 0 if self.pace is None else copy.steps <= self.pace:
                continue
            ok = self._end(id)
            if id in self.waits_for:
                self.ended.add(self.waits_for.pop(id), failed=not ok)
        self._begin_held()
        for request in (self.waits_for.pop(id) for id in self.waits_for.keys() - self.copies.keys() - self.held.keys()):
            self.ended.add(request, failed=True)  # no plan had its load
        received, failed = self.ended.take(more=self.computes and bool(self.waits_for))
        self.ready = min(self.host_blocks, self.ready + 16)
        report = RankReport(self.rank, frozenset(self.done), frozenset(self.failed), self.ready)
        prepared = (self.rank,) if self.ready == self.host_blocks else ()
        below = () if self.tier is None else (self.tier.report(),)
        # vLLM delivers both or neither: without its request ids a report may still come late.
        lost = not received and self.computes and self.random.random() < self.lost_reports
        return KVConnectorOutput(
            finished_recving=received or None,
            failed_recving=failed,
            kv_connector_stats=self.times.take(),
            kv_connector_worker_meta=None if lost else WorkerReports((report,), self.timed, below, prepared),
        )

    def _new_copy(self, transfer: object, epoch: int) -> Copy:
        is_early = bool(transfer.copies) and self.random.random() < 0.5
        fails = transfer.failed or self.random.random() < self.failure_rate
        sources = self.lent[transfer.id][1] if transfer.id in self.lent else self._read(transfer)
        copy = Copy(transfer, epoch, sources, is_early, fails, self.random.randrange(self.slowest))
        assert copy.is_store or transfer.copies or transfer.failed
        return copy

    def _check_apart(self, new: Copy) -> None:
        """No block is written that another transfer uses, none is read that another writes."""
        for copy in self.copies.values():
            assert copy.writes.isdisjoint(new.reads | new.writes), "used while it is written"
            is_lent = copy.plan.id in self.lent and copy.plan.id in new.plan.after
            # Compute of the step before has waited for the one, and nothing comes of the other.
            was_read = (copy.plan.holds_compute and copy.steps) or copy.plan.id in self.given_up
            assert is_lent or was_read or new.writes.isdisjoint(copy.reads), "written while it is read"  # S7.5
        for load, _ in self.lent.values():
            read = {("host", block) for each in load.copies for block in each.host_blocks}
            assert load.id in new.plan.after or new.writes.isdisjoint(read), "written before a load has read it"

    def _in_pieces(self, transfer: object) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """The lanes of each piece, its host blocks and its device blocks."""
        for copy in transfer.copies:
            here, there = self.pieces[copy.group].host_blocks, self.pieces[copy.group].device_blocks
            assert len(copy.host_blocks) * there == len(copy.device_blocks) * here
            for at in range(len(copy.host_blocks) // here):
                host, device = slice(at * here, (at + 1) * here), slice(at * there, (at + 1) * there)
                yield self.pieces[copy.group].lanes, copy.host_blocks[host], copy.device_blocks[device]

    def _read(self, transfer: object) -> list[object]:
        """The content of each piece: patterns from the device, parts and their epochs from the host."""
        if transfer.direction is Direction.STORE:
            return [tuple(self.device.get(block) for block in device) for _, _, device in self._in_pieces(transfer)]
        return [[self._in_lane(block, lanes) for block in host] for lanes, host, _ in self._in_pieces(transfer)]

    def _in_lane(self, block: int, lanes: int) -> object:
        """The content of a block that this rank reads, whatever was written there."""
        row = self.host[block]
        return row.get(self._lane(lanes), TORN) if lanes > 1 and isinstance(row, dict) else row

    def _lane(self, lanes: int) -> int:
        return self.rank % self.sharers * lanes // self.sharers

    def _write(self, copy: Copy) -> None:
        if copy.fails:
            return
        for (lanes, host, device), content in zip(self._in_pieces(copy.plan), copy.sources, strict=True):
            if copy.is_store:
                written = {block: (Part(at, content), copy.epoch) for at, block in enumerate(host)}
                holders = self.sharers // lanes
                if host[0] % holders != self.rank % holders:
                    continue
                if lanes > 1:
                    written = {block: self._row(block) | {self._lane(lanes): part} for block, part in written.items()}
                self.host |= written
                continue
            # S7.40
            assert copy.cancelled or all(epoch == copy.epoch for _, epoch in content), "loaded from before a reset"
            self.device |= zip(device, self._whole(content, len(device)), strict=True)

    def _row(self, block: int) -> dict[int, object]:
        """The content of the lanes of a block, if it has any."""
        row = self.host.get(block)
        return row if isinstance(row, dict) else {}

    def _whole(self, parts: Sequence[tuple[object, int]], width: int) -> Sequence[object]:
        """The patterns of a piece, if its host blocks are those of one piece, in order."""
        patterns = getattr(parts[0][0], "patterns", ())
        if len(patterns) == width and all(part == Part(at, patterns) for at, (part, _) in enumerate(parts)):
            return patterns
        return [TORN] * width


class Stood(NamedTuple):
    """Places of a hold."""

    held: object  # as long as it lives, its id is its own
    before: dict[object, object]  # of each block that waited: what waited before it, if anything
    near: set[object]  # these, and what others held at that time
    num_holds: int  # up to this one


class Engine:
    """An engine whose scheduler, block pool and connector are real. `counts` is what has happened in it.

    `groups` is the model: by default one group of full attention; or `caches` has groups, and how many bytes a page of
    each layer takes. `retention` is vLLM's: how many tokens lie
    between the boundaries at which it keeps windows and states on the device; 0 is its default, the last boundary of
    each prompt; None is every boundary. So is `match_unit`: the tokens of a hash, where that is to be shorter than the
    blocks are. `context_parallel` of the ranks divide the tokens of full attention and MLA among them: a pattern then
    stands for what each of them has of a block. `tier` has the operator's options of a tier of `tier_slots` slots,
    `tier_faults` its faults. With an option `pool` the slots are in `region`, which engines share. A `drafter` proposes
    no drafts here: what counts is what vLLM drops for it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups: Sequence[KVCacheGroupSpec] | None = None,
        caches: KVCacheConfig | None = None,
        retention: int | None = 0,
        match_unit: int | None = None,
        device_blocks: int = 48,
        host_blocks: int = 160,
        offload: str = "lazy",
        ranks: int = 1,
        tensor_parallel: bool = False,
        context_parallel: int = 1,
        seed: int = 0,
        failure_rate: float = 0.0,
        slowest: int = 6,
        asynchronous: bool = False,
        priorities: bool = False,
        drafter: SpeculativeConfig | None = None,
        tier: dict[str, object] | None = None,
        tier_slots: int = 2000,
        tier_faults: dict[str, object] | None = None,
        region: dict[int, object] | None = None,
        **options: object,
    ) -> None:
        init_none_hash(sha256)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        if caches is None:
            caches = one_group(device_blocks)
        if groups is not None:
            caches = KVCacheConfig(device_blocks, [], list(groups), retention)
        # What only empties the device is not to end the host, too; and here all loads are short.
        options = {"reset": "with_connector", "sync_load_bytes": 0} | options
        config = vllm_config(folder, offload=offload, **options)
        config.scheduler_config.async_scheduling = asynchronous  # on CPUs vLLM turns it off itself
        config.scheduler_config.policy = "priority" if priorities else "fcfs"
        config.speculative_config = drafter
        config.parallel_config.world_size = ranks
        config.parallel_config.tensor_parallel_size = ranks if tensor_parallel else 1
        config.parallel_config.distributed_executor_backend = "mp" if ranks > 1 else "uni"
        config.parallel_config.decode_context_parallel_size = context_parallel
        config.cache_config.num_gpu_blocks = device_blocks
        config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in caches.kv_cache_groups)
        config.cache_config.prefix_match_unit = match_unit
        if caches.has_mamba_layers:
            config.cache_config.mamba_cache_mode = "align"
        in_pool = "pool" in options
        planner = planner_for(config, caches, in_pages=tier is not None, in_pool=in_pool)
        self.grid, self.hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        sharers = sharers_of(planner, config.parallel_config, in_pool=in_pool)
        extra = config.kv_transfer_config.kv_connector_extra_config
        if not in_pool:
            extra["cpu_bytes_to_use"] = host_blocks * planner.host_block_bytes * ranks // sharers
        if tier is not None:
            path, slabs = folder / "tier", ranks // sharers
            path.mkdir()
            size = slabs * (tier_slots * (planner.host_block_bytes + SIZE) + SMALL_FILES_BYTES)
            extra["tier"] = {"kind": "file", "path": str(path), "bytes": size, "revision": "random"} | tier
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        manager = StructuredOutputManager(config)
        sizes = {"block_size": self.grid, "hash_block_size": self.hash_tokens}
        self.scheduler = scheduler_class(config, caches, manager, **sizes)
        self.half = self.scheduler.connector.scheduler
        self.half.clock = lambda: self.now
        self.cache, self.device = self.half.cache, self.half.device
        self.pool = self.scheduler.kv_cache_manager.block_pool
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        blocks = [manager.block_size for manager in managers]
        self.model = FakeModel([group.kv_cache_spec for group in caches.kv_cache_groups], blocks, self.hash_tokens)
        hosts: list[dict[int, object]] = [{} if region is None else region for _ in range(ranks // sharers)]
        usual = failure_rate, slowest, host_blocks, planner.pieces
        self.ranks = [
            FakeRank(rank, random.Random((seed, rank).__hash__()), *usual, hosts[rank // sharers], sharers)
            for rank in range(ranks)
        ]
        self.below = None if tier is None else self.half.tier.below
        for rank in self.ranks if tier is not None else ():
            rank.tier = Onlooker(rank.rank)
            if rank.rank % sharers == 0:
                rank.tier = FakeTier(rank.rank, random.Random(seed + rank.rank), rank.host, **tier_faults or {})
        self.requests: dict[str, Request] = {}
        self.finished: list[list[int]] = []  # the tokens of requests that ended by themselves
        self.admitted: list[tuple[int, int]] = []  # tokens that were on the device, and tokens after the load
        self.now = 0.0
        self._in_flight: list[tuple[object, ModelRunnerOutput]] = []
        self._used: set[int] = set()  # blocks, by the last step
        self._lag = 1 if asynchronous else 0
        self._aggregator = KVOutputAggregator(ranks)
        self._hasher = self.model.hasher(get_request_block_hasher(self.hash_tokens, sha256))
        self._loads: dict[int, tuple[str, Sequence[object]]] = {}
        self._on_device: dict[str, int] = {}
        self._stood: dict[int, Stood] = {}  # by hold
        self._came_back: set[object] = set()  # places where a hold has ended
        self._put_before: dict[object, int] = {}  # of those put before their parents: how many holds there had been
        self._left: dict[object, int] = {}  # by place: how many holds there had been when a request took its block
        self._num_holds = 0
        self._holds = False
        self._watch()

    # Called by a test

    def submit(
        self,
        tokens: list[int],
        max_tokens: int = 4,
        priority: int = 0,
        params: dict[str, object] | None = None,
        **hints: object,
    ) -> str:
        """With `priorities` those of a smaller number come first. `params`: its kv_transfer_params."""
        id = f"r{self.counts['submitted']}"
        self.counts["submitted"] += 1
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(id, list(tokens), sampling, None, block_hasher=self._hasher, priority=priority, **hints)
        self.requests[id] = request
        self.model.begin(request)
        self.scheduler.add_request(request)
        return id

    def abort(self, id: str) -> None:
        status = self.requests[id].status
        self.counts[f"aborts while {status.name}"] += 1
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        """Reset both caches, as after a change of weights; vLLM's own may refuse while blocks are in use."""
        moving = [copy.plan for rank in self.ranks for copy in rank.copies.values()]
        moving += [plan for rank in self.ranks for plan, _ in rank.held.values()]  # behind stores
        self.counts["resets"] += 1
        self.counts["resets during a load"] += any(plan.direction is Direction.LOAD for plan in moving)
        self.counts["resets during a store"] += any(plan.direction is Direction.STORE for plan in moving)
        self.scheduler.reset_prefix_cache(reset_connector=True)
        if isinstance(self.cache, CPUPrefixCache):
            assert self.cache.pool.statistics().cached == 0, "something can be found after a reset"

    def restart_running(self) -> bool:
        """vLLM's reset that preempts what runs, which the next step resumes. It raises while requests load, and from
        0.31 on while some wait with what they have.
        """
        if self.cache.statistics().loading or getattr(self.scheduler, "kv_holding_waiting", ()):
            return False
        while self._in_flight:
            self._land()
        self.counts["resets that preempt during a store"] += self.cache.statistics().storing > 0
        self.counts["resets that preempt"] += bool(self.scheduler.running)
        return self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> None:
        self.now += STEP_SECONDS
        self._launch()
        while len(self._in_flight) > self._lag:
            self._land()
        for id in [id for id in self.requests if id not in self.scheduler.requests]:
            request = self.requests.pop(id)
            if request.status is not RequestStatus.FINISHED_ABORTED:
                self.finished.append(list(request.all_token_ids))
            self.model.end(id)

    def drain(self, steps: int = 2000) -> None:
        while self.scheduler.has_requests() or self._in_flight:
            steps -= 1
            assert steps, "the engine does not come to rest"
            self.step()
            if self._lag and not self.scheduler.has_requests():
                self._land()

    def run(self, tokens: list[int], max_tokens: int = 4) -> list[int]:
        """One request, from submission to rest. All its tokens."""
        self.submit(tokens, max_tokens)
        self.drain()
        return self.finished[-1]

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """The hashes of a prompt."""
        sampling = SamplingParams(max_tokens=1)
        return Request("nobody", list(tokens), sampling, None, block_hasher=self._hasher).block_hashes

    def keys(self, tokens: list[int]) -> list[bytes]:
        """The keys of the chunks of a prompt."""
        each = self.grid // self.hash_tokens
        return self.hashes(tokens)[each - 1 :: each]

    def on_device(self, tokens: list[int]) -> list[list[int]]:
        """Which blocks of a prompt the device has, group by group."""
        hashes, found = self.hashes(tokens), []
        for group in self.model.cached:
            each = group.block // self.hash_tokens
            names = hashes[each - 1 :: each]
            found.append([at for at, name in enumerate(names) if self.pool.get_cached_block(name, [group.at])])
        return found

    def check_nothing_leaked(self) -> None:
        if self.below is not None:
            self._let_the_tier_rest()
        pool, statistics = self.pool, self.cache.statistics()
        assert not self.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # S7.4
        assert len(pool.free_block_queue.get_all_free_blocks()) == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert (statistics.running, statistics.storing, statistics.loading) == (0, 0, 0)
        assert not len(self.half._requests) and not self.half._requests.any_awaited
        assert not (self.half._step.loads or self.half._step.readmitted or self.half._ends._computing)
        assert not any(rank.copies or rank.waits_for for rank in self.ranks)
        if isinstance(self.cache, CPUPrefixCache):
            assert (statistics.pool.pinned, statistics.pool.writing, statistics.pool.retired) == (0, 0, 0)
            self.cache.check_valid()

    def _let_the_tier_rest(self) -> None:
        """Leases of requests that have gone end by themselves."""
        self.now += 120
        self.step()
        self.drain()
        below = self.below.edge.statistics()
        assert (below.storing, below.loading) == (0, 0)
        assert (below.pool.pinned, below.pool.writing, below.pool.retired) == (0, 0, 0)
        assert not (self.cache._wants or self.cache._promotions.slices)
        assert not any(rank.tier.moves for rank in self.ranks if isinstance(rank.tier, FakeTier))

    # One step

    def _launch(self) -> None:
        self._names = [block.block_hash for block in self.pool.blocks]  # before any is handed out
        output = self.scheduler.schedule()
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        self.counts["blocks copied"] += len(output.kv_cache_block_copies or ())
        metadata = output.kv_connector_metadata
        self._check_early(metadata.plan)
        self._used = self._blocks_used(output)
        self._note_plan(metadata)
        for rank in self.ranks:
            rank.prepare(output)
            rank.begin(metadata)
        devices = [rank.device for rank in self.ranks]
        sampled = self.model.forward(output, devices, self.scheduler.kv_cache_manager.get_block_ids)
        ids = list(output.num_scheduled_tokens)
        outputs = []
        for rank in self.ranks:
            result = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, [sampled[id] for id in ids])
            result.kv_connector_output = rank.poll()
            outputs.append(result)
        self.random.shuffle(outputs)  # ranks report in any order
        self._in_flight.append((output, self._aggregator.aggregate(outputs, 0)))

    def _check_early(self, plan: object) -> None:
        """Check that no early transfer touches a block which a step under way uses."""
        for transfer in plan.transfers if self._in_flight else ():
            if transfer.is_early:
                blocks = {block for copy in transfer.copies for block in copy.device_blocks}
                assert blocks.isdisjoint(self._used), "copied too early"
                self.counts[f"{transfer.direction.value}s beside a step"] += 1

    def _blocks_used(self, output: object) -> set[int]:
        tables = map(self.scheduler.kv_cache_manager.get_block_ids, output.num_scheduled_tokens)
        return {block for table in tables for group in table for block in group} - {self.pool.null_block.block_id}

    def _note_plan(self, metadata: object) -> None:
        saved = {id for transfer in metadata.plan.transfers for id in transfer.after}
        for transfer in metadata.plan.transfers:
            self.counts[f"{transfer.direction.value}s planned"] += 1
            if transfer.direction is Direction.LOAD:
                self.counts["loads whose source was gone"] += transfer.failed
                if transfer.id in metadata.computed_on:
                    self.counts["loads computed on"] += 1
                else:
                    self._loads[transfer.id] = metadata.requests[transfer.id], transfer.copies
            else:
                self._check_sources(transfer, transfer.id in saved or transfer.holds_compute)
                self.counts["stores of what compute overwrites"] += transfer.holds_compute
                self.counts["stores of what a load overwrites"] += transfer.id in saved
                self.counts["stores in exchange with a load"] += bool(transfer.after)
        self.counts["loads cancelled"] += len(metadata.plan.cancelled)
        for transfer in metadata.tier.step.transfers if metadata.tier is not None else ():
            self.counts["reads planned" if transfer.direction is Direction.LOAD else "writes planned"] += 1

    def _check_sources(self, store: object, is_overwritten: bool) -> None:
        """Check that stored bytes are there before the step computes anything, and are those of the block's hash;
        before it was handed out, if this step overwrites it.
        """
        for block in (block for copy in store.copies for block in copy.device_blocks):
            name = (is_overwritten and self._names[block]) or self.pool.blocks[block].block_hash
            if name is None:
                self.counts["stored although the device was reset"] += 1
                name = self._names_at_reset[block]
            right = self.model.promised(name)
            for rank in self.ranks:
                assert rank.device.get(block) == right, f"block {block} is stored before it holds its bytes"  # S7.9

    def _land(self) -> None:
        output, result = self._in_flight.pop(0)
        loading = {id for id, request in self.requests.items() if request.status is LOADING}
        received = result.kv_connector_output.finished_recving or set()
        failed = result.kv_connector_output.failed_recving
        assert loading >= {id for id in received if not self.requests[id].is_finished()}
        self.counts["loads done"] += len(received - failed)
        self.counts["loads failed"] += len(failed)
        for transfer, (id, copies) in list(self._loads.items()):
            if id in received:
                del self._loads[transfer]
                if id not in failed:
                    self._check_load(id, copies)
        self.scheduler.update_from_output(output, result)

    def _check_load(self, id: str, copies: Sequence[object]) -> None:
        """Every group can go on behind a load, and what the device had before was left alone (rule 8)."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(id)
        boundary, n0 = self.requests[id].num_computed_tokens, self._on_device[id]
        assert copies, "a load without destinations went well"
        loaded = {self.half._group_ids[copy.group]: sorted(copy.device_blocks) for copy in copies}
        devices = [rank.device for rank in self.ranks]
        for group in self.model.cached:
            table = tables[group.at]
            wanted = sorted(table[at] for at, _ in group.reads(boundary) if at * group.block >= n0)
            assert loaded.get(group.at, []) == wanted, f"{id} was loaded into wrong blocks of group {group.at}"
            self.model.check(id, group, boundary, tables, devices, "was loaded with wrong bytes")

    # Watching the connector

    def _watch(self) -> None:
        """Compare every lookup with the oracle, which knows no pool of others, and see what becomes of holds."""
        for cache_method in ("lookup", "admit") if isinstance(self.cache, CPUPrefixCache) else ("admit",):
            self._wrap(self.cache, cache_method)
        self._names_at_reset: dict[int, bytes | None] = {}  # of blocks that had one
        self._wrap(self.pool, "reset_prefix_cache")
        for device_method in ("find_all", "find_checkpoint", "soonest_evicted", "evicted_after", "hold", "release"):
            self._wrap(self.device, device_method)
        for pool_method in ("touch", "get_new_blocks"):
            self._wrap(self.pool, pool_method)

    def _watch_reset_prefix_cache(self, reset: Callable[[], bool]) -> bool:
        """Blocks lose their names in a reset, and nothing else changes of those that are held."""
        names = {block.block_id: block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        counts = [block.ref_cnt for block in self.pool.blocks]
        free = self.pool.get_num_free_blocks()
        was_reset = reset()
        assert [block.ref_cnt for block in self.pool.blocks] == counts and self.pool.get_num_free_blocks() == free
        self._names_at_reset |= names if was_reset else {}
        return was_reset

    def _wrap(self, what: object, method: str) -> None:
        setattr(what, method, partial(getattr(self, f"_watch_{method}"), getattr(what, method)))

    def _watch_lookup(self, lookup: Callable, request: object, n0: int, now: float) -> object:
        answer = lookup(request, n0, now)
        best = longest_boundary(self.cache, request, n0)
        at = n0 // self.cache.planner.grid_tokens
        is_awaited = at < len(request.keys) and request.keys[at] in self.cache.edge.ledger.loading
        behind = best // self.cache.planner.grid_tokens
        is_awaited |= behind < len(request.keys) and request.keys[behind] in self.cache.edge.ledger.writing
        expected = {Hit: best > n0, Miss: best == n0, Pending: best > n0 or is_awaited or self.below is not None}
        assert expected[type(answer)], f"{answer}, but the oracle says {best} after {n0}"
        assert not isinstance(answer, Hit) or answer.boundary == best
        assert not isinstance(answer, Pending) or answer.deadline > now
        self.counts[type(answer).__name__.lower()] += 1
        return answer

    def _watch_admit(self, admit: Callable, request: object, n0: int, boundary: int, now: float) -> None:
        self._on_device[request.id] = n0
        self.admitted.append((n0, boundary))
        admit(request, n0, boundary, now)

    def _watch_find_all(self, find_all: Callable, keys: Sequence[bytes]) -> object:
        answers = find_all(keys)
        prefix_groups = self.device._prefix_suffixes
        find = self.pool.cached_block_hash_to_block.get_one_block
        for key, found in zip(keys, answers, strict=True):
            if found is None and prefix_groups and all(find(key + suffix) for suffix in prefix_groups):
                self.counts["blocks hidden until computed"] += 1
        return answers

    def _watch_find_checkpoint(self, find_checkpoint: Callable, checkpoint: object) -> object:
        found = find_checkpoint(checkpoint)
        self.counts["checkpoints found"] += found is not None
        return found

    def _watch_soonest_evicted(self, walk: Callable) -> Iterator[tuple[int, bytes | None]]:
        for block, key in walk():
            assert self.device.is_waiting(block, key)
            self.counts["blocks walked"] += 1
            yield block, key

    def _watch_evicted_after(self, walk: Callable, block: int) -> Iterator[tuple[int, bytes | None]]:
        """It goes on where it was, in the order from the front: also with a second key of the same block."""
        order = list(type(self.device).soonest_evicted(self.device))
        at = next(at for at, place in enumerate(order, start=1) if place[0] == block)
        behind = list(walk(block))
        assert [place for place in behind if place not in order[:at]] == order[at:]
        for place in behind:
            self.counts["blocks walked"] += 1
            yield place

    def _watch_hold(self, hold: Callable, blocks: Sequence[int], parent: Sequence[int] = ()) -> object:
        assert NULL not in blocks and len(set(blocks)) == len(blocks)
        order, self._holds = self._waiting(), True
        held = hold(blocks, parent)
        self._holds = False
        self._num_holds += 1
        before = {place: each for place, each in zip(order, [None, *order], strict=False) if place.block in blocks}
        near = before.keys() | {place for stood in self._stood.values() for place in stood.before}
        self._stood[id(held)] = Stood(held, before, near, self._num_holds)
        self.counts["blocks held"] += len(blocks)
        return held

    def _watch_touch(self, touch: Callable, blocks: Sequence[object]) -> None:
        if not self._holds:
            self._leave(map(_place, blocks))
        touch(blocks)

    def _watch_get_new_blocks(self, get: Callable, count: int) -> list[object]:
        self._leave(self._waiting()[:count])
        return get(count)

    def _leave(self, places: Iterable[object]) -> None:
        left = list(places)
        self._left.update(dict.fromkeys(left, self._num_holds))
        self._came_back.difference_update(left)

    def _watch_release(self, release: Callable, held: object) -> None:
        """Check that what waited is behind its neighbour again, or at the front; the rest at the end, or before its
        parent.
        """
        stood = self._stood.pop(id(held))
        before = self._waiting()
        release(held)
        after = self._waiting()
        new = {each.block for each in after}.difference(each.block for each in before)
        assert [each for each in after if each.block not in new] == before, "others have moved"
        blocks = [*held.in_use, *(block for run in held.runs for block in run.blocks)]
        back = [_place(block) for block in blocks if block.block_id in new and block.block_hash]
        last = [place for place in back if place not in stood.before]
        self._check_at_the_end(last, after, held.parent)
        self._leave(last)
        self._put_before.update(dict.fromkeys(last, self._num_holds))
        self._came_back.update(place for place in back if place in stood.before)
        for place in back:
            if place in stood.before:
                self._check_in_place(place, stood, after)
        self.counts["used again before they could be released"] += len(blocks) - len(new)

    def _check_at_the_end(self, last: Sequence[object], after: Sequence[object], parent: Sequence[object]) -> None:
        if not last:
            return
        first = after.index(last[0])
        assert after[first : first + len(last)] == last, "the deepest is not the first to be evicted"
        behind = after[first + len(last) :]
        if any(place in after for place in parent):
            assert behind[0] in parent, "a chunk outlives its parent"
            self.counts["blocks released before their parents"] += len(last)
        else:
            assert not behind, "what was in use is not the last"

    def _check_in_place(self, place: object, stood: "Stood", after: Sequence[object]) -> None:
        """Between a block and its neighbour are only those that were held, or came back before their parents since,
        unless a request took one near it, or took what waited before them all and has freed it to the end since.
        """
        neighbour = anchor = stood.before[place]
        while anchor in stood.before:
            anchor = stood.before[anchor]
        if any(self._left.get(each, 0) >= stood.num_holds for each in (anchor, *stood.near)):
            self.counts["came back where a request took another"] += 1
            return
        if neighbour is not None and neighbour not in after:
            self.counts["came back before their neighbour"] += 1
            return
        first, here = 0 if neighbour is None else after.index(neighbour) + 1, after.index(place)
        between = after[first:here]
        assert first <= here, "before what it waited behind"
        known = [each for each in between if each.name and self._put_before.get(each, 0) < stood.num_holds]
        assert self._came_back.issuperset(known), "not where it waited"
        self.counts["released in place"] += 1

    def _waiting(self) -> list[object]:
        """The places of the device blocks that wait to be handed out, soonest first."""
        return [_place(block) for block in self.pool.free_block_queue.get_all_free_blocks()]


def longest_boundary(cache: object, request: object, n0: int) -> int:
    """The oracle, the slow way: one chunk after another, as long as it is there and a token is left to compute.

    Where a drafter reads ahead, what it reads must be there behind the boundary, and may hold the last token.
    """
    grid, ahead = cache.planner.grid_tokens, max(group.lookahead_tokens for group in cache.planner.groups)
    best, depth = n0, n0 // grid
    while (
        depth < len(request.keys)
        and (depth + 1) * grid - ahead <= request.num_tokens - 1
        and (depth + 1) * grid <= request.num_tokens
        and cache.pool.find(request.keys[depth]) is not None
    ):
        depth += 1
        before = (depth * grid - ahead) // grid
        needed = cache.planner.needs_checkpoint(depth)
        if before * grid > n0 and (not needed or cache.pool.find(checkpoint_key(request.keys[depth - 1])) is not None):
            best = before * grid
    return best
