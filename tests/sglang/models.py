"""Models of SGLang in miniature: its own pools on a CPU, and a forward pass whose KV is a pattern of all tokens before.

Every layer keeps [a hash of all tokens up to it, the number of the layer] of each token, so that each byte that a layer
reads names its prompt, position and layer. A state is the value of the last token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

FULL, WINDOW, STATE = "full", "window", "state"
DTYPE = torch.int64
WINDOW_TOKENS = 8
MAX_REQUESTS, MAX_CONTEXT = 16, 512
HEADS = {"head_num": 1, "head_dim": 2}
COMMON = {"dtype": DTYPE, "device": "cpu"}


@dataclass(frozen=True)
class Kind:
    """Which layers a model has, and in pages of how many tokens SGLang keeps their KV."""

    layers: tuple[str, ...]
    page_tokens: int = 4
    mla: bool = False

    def of(self, kind: str) -> list[int]:
        return [layer for layer, each in enumerate(self.layers) if each == kind]


# States are kept at any boundary only in pages of one token: SGLang asks for that, where it keeps no second state.
KINDS = {
    "full": Kind((FULL,) * 3),
    "mla": Kind((FULL,) * 3, mla=True),
    "window": Kind((WINDOW, FULL, WINDOW, FULL)),
    "state": Kind((STATE, STATE, FULL, STATE), page_tokens=1),
    "all": Kind((WINDOW, STATE, FULL, STATE), page_tokens=1),
}


@dataclass
class Wrong:
    """Bytes that a layer read and that are not those of the tokens before."""

    request: str
    layer: int
    positions: list[int]


@dataclass
class Model:
    kind: Kind
    tokens: int = 128
    pool: KVCache = field(init=False)
    allocator: BaseTokenToKVPoolAllocator = field(init=False)
    requests: ReqToTokenPool = field(init=False)

    def __post_init__(self) -> None:
        self.requests = self._requests()
        self.pool = self._pool()
        sizes = {"page_size": self.kind.page_tokens, "need_sort": False, "kvcache": self.pool, **COMMON}
        if self.kind.of(WINDOW):
            self.allocator = SWATokenToKVPoolAllocator(self.tokens, self.tokens // 2, **sizes)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(self.tokens, **sizes)

    def _requests(self) -> ReqToTokenPool:
        if not self.kind.of(STATE):
            return ReqToTokenPool(MAX_REQUESTS, MAX_CONTEXT, "cpu", False)
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=1, state_size=2, conv_kernel=2
        )
        states = Mamba2CacheParams(
            shape=shape, dtype=Mamba2StateDType(conv=DTYPE, temporal=DTYPE), layers=self.kind.of(STATE)
        )
        return HybridReqToTokenPool(
            size=MAX_REQUESTS,
            mamba_size=2 * MAX_REQUESTS,
            mamba_spec_state_size=MAX_REQUESTS,
            max_context_len=MAX_CONTEXT,
            device="cpu",
            enable_memory_saver=False,
            cache_params=states,
            mamba_layer_ids=self.kind.of(STATE),
            enable_mamba_extra_buffer=False,
        )

    def _pool(self) -> KVCache:
        full, sizes = self.kind.of(FULL), {"page_size": self.kind.page_tokens, **COMMON}
        if self.kind.of(WINDOW):
            return SWAKVPool(
                self.tokens,
                self.tokens // 2,
                swa_attention_layer_ids=self.kind.of(WINDOW),
                full_attention_layer_ids=full,
                **HEADS,
                **sizes,
            )
        if self.kind.of(STATE):
            return HybridLinearKVPool(
                self.tokens,
                full_attention_layer_ids=full,
                mamba_pool=self.requests.mamba_pool,
                **HEADS,
                **sizes,
            )
        sizes |= {"layer_num": len(full), "enable_memory_saver": False}
        if self.kind.mla:
            return MLATokenToKVPool(self.tokens, kv_lora_rank=2, qk_rope_head_dim=2, **sizes)
        return MHATokenToKVPool(self.tokens, **HEADS, **sizes)

    # Forward

    def forward(self, batch: ScheduleBatch) -> list[Wrong]:
        """All layers, one after the other; what a layer reads is there only when its load has ended."""
        if batch.mamba_clear_indices is not None:
            self.requests.mamba_pool.clear_slots(batch.mamba_clear_indices)
        if batch.mamba_cow_src_indices is not None:
            self.requests.copy_mamba_state(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)
        return [wrong for layer in range(len(self.kind.layers)) for wrong in self._layer(layer, batch.reqs)]

    def _layer(self, layer: int, requests: Sequence[Req]) -> Iterator[Wrong]:
        run = self._state if self.kind.layers[layer] == STATE else self._attention
        for request in requests:
            positions = run(layer, request, pattern(request.get_fill_ids()[: request.extend_end], layer))
            if positions:
                yield Wrong(request.rid, layer, positions)

    def _attention(self, layer: int, request: Req, wanted: torch.Tensor) -> list[int]:
        windowed = self.kind.layers[layer] == WINDOW
        rows = self.requests.req_to_token[request.kv.req_pool_idx, : len(wanted)].to(torch.int64)
        rows = self.allocator.translate_loc_from_full_to_swa(rows) if windowed else rows
        known = request.prefix_len
        first = max(0, known - WINDOW_TOKENS) if windowed else 0
        different: set[int] = set()
        for buffer in self._buffers(layer):
            read = buffer[rows[first:known], 0, :2]
            different.update((read != wanted[first:known]).any(dim=1).nonzero().flatten().add(first).tolist())
            buffer[rows[known:], 0, :2] = wanted[known:]
        return sorted(different)

    def _buffers(self, layer: int) -> list[torch.Tensor]:
        keys = self.pool.get_key_buffer(layer)
        return [keys] if self.kind.mla else [keys, self.pool.get_value_buffer(layer)]

    def _state(self, layer: int, request: Req, wanted: torch.Tensor) -> list[int]:
        state = self.requests.mamba2_layer_cache(layer)
        slot, known = int(request.kv.mamba_pool_idx), request.prefix_len
        tensors = [tensor[slot].flatten() for tensor in (state.temporal, *state.conv)]
        before = wanted[known - 1] if known else torch.zeros(2, dtype=DTYPE)
        wrong = any(not torch.equal(tensor[:2], before) for tensor in tensors)
        for tensor in tensors:
            tensor[:2] = wanted[-1]
        return [known] if wrong else []


def pattern(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """[a hash of all tokens so far, the layer] of each token."""
    value, values = 1, []
    for token in tokens:
        value = (value * 6364136223846793005 + 2 * token + 1) % (1 << 61)
        values.append([value, layer])
    return torch.tensor(values, dtype=DTYPE).reshape(-1, 2)
