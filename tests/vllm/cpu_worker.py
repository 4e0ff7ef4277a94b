"""Copies of vLLM's OffloadingConnector on the CPU, for which vLLM has none: whole chunks, at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """One rank, and one block to a chunk."""

    def __init__(self, spec: TieringOffloadingSpec, kv_caches: CanonicalKVCaches) -> None:
        sizes = spec.num_chunks, 0, spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker
        self._region = SharedOffloadRegion(spec._engine_id, *sizes)
        self._device = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._host = [self._region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, (self._device, src_spec), (self._host, dst_spec))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, (self._host, src_spec), (self._device, dst_spec))

    def _copy(self, job_id, source, target) -> bool:
        (read, read_from), (write, write_to) = source, target
        for here, there in zip(read, write, strict=True):
            there[torch.as_tensor(write_to.block_ids)] = here[torch.as_tensor(read_from.block_ids)]
        self._finished.append(TransferResult(job_id, True, 1, 1.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies have ended."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


@contextmanager
def copies_on_the_cpu() -> Iterator[None]:
    with patch.object(TieringOffloadingSpec, "get_worker", lambda spec, caches: CpuWorker(spec, caches)):
        yield
