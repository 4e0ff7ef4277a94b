"""A whole vLLM engine in this process, on the CPU, for a test to use and to look into.

    with RealEngine(folder, connector="CPUPrefixCacheConnector", extra={"cpu_bytes_to_use": 2**26}) as engine:
        before = engine.answer(prompts)
        engine.forget()
        assert max(differences(engine.answer(prompts), before)) <= TOLERANCE

Logprobs are those of the whole vocabulary: with a tiny model they cost nothing, and they have a deviation.
Only one engine can live at a time. Its start seeds all random generators.
"""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.request import Request

BLOCK = 32  # tokens; others on the CPU are multiples of it
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
TOLERANCE = 1e-4 if HAS_AVX512 else 3e-4  # of the standard deviation of the logprobs; 1.3e-4 was seen without AVX-512
SHOWN = 1e-2  # the least difference that other KV makes, in the same unit; damage to one layer of one block made 2.5e-2
PATIENCE = 60  # seconds
KERNELS = "register_triton_kernel_overrides"
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: torch.Tensor  # one row for each of `tokens`, one column for each token of the vocabulary
    cached_tokens: int  # of the prompt, not computed
    loaded_tokens: int  # those of them that the connector brought


def differences(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[float]:
    """Largest difference in logprobs of each prompt, in standard deviations of those expected.

    Positions count until the tokens differ: what comes behind has another past. That they do differ shows in the
    logprobs that chose them. Answers that are not as many or not as long are no answers to the same questions.
    """
    pairs = list(zip(answers, expected, strict=True))
    for answer, other in pairs:
        assert answer.logprobs.shape == other.logprobs.shape, "answers of different lengths"
    return [_difference(answer, other) for answer, other in pairs]


def _difference(answer: Answer, expected: Answer) -> float:
    same = [*(a == b for a, b in zip(answer.tokens, expected.tokens, strict=True)), False].index(False)
    found, reference = answer.logprobs[: same + 1], expected.logprobs[: same + 1]
    return float(((found - reference).abs().amax(dim=1) / reference.std(dim=1)).max())


def cold_answers(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int = 4, blocks: int = 300, **options: object
) -> list[Answer]:
    """Answers of an engine without a connector, which has seen nothing yet."""
    with RealEngine(folder, blocks=blocks, **options) as engine:
        return engine.answer(prompts, max_tokens)


class RealEngine:
    """The engine, from start to `close`, and its parts as vLLM made them.

    llm, core                   vllm.LLM and its EngineCore
    scheduler, pool             what decides, and the device's blocks
    worker, caches              what computes, and the KV caches of all layers
    connectors                  the connector's object in the scheduler, `.scheduler`, and in the worker, `.worker`
    finished                    Answers to what was submitted, by name, until they are taken out; None: vLLM gave it up
    """

    def __init__(
        self,
        folder: Path,
        *,
        blocks: int = 100,
        block_tokens: int = BLOCK,
        step_tokens: int = 256,
        max_requests: int = 8,
        max_model_len: int = -1,  # as long as the blocks can hold
        connector: str | None = None,
        module: str = "connector.vllm",
        extra: dict[str, object] | None = None,
        load_failure_policy: str = "recompute",
        asynchronous: bool = False,
        log_stats: bool = False,
        **engine_args: object,
    ) -> None:
        self.finished: dict[str, Answer | None] = {}
        self._loaded: dict[str, int] = {}
        self._numbers = count()
        ours = {"reset": "with_connector"} if module == "connector.vllm" else {}  # `forget` keeps the host then
        transfer = dict(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy=load_failure_policy,
            kv_connector_extra_config=ours | (extra or {}),
        )
        arguments = dict(
            model=str(folder),
            num_gpu_blocks_override=blocks,
            block_size=block_tokens,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=max_requests,
            max_model_len=max_model_len,
            kv_transfer_config=transfer if connector else None,
            disable_log_stats=not log_stats,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_logprobs=-1,
            enforce_eager=True,
            kv_cache_memory_bytes=2**30,  # a given size saves measuring; `blocks` is how much there is
            use_tqdm_on_load=False,
        )
        self._closing = ExitStack()
        with ExitStack() as failing:
            failing.enter_context(self._closing)
            self._start(folder, arguments | engine_args, asynchronous)
            failing.pop_all()

    def _start(self, folder: Path, arguments: dict[str, object], asynchronous: bool) -> None:
        self._closing.callback(_clean)
        self._closing.enter_context(patch.dict(os.environ, ENVIRONMENT))
        self._closing.enter_context(torch.compiler.set_stance("force_eager"))  # vLLM compiles what ranks logprobs
        with _frozen_imports(), _scheduling(asynchronous), _kernels_registered_once():
            _inspect_here(folder)
            self.llm = LLM(**arguments)
        client = self.llm.llm_engine.engine_core
        self._closing.callback(client.shutdown)
        self.core = client.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = self.core.model_executor.driver_worker.worker
        self.caches = self.worker.model_runner.kv_caches
        self.connectors = SimpleNamespace(
            scheduler=self.scheduler.connector,
            worker=get_kv_transfer_group() if has_kv_transfer_group() else None,
        )
        self._observe(client)

    def _observe(self, client: object) -> None:
        """Note what the connector has loaded for each prompt; vLLM's own output has only how much it was spared."""
        get_output = client.get_output

        def observed():
            outputs = get_output()
            for each in outputs.outputs:
                if each.prefill_stats:
                    name = each.request_id.rsplit("-", 1)[0]
                    self._loaded[name] = each.prefill_stats.num_external_cached_tokens
            return outputs

        client.get_output = observed

    def __enter__(self) -> "RealEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        with _frozen_imports():
            self._closing.close()
            for part in ("llm", "core", "scheduler", "pool", "worker", "caches", "connectors"):
                vars(self).pop(part, None)
            gc.collect()

    # Questions

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int = 4) -> list[Answer]:
        """All prompts at once. The same ones cut in the same way, if as much of them is in the caches."""
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        self._step_while(self.llm.llm_engine.has_unfinished_requests)
        return [self.finished.pop(name) for name in names]

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        adapter: object = None,
        more: dict[str, object] | None = None,  # of vLLM's prompt: its images
        **sampling_params: object,
    ) -> str:
        name = str(next(self._numbers))
        asked = dict(temperature=0, logprobs=-1, flat_logprobs=True, ignore_eos=True, detokenize=False)
        sampling = SamplingParams(max_tokens=max_tokens, **asked | sampling_params)
        said = {"prompt_token_ids": list(prompt)} | (more or {})
        self.llm.llm_engine.add_request(name, said, sampling, lora_request=adapter)
        return name

    def step(self) -> None:
        """Takes a step; requests that end in it are in `finished` then."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.finished[output.request_id] = self._read(output)

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def rest(self) -> None:
        """Step until nothing is left to do: no requests, and no transfers, which go on when answers are out."""
        self._step_while(lambda: self.scheduler.has_requests() or self.core.batch_queue)

    def _step_while(self, busy: Callable[[], object]) -> None:
        stop = time.monotonic() + PATIENCE
        while busy():
            assert time.monotonic() < stop, "the engine does not come to rest"
            self.step()

    def forget(self, host: bool = False) -> None:
        """Empty the device's prefix cache, and the connector's with `host`."""
        self.rest()
        assert self.core.reset_prefix_cache(reset_connector=host)

    def _read(self, output: object) -> Answer | None:
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            return None
        flat = completion.logprobs
        logprobs = torch.empty(len(flat.start_indices), self.llm.model_config.get_vocab_size())
        for row, start, stop in zip(logprobs, flat.start_indices, flat.end_indices, strict=True):
            row[flat.token_ids[start:stop]] = torch.tensor(flat.logprobs[start:stop])
        loaded = self._loaded.pop(output.request_id)
        return Answer(list(completion.token_ids), logprobs, output.num_cached_tokens, loaded)

    # The device's blocks

    def groups(self) -> list[object]:
        """vLLM's KVCacheGroupSpec of each group."""
        return self.scheduler.kv_cache_config.kv_cache_groups

    def hashes(self, prompt: Sequence[int]) -> list[bytes]:
        """Hashes of its blocks."""
        hasher = self.core.request_block_hasher
        return Request("", list(prompt), SamplingParams(), None, block_hasher=hasher).block_hashes

    def cached(self, prompt: Sequence[int], group: int = 0) -> dict[int, int]:
        """Which blocks of `prompt` can be found on the device: from a block's index in the prompt to its number."""
        found = [self.pool.get_cached_block(key, [group]) for key in self.hashes(prompt)]
        return {index: blocks[0].block_id for index, blocks in enumerate(found) if blocks}

    def layers(self, group: int = 0) -> list[torch.Tensor]:
        """The KV caches of a group's layers, indexed by block. Groups share the memory, but never a block."""
        context = self.core.vllm_config.compilation_config.static_forward_context
        return [context[name].kv_cache for name in self.groups()[group].layer_names]

    @contextmanager
    def damaged(self, block: int, layers: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Noise in place of what `block` holds, as loud as that, in all layers or in some."""
        damaged = [layer[block] for layer in layers or self.caches]
        before = [content.clone() for content in damaged]
        for content in damaged:
            content.normal_(std=float(content.std()))
        try:
            yield
        finally:
            for content, good in zip(damaged, before, strict=True):
                content.copy_(good)


@contextmanager
def _frozen_imports() -> Iterator[None]:
    """vLLM collects garbage five times in an engine's life, half a second each, over all that has been imported."""
    gc.freeze()
    try:
        with patch.object(gc, "freeze"), patch.object(gc, "unfreeze"):
            yield
    finally:
        gc.unfreeze()


@contextmanager
def _scheduling(asynchronous: bool) -> Iterator[None]:
    """vLLM never schedules asynchronously on the CPU, where nothing is gained; it can all the same."""
    configure = CpuPlatform.check_and_update_config

    def configure_and_decide(config):
        configure(config)
        config.scheduler_config.async_scheduling = asynchronous

    with patch.object(CpuPlatform, "check_and_update_config", staticmethod(configure_and_decide)):
        yield


@contextmanager
def _kernels_registered_once() -> Iterator[None]:
    """vLLM looks for them in all modules there are, 0.1 s, whenever a worker begins: from 0.31 on."""
    with patch.object(CpuPlatform, KERNELS, staticmethod(_register_kernels), create=True):
        yield


_register_kernels = cache(getattr(CpuPlatform, KERNELS, lambda: None))


def _inspect_here(folder: Path) -> None:
    """Spare vLLM the process of its own, of ten seconds, in which it would look at the model's class."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _clean() -> None:
    """All that an engine leaves behind in its process, also one that did not start."""
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
