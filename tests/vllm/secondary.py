"""vLLM's tiering manager with one secondary tier, as a server has it in its scheduler, driven by prompts.

A letter of a prompt is a chunk; its bytes follow from the letter and from the weights. Copies between the device and
the rows of host memory are the test's.
"""

import hashlib
import itertools
import os
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from tests.vllm.engine import vllm_config

ROW = 8192
CHUNKS = 8
BLOCK = 16
TIER_BYTES = 1 << 20
PATIENCE = 30  # seconds
MODULE = "cpu_prefix_cache_vllm"
OURS = {"type": "PrefixCacheTier", "module_path": MODULE}
_numbers = itertools.count()


def ours(path: object, revision: str | None = "1", reset: str | None = None, **more: Any) -> dict[str, Any]:
    """A tier of ours at this path. Without a revision the weights are those in the model's folder."""
    tier = {"kind": "file", "path": str(path), "bytes": TIER_BYTES, "revision": revision} | more
    options = {"tier": {name: value for name, value in tier.items() if value is not None}, "reset": reset}
    return OURS | {name: value for name, value in options.items() if value is not None}


def shared(url: str, **more: Any) -> dict[str, Any]:
    """A tier of ours in a store that servers share."""
    return OURS | {"tier": {"kind": url.partition(":")[0], "store": url, "ask_seconds": PATIENCE} | more}


def theirs(path: object) -> dict[str, Any]:
    """vLLM's own tier in files."""
    return {"type": "fs", "root_dir": str(path)}


def config(
    tier: dict[str, Any],
    *,
    chunks: int = CHUNKS,
    model: str = "model",
    dtype: str = "float32",
    engine: str = "",
    number: int = 0,
    policy: str = "lru",
) -> OffloadingConfig:
    """vLLM's description of an engine to what offloads its KV: one group, one rank, number `number` of the replicas."""
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": chunks * ROW,
        "secondary_tiers": [tier],
        "eviction_policy": policy,
        "cache_policy_module_path": None if policy == "lru" else MODULE,
    }
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK, ("layer",), 0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=engine or f"tests-{os.getpid()}-{next(_numbers)}",
        model=OffloadingModelConfig(model, dtype),
        cache=OffloadingCacheConfig(BLOCK, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, number, 2, None, True),
    )


@cache
def some_engine() -> VllmConfig:
    with TemporaryDirectory() as folder:
        return vllm_config(Path(folder))


def engine(*, model: str = "model", dtype: str = "float32", number: int = 0, **_: Any) -> VllmConfig:
    """The same engine to what vLLM makes for it."""
    made = deepcopy(some_engine())
    made.model_config.model, made.cache_config.cache_dtype = model, dtype
    made.parallel_config.data_parallel_index = number
    return made


def as_it_is(_: VllmConfig) -> None:
    """No change of an engine."""


def key(letter: str) -> OffloadKey:
    return make_offload_key(hashlib.sha256(letter.encode()).digest(), 0)


def content(letter: str, weights: str) -> np.ndarray:
    """The KV of a letter as these weights compute it."""
    seed = int.from_bytes(hashlib.sha256(f"{letter} {weights}".encode()).digest()[:8], "big")
    return np.random.default_rng(seed).integers(-128, 128, ROW, dtype=np.int8)


class Server:
    """`tier` is its secondary tier. `weights` are those that it computes with."""

    def __init__(
        self,
        tier: dict[str, Any],
        weights: str = "1",
        change: Callable[[VllmConfig], None] = as_it_is,
        **described: Any,
    ) -> None:
        self.weights = weights
        changed = engine(**described)
        change(changed)
        with set_current_vllm_config(changed):  # as our connector does
            self.manager = OffloadingSpecFactory.create_spec(config(tier, **described)).get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.rows = np.frombuffer(self.manager.primary_tier.get_kv_memoryview(), dtype=np.int8).reshape(-1, ROW)
        self._requests = itertools.count()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def compute(self, prompt: str, waits: bool = True) -> None:
        """A request computes its chunks, and vLLM stores them in host memory and in the tier."""
        context = self._begin(prompt)
        stored = self.manager.prepare_store([key(letter) for letter in prompt], context)
        letters = {key(letter): letter for letter in prompt}
        for each, row in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
            self.rows[row] = content(letters[each], self.weights)
        if stored.keys_to_store:
            self.manager.complete_store(stored.keys_to_store, context)
        self.manager.on_request_finished(context)
        if waits:
            self.settle()

    def settle(self) -> None:
        """Until the tier has written all."""
        deadline = time.monotonic() + PATIENCE
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "the tier does not end its jobs"
            self.step()

    def forget_host(self) -> None:
        """Other prompts have taken the host memory."""
        self.settle()
        self.manager.primary_tier.reset_cache()
        self.rows[:] = 0

    def ask(self, prompt: str) -> str:
        """The bytes that a request gets for each chunk, from the host or from the tier: its letter; "." where it has to
        compute; "?" where other bytes were served.
        """
        self.forget_host()
        context, keys = self._begin(prompt), [key(letter) for letter in prompt]
        deadline = time.monotonic() + PATIENCE
        while {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*self._look(keys, context)}:
            assert time.monotonic() < deadline, "the tier does not answer"
            self.step()
        found = self._look(keys, context)
        hits = [each for each, result in zip(keys, found, strict=True) if result is LookupResult.HIT]
        served = dict(zip(hits, self._loaded(hits, context), strict=True))
        self.manager.on_request_finished(context)
        self.step()
        return "".join(
            "."
            if each not in served
            else letter
            if np.array_equal(served[each], content(letter, self.weights))
            else "?"
            for each, letter in zip(keys, prompt, strict=True)
        )

    def reset(self, weights: str) -> None:
        """New weights, and the call that vLLM documents for them: reset_prefix_cache(reset_connector=True)."""
        self.manager.reset_cache()
        self.weights = weights
        if flushed := getattr(self.manager, "on_reset_flushed", None):  # from 0.33 on, when no worker writes any more
            flushed()

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()

    def _begin(self, prompt: str) -> ReqContext:
        context = ReqContext(f"{prompt} {next(self._requests)}")
        for at, letter in enumerate(prompt):
            context.set_offload_key_position(key(letter), (at + 1) * BLOCK)
        self.manager.on_new_request(context)
        return context

    def _look(self, keys: list[OffloadKey], context: ReqContext) -> list[LookupResult]:
        return [self.manager.lookup(each, context) for each in keys]

    def _loaded(self, keys: list[OffloadKey], context: ReqContext) -> list[np.ndarray]:
        if not keys:
            return []
        rows = self.manager.prepare_load(keys, context).chunk_ids
        loaded = [self.rows[row].copy() for row in rows]
        self.manager.complete_load(keys, context)
        return loaded
