"""vLLM's real scheduler around our connector, and workers that copy patterns instead of KV.

    Engine          vocabulary of the tests: submit, abort, reset, step, drain
    FakeModel       what a forward pass writes: the bytes of a block are a function of all tokens before its end
    FakeRank        executes StepPlans late, in pieces, sometimes wrongly, and reports

A rank copies at the worst moment it may: it reads a source either as soon as it gets the plan, before the step of that
plan computes anything, or just before it reports, when nothing but our holds and pins has kept the bytes in place.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.vllm.messages import WorkerReports
from cpu_prefix_cache import Direction, Hit, Miss, Pending, RankReport

BLOCK = 4
MAX_MODEL_LEN = 256
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
POISON = "poison"

LOADING, RUNNING = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


def vllm_config(
    folder: Path,
    *,
    step_tokens: int = 48,
    max_requests: int = 8,
    asynchronous: bool = False,
    connector: str = "CPUPrefixCacheConnector",
    module: str = "connector.vllm",
    **extra: object,
) -> VllmConfig:
    """The configuration of a two-layer Llama that nobody loads."""
    model = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=64)
    model |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000)
    model |= dict(max_position_embeddings=MAX_MODEL_LEN)
    (folder / "config.json").write_text(json.dumps(model))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=step_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
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


def one_group(num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer.0", "layer.1"], ATTENTION)])


class FakeModel:
    """Tokens as the workers know them, and the pattern that a token's KV stands for: everything up to that token."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._chain: dict[str, list[int]] = {}

    def begin(self, request: Request) -> None:
        self.tokens[request.request_id] = list(request.prompt_token_ids)
        self._chain[request.request_id] = [0]

    def end(self, id: str) -> None:
        del self.tokens[id], self._chain[id]

    def bytes(self, id: str, end: int) -> object:
        """What the block that holds token `end - 1` contains when nothing behind that token is computed."""
        tokens, chain = self.tokens[id], self._chain[id]
        while len(chain) * BLOCK <= end:
            at = len(chain) * BLOCK
            chain.append(hash((chain[-1], *tokens[at - BLOCK : at])))
        full, part = divmod(end, BLOCK)
        return chain[full] if not part else (chain[full], *tokens[end - part : end])

    def sample(self, id: str) -> int:
        """The next token: a function of the ones before, so that a request computed again says the same again."""
        token = hash((self.bytes(id, len(self.tokens[id])), 1)) % 997
        self.tokens[id].append(token)
        return token


@dataclass
class Copy:
    """A transfer that a rank has begun."""

    plan: object
    epoch: int
    steps_left: int
    fails: bool
    read: list[object] | None  # the sources, if they were read at once
    cancelled: bool = False


@dataclass
class FakeRank:
    rank: int
    random: random.Random
    failure_rate: float
    slowest: int
    ready: int
    host_blocks: int
    device: dict[int, object] = field(default_factory=dict)
    host: dict[int, object] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)
    waits_for: dict[int, str] = field(default_factory=dict)  # load -> request
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def begin(self, metadata: object) -> None:
        """Take a step's plan, before the step computes."""
        plan = metadata.plan
        self.waits_for |= metadata.requests
        for transfer in plan.transfers:
            (copy,) = transfer.copies or (None,)
            assert copy is not None or transfer.failed
            read = None
            if copy is not None and self.random.random() < 0.5:
                read = self._read(transfer)
            if copy is not None and transfer.direction is Direction.LOAD:
                self.device |= dict.fromkeys(copy.device_blocks, POISON)
            fails = transfer.failed or self.random.random() < self.failure_rate
            delay = self.random.randrange(self.slowest)
            self.copies[transfer.id] = Copy(transfer, plan.epoch, delay, fails, read)
        for id in plan.cancelled:
            if id in self.copies:
                self.copies[id].cancelled = True
        self.done = {id for id in self.done if id >= plan.settled_below}
        self.failed = {id for id in self.failed if id >= plan.settled_below}

    def poll(self) -> KVConnectorOutput:
        """Let time pass: finish what is due. A report may be lost, as the next one repeats it; a request id may not."""
        received, failed = set(), set()
        for id, copy in list(self.copies.items()):
            copy.steps_left -= 1
            if copy.steps_left >= 0:
                continue
            del self.copies[id]
            ok = not (copy.fails or copy.cancelled)
            if not copy.fails:
                self._write(copy)
            (self.done if ok else self.failed).add(id)
            if id in self.waits_for:
                request = self.waits_for.pop(id)
                received.add(request)
                if not ok:
                    failed.add(request)
        self.ready = min(self.host_blocks, self.ready + 16)
        report = RankReport(self.rank, frozenset(self.done), frozenset(self.failed), self.ready)
        # vLLM delivers both or neither: without its request ids a report may still come late.
        lost = not received and self.random.random() < 0.1
        return KVConnectorOutput(
            finished_recving=received or None,
            failed_recving=failed,
            kv_connector_worker_meta=None if lost else WorkerReports((report,)),
        )

    def _read(self, transfer: object) -> list[object]:
        (copy,) = transfer.copies
        if transfer.direction is Direction.STORE:
            return [self.device.get(block) for block in copy.device_blocks]
        return [self.host[block] for block in copy.host_blocks]

    def _write(self, copy: Copy) -> None:
        (blocks,) = copy.plan.copies
        content = self._read(copy.plan) if copy.read is None else copy.read
        if copy.plan.direction is Direction.STORE:
            self.host |= {block: (each, copy.epoch) for block, each in zip(blocks.host_blocks, content, strict=True)}
            return
        for block, (each, epoch) in zip(blocks.device_blocks, content, strict=True):
            assert copy.cancelled or epoch == copy.epoch, "bytes from before a reset were loaded after it"  # S7.40
            self.device[block] = each


class Engine:
    """An engine whose scheduler, block pool and connector are real. `counts` is what has happened in it."""

    def __init__(
        self,
        folder: Path,
        *,
        device_blocks: int = 48,
        host_blocks: int = 160,
        offload: str = "lazy",
        ranks: int = 1,
        seed: int = 0,
        failure_rate: float = 0.0,
        slowest: int = 6,
        asynchronous: bool = False,
        **options: object,
    ) -> None:
        init_none_hash(sha256)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.model = FakeModel()
        block_bytes = ATTENTION.page_size_bytes * 2
        config = vllm_config(
            folder,
            asynchronous=asynchronous,
            cpu_bytes_to_use=host_blocks * block_bytes * ranks,
            offload=offload,
            **options,
        )
        config.parallel_config.world_size = ranks
        config.cache_config.num_gpu_blocks = device_blocks
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = scheduler_class(
            config, one_group(device_blocks), StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK
        )
        self.half = self.scheduler.connector.scheduler
        self.half.clock = lambda: self.now
        self.cache, self.device = self.half.cache, self.half.device
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.ranks = [
            FakeRank(rank, random.Random((seed, rank).__hash__()), failure_rate, slowest, 0, host_blocks)
            for rank in range(ranks)
        ]
        self.requests: dict[str, Request] = {}
        self.finished: list[list[int]] = []  # the tokens of requests that ended by themselves
        self.now = 0.0
        self._in_flight: list[tuple[object, ModelRunnerOutput]] = []
        self._lag = 1 if asynchronous else 0
        self._aggregator = KVOutputAggregator(ranks)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._loads: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._watch()

    # What a test says

    def submit(self, tokens: list[int], max_tokens: int = 4) -> str:
        id = f"r{self.counts['submitted']}"
        self.counts["submitted"] += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(id, list(tokens), sampling, None, block_hasher=self._hasher)
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
        moving = [copy for rank in self.ranks for copy in rank.copies.values()]
        self.counts["resets"] += 1
        self.counts["resets during a load"] += any(copy.plan.direction is Direction.LOAD for copy in moving)
        self.counts["resets during a store"] += any(copy.plan.direction is Direction.STORE for copy in moving)
        self.scheduler.reset_prefix_cache(reset_connector=True)
        assert self.cache.pool.statistics().cached == 0, "something can be found after a reset"

    def restart_running(self) -> bool:
        """vLLM's reset that preempts what runs, which the next step resumes. It raises while blocks are lent."""
        if self.half.has_transfers() or self.scheduler.kv_holding_waiting:
            return False
        while self._in_flight:
            self._land()
        if self.half.has_transfers():
            return False  # what has just finished is stored first
        self.counts["resets that preempt"] += bool(self.scheduler.running)
        return self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> None:
        self.now += 0.01
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

    def check_nothing_leaked(self) -> None:
        pool, statistics = self.pool, self.cache.statistics()
        assert not self.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # S7.4
        assert len(pool.free_block_queue.get_all_free_blocks()) == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert (statistics.running, statistics.storing, statistics.loading) == (0, 0, 0)
        assert (statistics.pool.pinned, statistics.pool.writing, statistics.pool.retired) == (0, 0, 0)
        assert not (self.half._admitted or self.half._on_device or self.half._loads or self.half._readmitted)
        self.cache.check_valid()

    # One step

    def _launch(self) -> None:
        output = self.scheduler.schedule()
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        metadata = output.kv_connector_metadata
        for transfer in metadata.plan.transfers:
            self.counts[f"{transfer.direction.value}s planned"] += 1
            if transfer.direction is Direction.LOAD:
                self.counts["loads whose source was gone"] += transfer.failed
                blocks = transfer.copies[0].device_blocks if transfer.copies else ()
                self._loads[transfer.id] = metadata.requests[transfer.id], blocks
        self.counts["loads cancelled"] += len(metadata.plan.cancelled)
        for rank in self.ranks:
            rank.begin(metadata)
        sampled = self._compute(output)
        ids = list(output.num_scheduled_tokens)
        outputs = []
        for rank in self.ranks:
            result = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, [sampled[id] for id in ids])
            result.kv_connector_output = rank.poll()
            outputs.append(result)
        self.random.shuffle(outputs)  # ranks are heard in any order
        self._in_flight.append((output, self._aggregator.aggregate(outputs, 0)))

    def _land(self) -> None:
        output, result = self._in_flight.pop(0)
        loading = {id for id, request in self.requests.items() if request.status is LOADING}
        received = result.kv_connector_output.finished_recving or set()
        failed = result.kv_connector_output.failed_recving
        assert loading >= {id for id in received if not self.requests[id].is_finished()}
        self.counts["loads done"] += len(received - failed)
        self.counts["loads failed"] += len(failed)
        self._check_loads(received, failed)
        self.scheduler.update_from_output(output, result)

    def _compute(self, output: object) -> dict[str, list[int]]:
        """The forward pass on every rank, after a look at all that it reads."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for id, count in output.num_scheduled_tokens.items():
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(id)
            start, stop = starts[id], starts[id] + count
            ends = [*range(BLOCK, start, BLOCK), *([start] if start else [])]
            for rank in self.ranks:
                for end in ends:
                    found = rank.device.get(table[(end - 1) // BLOCK])
                    assert found == self.model.bytes(id, end), f"{id} reads wrong KV before token {end}"
            for end in [*range(start - start % BLOCK + BLOCK, stop, BLOCK), stop]:
                pattern = self.model.bytes(id, end)
                for rank in self.ranks:
                    rank.device[table[(end - 1) // BLOCK]] = pattern
            known = len(self.model.tokens[id])
            assert stop <= known, "a token was scheduled that nobody knows yet"
            sampled[id] = [self.model.sample(id)] if stop == known else []
        return sampled

    def _check_loads(self, received: set[str], failed: set[str]) -> None:
        for transfer, (id, blocks) in list(self._loads.items()):
            if id not in received:
                continue
            del self._loads[transfer]
            if id in failed:
                continue
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(id)
            assert blocks, "a load without destinations went well"
            for block in blocks:
                end = (table.index(block) + 1) * BLOCK
                for rank in self.ranks:
                    assert rank.device[block] == self.model.bytes(id, end), f"{id} was loaded with wrong bytes"

    # Watching the connector

    def _watch(self) -> None:
        """Compare every lookup with the oracle, and see what becomes of holds."""
        lookup, in_place, find = self.cache.lookup, self.device.release_in_place, self.device.find
        walk, hold = self.device.soonest_evicted, self.device.hold

        def checked_lookup(request, n0, now):
            answer = lookup(request, n0, now)
            best = longest_boundary(self.cache, request, n0)
            expected = {Hit: best > n0, Miss: best == n0, Pending: best > n0}
            assert expected[type(answer)], f"{answer}, but the oracle says {best} after {n0}"
            assert not isinstance(answer, Hit) or answer.boundary == best
            assert not isinstance(answer, Pending) or answer.deadline > now
            self.counts[type(answer).__name__.lower()] += 1
            return answer

        def checked_in_place(held, behind):
            before = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
            in_place(held, behind)
            back = [block.block_id for block in reversed(held) if block.ref_cnt == 0]
            after = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
            assert [id for id in after if id not in back] == before, "others have moved"
            first = after.index(back[0]) if back else 0
            assert after[first : first + len(back)] == back, "the deepest is not the first to be evicted"
            ahead = after[:first]
            while ahead and ahead[-1] != behind and not self.pool.blocks[ahead[-1]].block_hash:
                ahead.pop()
            assert not back or ahead[-1:] == ([] if behind is None else [behind]), "not where it waited"
            self.counts["released in place"] += len(back)
            self.counts["used again before they could be released"] += len(held) - len(back)

        def counted_walk(after):
            self.counts["walks resumed"] += after is not None
            for each in walk(after):
                self.counts["blocks walked"] += 1
                yield each

        def counted_find(key):
            found = find(key)
            hidden = found is None and self.pool.get_cached_block(key, [0]) is not None
            self.counts["blocks hidden until computed"] += hidden
            return found

        def counted_hold(blocks):
            held = hold(blocks)
            self.counts["blocks held"] += len(held)
            return held

        self.cache.lookup, self.device.release_in_place = checked_lookup, checked_in_place
        self.device.soonest_evicted, self.device.find, self.device.hold = counted_walk, counted_find, counted_hold


def longest_boundary(cache: object, request: object, n0: int) -> int:
    """The oracle, the slow way: one chunk after another, as long as it is there and a token is left to compute."""
    end = n0 // BLOCK
    while (
        end < len(request.keys)
        and (end + 1) * BLOCK <= request.num_tokens - 1
        and cache.pool.find(request.keys[end]) is not None
    ):
        end += 1
    return end * BLOCK
