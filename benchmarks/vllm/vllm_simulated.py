"""vLLM's real scheduler with a connector, and a worker that computes and copies nothing. Needs no GPU.

Model       the groups of layers whose blocks a pool has
Engine      submit and step; the CPU time that the connector takes in each step
a worker    the reports that a connector's worker half makes of its plans, as if copies ended some steps later
"""

import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.settings import Settings
from cpu_prefix_cache.copying import JoinedPool
from cpu_prefix_cache.deciding import Direction, RankReport

BLOCK = 16
MAX_MODEL_LEN = 40_960
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
STATE_BLOCK = 272
LARGE_ATTENTION = FullAttentionSpec(block_size=STATE_BLOCK, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
STATES = MambaSpec(
    block_size=STATE_BLOCK,
    shapes=((3, 8192), (32, 128, 128)),
    dtypes=(torch.bfloat16, torch.bfloat16),
    page_size_padded=LARGE_ATTENTION.page_size_bytes,
    mamba_cache_mode="align",
)
OURS = {"kv_connector": "CPUPrefixCacheConnector", "kv_connector_module_path": "connector.vllm"}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector"}
Kind = tuple[dict[str, Any], dict[str, Any]] | None  # the connector and its own options; None: no connector
POOL_STEP_SECONDS = 0.002  # at least: a keeper answers in the meantime, as under a server
CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
)


@dataclass(frozen=True)
class Model:
    """The kinds of its groups, each of so many layers. All have blocks of the same tokens, and pages of one size."""

    groups: tuple[KVCacheSpec, ...]
    layers: int = 1

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_size

    @property
    def block_bytes(self) -> int:
        return self.layers * self.groups[0].page_size_bytes

    def caches(self, blocks: int) -> KVCacheConfig:
        """Groups lie over each other: a block is of one of them."""
        groups = [
            KVCacheGroupSpec([f"{number}.layer.{at}" for at in range(self.layers)], spec)
            for number, spec in enumerate(self.groups)
        ]
        size, page = blocks * self.block_bytes, self.groups[0].page_size_bytes
        tensors = [KVCacheTensor(size, group.layer_names, size // self.layers, page) for group in groups]
        return KVCacheConfig(blocks, tensors, groups)


ONE_LAYER = Model((ATTENTION,))
LLAMA = Model((ATTENTION,), layers=32)  # 3.1, 8B
HYBRID = Model((STATES, STATES, STATES, LARGE_ATTENTION), layers=8)  # Qwen 3.5, 9B, as vLLM groups its layers


@dataclass(frozen=True)
class Sizes:
    """Blocks of device and host, requests that run at once, and tokens that a step may compute."""

    device_blocks: int
    host_blocks: int
    requests: int = 256
    step_tokens: int = 8192


@contextmanager
def model_folder() -> Iterator[Path]:
    """Folder with the configuration of a model that nobody loads. Makes the hashes of blocks ready, too."""
    init_none_hash(sha256)
    model = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=64)
    model |= dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000)
    model |= dict(max_position_embeddings=MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(model))
        yield Path(name)


class Worker:
    """A worker whose copies end `copy_steps` steps after the one that plans them. Without a connector, it has none."""

    def __init__(self, copy_steps: int) -> None:
        self.stored = 0
        self.loaded = 0
        self._copy_steps = copy_steps
        self._moving: deque[Any] = deque()

    def step(self, metadata: Any) -> KVConnectorOutput | None:
        self._count(metadata)
        self._moving.append(metadata)
        ended = self._moving.popleft() if len(self._moving) > self._copy_steps else None
        return self._report(metadata, ended)

    def _count(self, metadata: Any) -> None:
        """Count what this plan copies."""

    def _report(self, now: Any, ended: Any | None) -> KVConnectorOutput | None:
        """The report in the step of plan `now`, when the copies of plan `ended` have just ended."""
        return None


class OurWorker(Worker):
    """A load that comes after stores ends in the same step as they do."""

    def __init__(self, copy_steps: int, host_blocks: int) -> None:
        super().__init__(copy_steps)
        self._host_blocks = host_blocks
        self._done: set[int] = set()
        self._failed: set[int] = set()
        self._sent: RankReport | None = None

    def _count(self, metadata: StepMetadata) -> None:
        for transfer in metadata.plan.transfers:
            blocks = sum(len(copy.device_blocks) for copy in transfer.copies)
            if transfer.direction is Direction.STORE:
                self.stored += blocks
            else:
                self.loaded += blocks

    def _report(self, now: StepMetadata, ended: StepMetadata | None) -> KVConnectorOutput:
        plan = now.plan
        self._done = {id for id in self._done if id >= plan.resolved_below} - set(plan.resolved)
        self._failed = {id for id in self._failed if id >= plan.resolved_below} - set(plan.resolved)
        over: dict[str, bool] = {}
        if ended is not None:
            self._done |= (done := {each.id for each in ended.plan.transfers if not each.failed})
            self._failed |= {each.id for each in ended.plan.transfers if each.failed}
            over = {request: id in done for id, request in ended.requests.items()}
        report = RankReport(0, frozenset(self._done), frozenset(self._failed), ready_blocks=self._host_blocks)
        is_news = bool(self._done or self._failed) or report != self._sent or now.timed is not None
        self._sent = report
        return KVConnectorOutput(
            finished_recving=set(over) or None,
            failed_recving={request for request, is_done in over.items() if not is_done},
            kv_connector_worker_meta=WorkerReports((report,), now.timed, prepared=(0,)) if is_news else None,
        )


class SimpleWorker(Worker):
    def _count(self, metadata: SimpleCPUOffloadMetadata) -> None:
        self.stored += len(metadata.store_gpu_blocks)
        self.loaded += len(metadata.load_gpu_blocks)

    def _report(self, now: SimpleCPUOffloadMetadata, ended: SimpleCPUOffloadMetadata | None) -> KVConnectorOutput:
        if ended is None:
            return KVConnectorOutput()
        stored = {ended.store_event: 1} if ended.store_event >= 0 else {}
        return KVConnectorOutput(
            finished_recving=set(ended.load_event_to_reqs.get(ended.load_event, ())) or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )


class OffloadingWorker(Worker):
    def _count(self, metadata: OffloadingConnectorMetadata) -> None:
        self.stored += sum(len(job.src_spec.block_ids) for job in metadata.store_jobs.values())
        self.loaded += sum(len(job.dst_spec.block_ids) for job in metadata.load_jobs.values())

    def _report(self, now: OffloadingConnectorMetadata, ended: OffloadingConnectorMetadata | None) -> KVConnectorOutput:
        if ended is None:
            return KVConnectorOutput()
        jobs = OffloadingWorkerMetadata(dict.fromkeys((*ended.load_jobs, *ended.store_jobs), 1))
        return KVConnectorOutput(
            finished_recving={job.req_id for job in ended.load_jobs.values()} or None,
            kv_connector_worker_meta=jobs if jobs.completed_jobs else None,
        )


def worker_for(connector: dict[str, Any], copy_steps: int, host_blocks: int) -> Worker:
    name = connector["kv_connector"]
    if name == "CPUPrefixCacheConnector":
        return OurWorker(copy_steps, host_blocks)
    return {"SimpleCPUOffloadConnector": SimpleWorker, "OffloadingConnector": OffloadingWorker}[name](copy_steps)


class Engine:
    """A scheduler with a connector. For each step, `steps` has the seconds that the connector took, and `tokens` how
    many it computed."""

    def __init__(self, kind: Kind, folder: Path, sizes: Sizes, copy_steps: int = 1, model: Model = ONE_LAYER) -> None:
        self.worker = Worker(copy_steps) if kind is None else worker_for(kind[0], copy_steps, sizes.host_blocks)
        config, caches = _config(kind, folder, sizes, model), model.caches(sizes.device_blocks)
        self._seat = _seat(config, caches)
        self.scheduler = _scheduler(config, caches)
        self.steps: list[float] = []
        self.tokens: list[int] = []
        self._taken = 0.0
        self._hasher = get_request_block_hasher(model.block_tokens, sha256)
        self._names = iter(range(10**9))
        for name in CALLS if kind is not None else ():
            self._time(name)

    def _time(self, name: str) -> None:
        connector = self.scheduler.connector
        call = getattr(connector, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._taken += time.thread_time() - start

        setattr(connector, name, timed)

    def submit(self, tokens: Sequence[int], max_tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(str(next(self._names)), list(tokens), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        self._taken, began = 0.0, time.monotonic()
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if self._is_complete(id) else [] for id in ids]
        result = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, sampled)
        result.kv_connector_output = self.worker.step(output.kv_connector_metadata)
        self.scheduler.update_from_output(output, result)
        self.steps.append(self._taken)
        self.tokens.append(output.total_num_scheduled_tokens)
        if self._seat is not None:
            time.sleep(max(0.0, began + POOL_STEP_SECONDS - time.monotonic()))

    def close(self) -> None:
        """Leave the pool, if it is in one."""
        if self._seat is not None:
            self.scheduler.shutdown()
            self._seat.close()

    def clear(self) -> None:
        """Forget the steps so far."""
        self.steps.clear()
        self.tokens.clear()

    def _is_complete(self, id: str) -> bool:
        request = self.scheduler.requests[id]
        return request.num_computed_tokens >= request.num_tokens


def _config(kind: Kind, folder: Path, sizes: Sizes, model: Model) -> VllmConfig:
    block = model.block_tokens
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=sizes.requests,
            max_num_batched_tokens=sizes.step_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=None if kind is None else _transfer(*kind, sizes.host_blocks * model.block_bytes),
    )
    config.scheduler_config.async_scheduling = issubclass(Scheduler, AsyncScheduler)  # on CPUs vLLM turns it off
    config.cache_config.num_gpu_blocks = sizes.device_blocks
    if STATES in model.groups:
        config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size = "align", block
    return config


def _seat(config: VllmConfig, caches: KVCacheConfig) -> JoinedPool | None:
    """The engine's seat in a keeper's pool, which a rank takes and gives to the scheduler; None without the option."""
    transfer = config.kv_transfer_config
    if transfer is None or "pool" not in transfer.kv_connector_extra_config:
        return None
    settings = Settings.of(config, caches)
    if settings.pool is None:
        return None
    pool = settings.pool
    seat = JoinedPool.join(pool.pool, settings.planner.host_block_bytes, pool.namespace, pool.planner)
    seat.give(pool.meeting)
    return seat


def _scheduler(config: VllmConfig, caches: KVCacheConfig) -> Scheduler:
    scheduled, hashed = resolve_kv_cache_block_sizes(caches, config)
    return Scheduler(config, caches, StructuredOutputManager(config), block_size=scheduled, hash_block_size=hashed)


def _transfer(connector: dict[str, Any], options: dict[str, Any], host_bytes: int) -> KVTransferConfig:
    options = options if "pool" in options else {"cpu_bytes_to_use": host_bytes, **options}
    return KVTransferConfig(
        **connector, kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=options
    )
