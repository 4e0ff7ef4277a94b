"""Generation with a prefix cache, for any causal Hugging Face model with full attention. One request at a time.

It is an engine's KV cache manager in its smallest honest form. The life of a request:

    tokens -> keys              ChainHasher
    how much is on the device?  KVCacheCoordinator over the device's BlockPool       n0
    how much on the host?       HostTier.boundary                                    b >= n0
    load [n0, b)                into blocks of the device pool
    prefill [b, n)              in chunks; every full block is committed to the device pool under its key
    decode                      the same, a token at a time
    finish                      what the cache wants is stored; the blocks stay until the pool evicts them
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from connector.transformers.continuing import check_continues
from connector.transformers.host import CopierWrapper, HostTier
from connector.transformers.paged import BlockTable, PagedKV
from connector.transformers.past import ModelPast
from connector.transformers.working import WorkingState
from cpu_prefix_cache import (
    OFFLOAD_MODES,
    BlockPool,
    CacheStatistics,
    ChainHasher,
    ConfigurationError,
    Group,
    GroupKind,
    HybridChunkPlanner,
    KVCacheCoordinator,
    Pin,
    PooledDevice,
    PrefixCacheError,
    Request,
)


class PromptRefused(PrefixCacheError):
    """A prompt is empty, not of the model's tokens, or too long for the model or the device pool. The user acts."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Bytes are tokens: for models that come without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token % 256 for token in token_ids).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt. `device_hit_tokens + host_hit_tokens + computed_tokens == prompt_tokens`.

    `first_logits` are those of the first generated token, float32 [vocabulary]; `cuts` the token positions at which
    a prefill chunk ended, the last one being `prompt_tokens`.
    """

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    ttft_seconds: float
    cuts: tuple[int, ...]
    first_logits: torch.Tensor = field(repr=False)


@dataclass(slots=True)
class _Sequence:
    """A request while it runs: its tokens, its device blocks, and the pin on the deepest cached one of them."""

    request: Request
    tokens: list[int]
    keys: list[bytes]
    table: BlockTable
    parent: int
    pin: Pin | None
    touch: Any
    owned: list[int] = field(default_factory=list)  # blocks it writes and nobody else can find
    committed: int = 0  # chunks


class PrefixCachedGenerator:
    """Greedy generation whose shared prefixes are computed once.

    `device_blocks` blocks of `block_tokens` tokens each are the device pool; `host_bytes` bytes of host memory are
    the cache behind it (`offload`: lazy, eager or off; `policy`: see cpu_prefix_cache.POLICIES). Prefill runs in
    chunks that end on multiples of `prefill_tokens`. `prefix_caching=False` computes every prompt from its first
    token: the same engine, for comparison. Without a tokenizer bytes are tokens.

    Raises ConfigurationError, in a sentence that says what would work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        device_blocks: int,
        host_bytes: int = 0,
        offload: str = "lazy",
        policy: str = "lru",
        block_tokens: int = 16,
        prefill_tokens: int = 256,
        prefix_caching: bool = True,
        wrap_copier: CopierWrapper | None = None,
    ) -> None:
        if offload not in (*OFFLOAD_MODES, "off"):
            raise ConfigurationError(f"offload must be one of {', '.join(OFFLOAD_MODES)}, off; got {offload!r}")
        if device_blocks < 1:
            raise ConfigurationError(f"the device pool needs at least 1 block, got {device_blocks}")
        if block_tokens < 1 or prefill_tokens < 1 or prefill_tokens % block_tokens:
            raise ConfigurationError(
                f"prefill_tokens must be a multiple of the {block_tokens} tokens of a block, got {prefill_tokens}"
            )
        self.model = model.eval()
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.prefill_tokens = prefill_tokens
        self.max_model_len = _max_model_len(model)
        self.past = _full_attention(model)
        self.kv = PagedKV(self.past, device_blocks, block_tokens, model.device)
        check_continues(model, self.past)
        self.group = Group(
            name="attention", kind=GroupKind.PREFIX, block_tokens=block_tokens, block_bytes=self.kv.block_bytes
        )
        self.planner = HybridChunkPlanner([self.group], max_model_len=self.max_model_len)
        self.pool = BlockPool(device_blocks)
        self._coordinator = KVCacheCoordinator(self.planner, self.pool)
        self._hasher = ChainHasher(block_tokens)
        self._prefix_caching = prefix_caching
        self._host: HostTier | None = None
        if prefix_caching and offload != "off":
            self._host = HostTier(
                self.planner,
                PooledDevice(self.pool),
                [self.kv.tensors],
                host_bytes=host_bytes,
                offload=offload,
                policy=policy,
                # a load allocates up to a whole prompt in one step
                max_step_tokens=min(self.max_model_len, device_blocks * block_tokens),
                wrap_copier=wrap_copier,
            )
        self._served = 0

    def generate(self, prompts: Iterable[str | Sequence[int]], max_new_tokens: int = 16) -> Iterator[Generation]:
        """Answer prompts, texts or token ids, one after the other.

        Raises PromptRefused for a prompt that, with its answer, does not fit the model or the device pool.
        """
        for prompt in prompts:
            yield self.answer(prompt, max_new_tokens)

    @torch.inference_mode()
    def answer(
        self, prompt: str | Sequence[int], max_new_tokens: int = 16, cuts: Sequence[int] | None = None
    ) -> Generation:
        """Answer one prompt. `cuts` are the positions at which prefill chunks end, in place of the usual ones.

        Raises PromptRefused for a prompt that is empty, too long, or not of the model's tokens, and for cuts that do
        not ascend to its end.
        """
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(tokens)
        self._check_fits(len(tokens), max_new_tokens)
        if cuts is not None and (list(cuts) != sorted(set(cuts)) or cuts[-1:] != [len(tokens)]):
            raise PromptRefused(f"cuts must ascend and end at the prompt's {len(tokens)} tokens, got {list(cuts)}")
        begin = time.perf_counter()
        sequence, device_hit = self._admit(tokens)
        try:
            host_hit = self._load(sequence, device_hit)
            hit = sequence.table.length
            *ends, last = (end for end in cuts or self._usual_cuts(hit, len(tokens)) if end > hit)
            for end in ends:
                self._forward(sequence, end)
            logits = self._forward(sequence, last)
            generated = [int(logits.argmax())]
            ttft = time.perf_counter() - begin
            generated += self._decode(sequence, generated[0], max_new_tokens)
        finally:
            self._finish(sequence)
        return Generation(
            tokens=tuple(generated),
            text=self.tokenizer.decode(generated),
            prompt_tokens=len(tokens),
            device_hit_tokens=device_hit,
            host_hit_tokens=host_hit,
            computed_tokens=len(tokens) - hit,
            ttft_seconds=ttft,
            cuts=(*ends, last),
            first_logits=logits.float(),
        )

    def statistics(self) -> CacheStatistics | None:
        """What the host cache holds and has done; None without one."""
        return None if self._host is None else self._host.cache.statistics()

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocabulary = self.model.config.get_text_config().vocab_size
        if not tokens:
            raise PromptRefused("a prompt needs at least one token")
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
            raise PromptRefused(f"a prompt is a text or token ids from 0 to {vocabulary - 1}")

    def _check_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        asked = f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones"
        if max_new_tokens < 1:
            raise PromptRefused(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if prompt_tokens + max_new_tokens > self.max_model_len:
            raise PromptRefused(f"{asked} are more than the model's {self.max_model_len}")
        computed = prompt_tokens + max_new_tokens - 1  # the last token is never fed back
        needed = -(-computed // self.group.block_tokens)
        if needed > self.pool.capacity:
            raise PromptRefused(f"{asked} take {needed} device blocks, but the pool has {self.pool.capacity}")

    def _usual_cuts(self, begin: int, end: int) -> list[int]:
        first = begin - begin % self.prefill_tokens + self.prefill_tokens
        return [*range(first, end, self.prefill_tokens), end]

    def _admit(self, tokens: list[int]) -> tuple[_Sequence, int]:
        """Begin a request, on top of what the device still has of it. The request, and how many tokens that is."""
        keys = self._hasher.keys(tokens) if self._prefix_caching else []
        self._served += 1
        request = Request(f"request-{self._served}", keys, len(tokens))
        n0 = self._coordinator.longest_boundary(keys, 0, len(tokens))
        chunks = self.planner.full_chunks(n0)
        deepest = self.pool.find(keys[chunks - 1]) if chunks else None
        table = BlockTable(self.group.block_tokens)
        if deepest is not None:
            table.blocks = self.pool.path(deepest, chunks)
            table.length = n0
        pin = None if deepest is None else self.pool.pin(deepest)
        parent = self.pool.root if deepest is None else deepest
        sequence = _Sequence(
            request, list(tokens), keys, table, parent, pin, self.pool.touch(deepest), committed=chunks
        )
        return sequence, n0

    def _load(self, sequence: _Sequence, n0: int) -> int:
        """Bring what the host has beyond n0 to the device. How many tokens came."""
        if self._host is None:
            return 0
        boundary = self._host.boundary(sequence.request, n0)
        self._host.cache.admit(sequence.request, n0, boundary)
        if boundary == n0:
            return 0
        self._grow(sequence, boundary)
        if not self._host.load(sequence.request, boundary, sequence.table.blocks[self.planner.full_chunks(n0) :]):
            return 0  # what was to be loaded is computed, into the same blocks
        sequence.table.length = boundary
        self._commit(sequence)
        return boundary - n0

    def _forward(self, sequence: _Sequence, end: int) -> torch.Tensor:
        """Compute the tokens up to `end`. The logits of the last one."""
        table = sequence.table
        self._grow(sequence, end)
        table.begin_forward(end - table.length, self.model.device)
        positions = torch.arange(table.length, end, device=self.model.device)[None]
        output = self.model(
            torch.tensor([sequence.tokens[table.length : end]], device=self.model.device),
            position_ids=positions,  # some models count from 0 again without them
            past_key_values=WorkingState(self.past, self.kv, table).cache,
            use_cache=True,
            logits_to_keep=1,
        )
        table.end_forward()
        self._commit(sequence)
        if self._host is not None:
            self._host.computed(sequence.request.id, table.length)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _decode(self, sequence: _Sequence, token: int, max_new_tokens: int) -> list[int]:
        """The tokens after the first one."""
        generated: list[int] = []
        stops = _stop_tokens(self.model)
        while len(generated) < max_new_tokens - 1 and token not in stops:
            sequence.tokens.append(token)
            token = int(self._forward(sequence, len(sequence.tokens)).argmax())
            generated.append(token)
        return generated

    def _grow(self, sequence: _Sequence, num_tokens: int) -> None:
        """Give the request the blocks for its first `num_tokens` tokens."""
        missing = -(-num_tokens // self.group.block_tokens) - len(sequence.table.blocks)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            sequence.owned += blocks
            sequence.table.blocks += blocks

    def _commit(self, sequence: _Sequence) -> None:
        """Let others find the blocks that are full now.

        A chunk that is cached already (the last one of a prompt that ends on a boundary is always computed again)
        stays where it is: the request goes on with that block and gives up its own.
        """
        if not self._prefix_caching:
            return
        self._hasher.extend(sequence.keys, sequence.tokens)
        table, full = sequence.table, self.planner.full_chunks(sequence.table.length)
        for at in range(sequence.committed, full):
            key, block = sequence.keys[at], table.blocks[at]
            found = self.pool.find(key)
            sequence.owned.remove(block)
            if found is None:
                self.pool.commit([block], [key], sequence.parent, sequence.touch)
            else:
                self.pool.abort([block])
                table.blocks[at] = found
            sequence.parent = table.blocks[at]
        if full > sequence.committed:
            sequence.committed = full
            before, sequence.pin = sequence.pin, self.pool.pin(sequence.parent)
            if before is not None:
                self.pool.unpin(before)

    def _finish(self, sequence: _Sequence) -> None:
        try:
            if self._host is not None:
                self._host.finished(sequence.request.id, sequence.table.length)
        finally:
            if sequence.pin is not None:
                self.pool.unpin(sequence.pin)
            self.pool.abort(sequence.owned)


def _full_attention(model: PreTrainedModel) -> ModelPast:
    past = ModelPast(model)
    if len(past.full) < 2 * len(past.layers) or past.locals or past.states.num_bytes:
        raise ConfigurationError(f"{type(model).__name__} keeps windows or states, which is not built yet")
    return past


def _max_model_len(model: PreTrainedModel) -> int:
    length = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if not isinstance(length, int):
        raise ConfigurationError(f"the configuration of {type(model).__name__} does not say how long a prompt may be")
    return length


def _stop_tokens(model: PreTrainedModel) -> set[int]:
    config = model.generation_config
    eos = None if config is None else config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)
