"""SGLang's scheduling of prefills as it is, over its own tree with our linker, around a model in miniature.

Requests, admission, batches, tree, linker wrapper and the choice of the linker by a flag are SGLang's. What its
scheduler's loop does between them is here: match, load, forward, insert, abort and reset.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from connector.sglang import HostLinker
from tests.sglang.models import STATE, WINDOW, WINDOW_TOKENS, Kind, Model, Wrong

VOCABULARY = 1000
MOST_STEPS = 1000  # that a story takes
LINKER = {"linker": "HostLinker", "linker_module_path": "connector.sglang"}


@contextmanager
def server_args(**extra: Any) -> Iterator[Any]:
    """The options of `sglang serve` that choose our linker, with these of its own."""
    with get_context().override_server_args(
        device="cpu",
        _mamba_cache_chunk_size=64,  # of a model, of which there is none
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={**LINKER, "linker_extra_config": extra},
    ) as args:
        yield args


class Engine:
    def __init__(
        self,
        args: Any,
        kind: Kind,
        tokens: int = 128,
        chunk: int = 32,
        enable_hierarchical_cache: bool = False,
        **params: Any,
    ) -> None:
        self.model = Model(kind, tokens)
        self.chunk = chunk
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.model.requests,
            token_to_kv_pool_allocator=self.model.allocator,
            page_size=kind.page_tokens,
            sliding_window_size=WINDOW_TOKENS if kind.of(WINDOW) else None,
            **params,
        )
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(forward_stream=None),
            register_hicache_layer_transfer_counter=lambda counter: setattr(self, "counter", counter),
        )
        self.tree = create_tree_cache(
            TreeCacheBuildContext(
                server_args=args,
                params=self.params,
                is_hybrid_swa=bool(kind.of(WINDOW)),
                is_hybrid_ssm=bool(kind.of(STATE)),
                enable_hierarchical_cache=enable_hierarchical_cache,
                disable_radix_cache=False,
                tp_worker=worker,
                model_config=None,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
            )
        )
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        self.computed = 0  # tokens
        self.num_requests = 0
        self.answered: list[Req] = []
        self.aborted: list[Req] = []
        self.wrong: list[Wrong] = []  # that were read by requests with an answer

    def submit(self, tokens: Sequence[int], **options: Any) -> Req:
        self.num_requests += 1
        sampling = SamplingParams(max_new_tokens=1)
        sampling.normalize(None)
        request = Req(f"r{self.num_requests}", "", array("q", tokens), sampling, vocab_size=VOCABULARY, **options)
        self.waiting.append(request)
        return request

    def run(self, *prompts: Sequence[int]) -> None:
        """Each of them alone, from the first step until its stores have landed."""
        for tokens in prompts:
            self.submit(tokens)
            self.drain()

    def drain(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.waiting and self.chunked is None:
                return self.settle()
            self.step()
        raise AssertionError(f"{len(self.waiting)} requests are not admitted")

    def settle(self) -> None:
        """Until all stores are known to have ended."""
        for _ in range(MOST_STEPS):
            if not self.tree.linker.pending_offloads:
                return
            self.tree.check_hicache_events()
        raise AssertionError(f"{len(self.tree.linker.pending_offloads)} stores do not end")

    def step(self) -> list[Req]:
        """One turn of the scheduler's loop; the requests that it admitted."""
        self.tree.check_hicache_events()
        if self.chunked is not None:
            checkpoint_kv_cache(self.chunked, self.tree)
        admitted = self._admit()
        if not admitted:
            return []
        batch = ScheduleBatch.init_new(
            admitted,
            self.model.requests,
            self.model.allocator,
            self.tree,
            SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False),
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            chunked_req=self.chunked,
        )
        batch.hicache_consumer_index = self.tree.ready_to_load_host_cache()
        batch.prepare_for_extend()
        self._forward(batch)
        return admitted

    def _admit(self) -> list[Req]:
        adder = PrefillAdder(
            self.params.page_size, self.tree, self.model.allocator, None, 0.5, self.model.tokens, self.chunk
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for request in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            request.init_next_round_input(self.tree)
            result = adder.add_one_req(request, self.chunked is not None, None)
            if result != AddReqResult.CONTINUE:
                if request not in adder.can_run_list:
                    self._take_back_state(request)
                break
        admitted: list[Req] = adder.can_run_list
        self.waiting = [each for each in self.waiting if each not in admitted]
        self.chunked = adder.new_chunked_req or self.chunked
        return admitted

    def _take_back_state(self, request: Req) -> None:
        request.kv.mamba_cow_src_index, request.kv.mamba_needs_clear = None, False
        if request.kv.holds_mamba:
            self.model.requests.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))
            request.kv.mamba_pool_idx = None

    def _forward(self, batch: ScheduleBatch) -> None:
        self.computed += sum(request.extend_end - request.prefix_len for request in batch.reqs)
        self.counter.set_consumer(batch.hicache_consumer_index)
        wrong = self.model.forward(batch)
        failed = self.tree.finish_external_linker_loads(batch.reqs)
        for request in batch.reqs:
            if request in failed:
                self._end(request, FINISH_ABORT("the load failed"))
            else:
                self.wrong += [each for each in wrong if each.request == request.rid]
                if request is not self.chunked:
                    request.output_ids.append(0)
                    self._end(request, FINISH_LENGTH(1))

    def _end(self, request: Req, reason: Any) -> None:
        aborted = isinstance(reason, FINISH_ABORT)
        (self.aborted if aborted else self.answered).append(request)
        request.finished_reason = reason
        release_kv_cache(request, self.tree, checkpoint=not aborted)
        if request is self.chunked:
            self.chunked = None

    def abort(self, request: Req) -> None:
        """A client goes: its request waits, or has a part of its prompt computed."""
        self.tree.release_aborted_request(request.cache_request_handle)
        if request in self.waiting:
            self.waiting.remove(request)
            self.aborted.append(request)
        else:
            self._end(request, FINISH_ABORT("aborted"))

    def flush(self) -> None:
        """`/flush_cache`, which SGLang allows where nothing runs."""
        self.tree.reset()
        self.model.requests.clear()
        self.model.allocator.clear()

    def evict(self) -> None:
        """Give up all that the device keeps for nobody."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        size = 1 << 20
        self.tree.evict(EvictParams(num_tokens=size, swa_num_tokens=size, mamba_num=size))

    @property
    def linker(self) -> HostLinker:
        return self.tree.linker.cache_linker

    @property
    def held_tokens(self) -> int:
        """Tokens that neither the free list nor the tree has: lost, where nothing runs."""
        allocator = self.model.allocator
        full = getattr(allocator, "full_attn_allocator", allocator)
        return self.model.tokens - full.available_size() - self.tree.full_evictable_size()


PROMPT = list(range(100, 150))
LONGER = [*PROMPT, 1]  # of states, there is one at the end of what was computed


@contextmanager
def evicted(kind: Kind, host_bytes: str = "1MiB", **options: Any) -> Iterator[Engine]:
    """An engine that has computed PROMPT, which the host alone has now."""
    with server_args(host_bytes=host_bytes) as args:
        engine = Engine(args, kind, **options)
        engine.run(PROMPT)
        engine.evict()
        yield engine
