"""Generation with a prefix cache, for any causal Hugging Face model. One request at a time.

A small but complete KV cache manager of an engine. The life of a request:

    tokens -> keys              ChainHasher
    device hit                  KVCacheCoordinator over the device's BlockPool       n0
    host hit                    HostCache.start                                      b >= n0
    load [n0, b)                into blocks of the device pool, allocated when there is something to load
    resume at b                 windows and states are copied out of the checkpoint at b
    prefill [b, n)              in chunks; every full block is committed to the device pool under its key, and where
                                the cache wants a checkpoint, a prefill chunk ends and the checkpoint is taken
    first token                 chosen as sampling.py says; then a checkpoint shortly before it, which was put off
    decode                      the same, a token at a time; only the latest checkpoint is kept
    finish                      the cache plans its last stores; the blocks stay until the pool evicts them

Before each forward pass the host cache copies, and the engine waits for it.
"""

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from connector.transformers.checkpoints import Checkpoints
from connector.transformers.continuing import Continuation, check_continues
from connector.transformers.forward import ForwardPass
from connector.transformers.identity import model_name, weights_revision
from connector.transformers.paged import BlockTable, PagedKV
from connector.transformers.past import ModelPast
from connector.transformers.prompts import Prompt, PromptRefused, each_prompt, one_prompt
from connector.transformers.sampling import Choice, Settings
from connector.transformers.working import WorkingState
from cpu_prefix_cache import (
    OFFLOAD_MODES,
    CacheStatistics,
    ChainHasher,
    ConfigurationError,
    HybridChunkPlanner,
    KVCacheCoordinator,
    MisuseError,
    Pin,
    PooledDevice,
    PoolExhausted,
    Thresholds,
)
from cpu_prefix_cache.host_cache import CopierWrapper, HostCache, HostStatistics, Loading, Wait
from cpu_prefix_cache.messages.errors import InternalError
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.pool.coordinator import new_pool
from cpu_prefix_cache.slab.settings import FileTier

OPENING = "opening"  # state of a tier
# So few tokens take hardly longer in one forward pass than in each of two. With two, after 2,048 known tokens and 32
# new ones, small models of Gemma 3, Qwen3.5 and Falcon-H1 took 1.3 to 1.4 times as long to the first token.
PUT_OFF_TOKENS = 32


class Tokenizer(Protocol):
    """The methods used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Each byte is a token. For models without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token % 256 for token in token_ids).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt. `device_hit_tokens + host_hit_tokens + computed_tokens == prompt_tokens`.

    Of the host hit the tier below had `tier_hit_tokens`, and the host had not.

    `first_logits` are those of the first generated token, float32 [vocabulary]. `cuts` are the token positions at
    which prefill chunks ended; the last one is `prompt_tokens`. `ttft_seconds` is the time to the first token.
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
    tier_hit_tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    """A running request: its tokens, its device blocks, and the pin on the deepest cached one of them.

    `kept` are the boundaries of its prompt at which checkpoints are taken; that at `put_off`, if there is one, after
    the first token. `latest` is the key of the chunk after which the latest checkpoint of its answer was taken.
    """

    id: str
    prompt_tokens: int
    tokens: list[int]
    keys: list[bytes]
    chunks: list[int]
    table: BlockTable
    state: WorkingState
    parent: int
    pin: Pin | None
    touch: Any
    filling: int | None = None  # the checkpoint that its load fills, not committed yet
    committed: int = 0  # chunks; it writes the others
    kept: frozenset[int] = frozenset()
    put_off: int | None = None
    latest: bytes | None = None


class PrefixCachedGenerator:
    """Generation whose shared prefixes are computed once.

    tokenizer             None: each byte is a token
    device_blocks         size of the device pool, in blocks of `block_tokens` tokens. Checkpoints take blocks too
    host_bytes            host memory of the cache behind it
    offload, policy       lazy, eager or off; one of cpu_prefix_cache.POLICIES
    store_after           a chunk is stored once so many prompts of at least `min_store_tokens` tokens had it
    prefill_tokens        prefill runs in chunks that end on multiples of this
    max_model_len         the most tokens of a prompt and its answer; needed for models that do not say it, like Mamba
    checkpoint_interval   if given, take a checkpoint every so many tokens, beside those the cache keeps anyway
    prefix_caching        False: every prompt is computed from its first token, for comparison
    wrap_copier           for tests: see HostCache
    below                 a tier of files for what the host cannot hold, also from before a restart (docs/tiers.md).
                          Without a `model` it gets the name of this one, and a digest of its weights as `revision`

    `close` it, or use it in a `with`: that gives its memory back. With a tier below it also writes what only the host
    has, and lets another process have the files.

    Raises ConfigurationError with a message that says what would work.
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
        store_after: int = 1,
        min_store_tokens: int = 0,
        block_tokens: int = 16,
        prefill_tokens: int = 256,
        max_model_len: int | None = None,
        checkpoint_interval: int | None = None,
        prefix_caching: bool = True,
        wrap_copier: CopierWrapper | None = None,
        below: FileTier | None = None,
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
        self.max_model_len = _max_model_len(model, max_model_len)
        self.past = ModelPast(model)
        self.continuation = check_continues(model, self.past)
        self.kv = PagedKV(self.past, device_blocks, block_tokens, model.device)
        self.planner = HybridChunkPlanner(self.kv.groups, max_model_len=self.max_model_len)
        self.pool = new_pool(self.planner, device_blocks, on_device=True)
        self._coordinator = KVCacheCoordinator(self.planner, self.pool, on_device=True)
        self._checkpoints = Checkpoints(self.past, self.kv, self._coordinator)
        self._compute = ForwardPass(model)
        self._is_closed = False
        self._has_tier = below is not None
        self._hasher = ChainHasher(block_tokens, "xxh3_128" if below is None else "sha256")
        self._checkpoint_interval = checkpoint_interval
        self._prefix_caching = prefix_caching
        self._host: HostCache | None = None
        self._last_statistics: HostStatistics | None = None
        if prefix_caching and offload != "off":
            if not host_bytes:
                raise ConfigurationError('host_bytes is 0; to use no host memory, set offload="off"')
            self._host = HostCache(
                PooledDevice(self.pool),
                self.kv.layout,
                host_bytes=host_bytes,
                max_model_len=self.max_model_len,
                # a load allocates up to a whole prompt in one step
                max_step_tokens=min(self.max_model_len, device_blocks * block_tokens),
                offload=offload,
                policy=policy,
                thresholds=Thresholds(store_after, min_store_tokens),
                checkpoint_interval=checkpoint_interval,
                wrap_copier=wrap_copier,
                below=None if below is None else _named(below, model),
            )
            self._host.prepare()
            _take_in(self._host)
        elif below is not None:
            raise ConfigurationError("a tier is below host memory: give host_bytes, and an offload other than off")
        self._served = 0

    def generate(
        self, prompts: Prompt | Iterable[Prompt], max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[Generation]:
        """Answer one prompt or several (see prompts.py), one after the other, each when it is asked for.

        The options are those of `answer`, which says what is raised.
        """
        settings = self._settings(max_new_tokens, **options)
        return (self._answer(prompt, settings) for prompt in each_prompt(prompts))

    def answer(
        self, prompt: Prompt, max_new_tokens: int | None = None, cuts: Sequence[int] | None = None, **options: Any
    ) -> Generation:
        """Answer one prompt. `cuts` replace the usual positions at which prefill chunks end.

        The options are those of `model.generate`: `generation_config`, `logits_processor`, `stopping_criteria`,
        `streamer`, and any setting of a GenerationConfig (`do_sample`, `temperature`, `stop_strings`, ...). What is not
        said is taken from the model's generation_config. And `seed`: the answer is then the one of `model.generate`
        after `torch.manual_seed(seed)`.

        Raises PromptRefused for a prompt that is empty, not of the model's tokens, or with its answer too long for the
        model or the device pool, and for cuts that do not ascend to the prompt's end. Raises ConfigurationError for
        settings that it cannot carry out, and MisuseError after `close`.
        """
        return self._answer(one_prompt(prompt), self._settings(max_new_tokens, **options), cuts)

    @torch.inference_mode()
    def _answer(self, prompt: str | list[int], settings: Settings, cuts: Sequence[int] | None = None) -> Generation:
        self._check_open()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._check_tokens(tokens)
        choice = settings.for_prompt(tokens)
        self._check_fits(len(tokens), choice.max_new_tokens)
        if cuts is not None and (list(cuts) != sorted(set(cuts)) or list(cuts[-1:]) != [len(tokens)]):
            raise PromptRefused(f"cuts must ascend and end at the prompt's {len(tokens)} tokens, got {list(cuts)}")
        choice.begin()
        begin = time.perf_counter()
        sequence, device_hit = self._admit(tokens)
        try:
            in_tier = self._tier_hits()
            host_hit = self._load(sequence, device_hit)
            in_tier = self._tier_hits() - in_tier
            hit = sequence.table.length
            ends = self._chunk_ends(sequence, cuts)
            first_logits, fork = self._prefill(sequence, ends)
            token = choice.choose(first_logits)
            ttft = time.perf_counter() - begin
            self._catch_up(sequence, fork)
            generated = [token, *self._decode(sequence, token, choice)]
        finally:
            self._finish(sequence)
        choice.end()
        return Generation(
            tokens=tuple(generated),
            text=self.tokenizer.decode(generated),
            prompt_tokens=len(tokens),
            device_hit_tokens=device_hit,
            host_hit_tokens=host_hit,
            computed_tokens=len(tokens) - hit,
            ttft_seconds=ttft,
            cuts=tuple(ends),
            first_logits=first_logits,
            tier_hit_tokens=in_tier,
        )

    def cuts_without_cache(self, generation: Generation) -> list[int]:
        """The cuts for `answer` in an engine without a cache, so that it computes the same prefill chunks."""
        hit = generation.prompt_tokens - generation.computed_tokens
        before = [end for end in self._usual_cuts(0, hit, frozenset([hit])) if end] if hit else []
        return [*before, *generation.cuts]

    def statistics(self) -> CacheStatistics | None:
        """Statistics of the host cache, after `close` its last ones; None without one."""
        statistics = self._host_statistics()
        return None if statistics is None else statistics.cache

    def tier_statistics(self) -> TierStatistics | None:
        """Statistics of the tier below the host cache; None without one."""
        statistics = self._host_statistics()
        return None if statistics is None else statistics.tier

    def reset(self) -> None:
        """Nothing cached before now is used again: the model has new weights, for example."""
        self._check_open()
        self.pool.reset()
        if self._host is not None:
            self._host.reset()

    def close(self) -> None:
        """Write to the tier what only the host has, and give the memory back. Nothing is generated any more.

        After an interrupt it may be called again.
        """
        if self._host is not None:
            self._host.close()
            self._last_statistics, self._host = self._host.statistics(), None
        self.kv.release()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise MisuseError("the generator is closed: make another one")

    def _settings(
        self,
        max_new_tokens: int | None,
        *,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Settings:
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        return Settings(
            self.model,
            self.tokenizer,
            generation_config,
            options,
            seed=seed,
            logits_processor=logits_processor or (),
            stopping_criteria=stopping_criteria or (),
            streamer=streamer,
        )

    def _host_statistics(self) -> HostStatistics | None:
        return self._last_statistics if self._host is None else self._host.statistics()

    def _tier_hits(self) -> int:
        tier = self.tier_statistics() if self._has_tier else None
        return 0 if tier is None else tier.hit_tokens

    def check(self, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Raise PromptRefused for a prompt, as token ids, that `answer` would refuse with so many new tokens."""
        self._check_tokens(tokens)
        self._check_fits(len(tokens), max_new_tokens)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocabulary = self.model.config.get_text_config().vocab_size
        if not tokens:
            raise PromptRefused("a prompt needs at least one token")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise PromptRefused(f"a prompt is a text or token ids from 0 to {vocabulary - 1}")

    def _check_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        asked = f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones"
        if max_new_tokens < 1:
            raise PromptRefused(
                f"max_new_tokens must be at least 1, got {max_new_tokens} (max_length counts the prompt's tokens too)"
            )
        if prompt_tokens + max_new_tokens > self.max_model_len:
            raise PromptRefused(f"{asked} are more than the model's {self.max_model_len}")
        computed = prompt_tokens + max_new_tokens - 1  # the last token is never fed back
        chunks = -(-computed // self.planner.grid_tokens)
        needed = chunks * self.planner.device_blocks_per_chunk + self._coordinator.num_blocks(chunks)
        if needed > self.pool.capacity:
            raise PromptRefused(f"{asked} take {needed} device blocks, but the pool has {self.pool.capacity}")

    def _usual_cuts(self, begin: int, end: int, kept: frozenset[int]) -> list[int]:
        """Where the chunks of a prefill of [begin, end) end. `kept` are the boundaries that get checkpoints."""
        if self.continuation is Continuation.TOKENS:
            # several tokens at once are possible only from position 0: up to the last checkpoint, then one by one
            once = max(kept, default=end) if begin == 0 else begin
            return [*([once] if begin == 0 else []), *range(once + 1, end + 1)]
        first = begin - begin % self.prefill_tokens + self.prefill_tokens
        return sorted({*range(first, end, self.prefill_tokens), end, *kept})

    def _admit(self, tokens: list[int]) -> tuple[_Sequence, int]:
        """Begin a request on its cached device blocks. Returns it, and the length of the device hit in tokens."""
        keys = self._hasher.keys(tokens) if self._prefix_caching else []
        self._served += 1
        n0 = self._coordinator.longest_boundary(keys, 0, len(tokens))
        chunks = self.planner.full_chunks(n0)
        node = self._coordinator.resume_node(keys, chunks) if chunks else None
        table = BlockTable(self.planner.grid_tokens)
        sequence = _Sequence(
            f"request-{self._served}",
            len(tokens),
            list(tokens),
            keys,
            path := self._path(keys, chunks),
            table,
            WorkingState(self.past, self.kv, table),
            parent=self.pool.root,
            pin=None if node is None else self.pool.pin(node),
            touch=self.pool.touch(node),
            committed=chunks,
        )
        if path:
            sequence.parent = path[-1]
            table.blocks, table.length = list(self.pool.blocks_of(path)), n0
        return sequence, n0

    def _path(self, keys: Sequence[bytes], chunks: int) -> list[int]:
        """The device's nodes of the first `chunks` chunks."""
        deepest = self.pool.find(keys[chunks - 1]) if chunks else None
        return [] if deepest is None else self.pool.path(deepest, chunks)

    def _load(self, sequence: _Sequence, n0: int) -> int:
        """Load what the host has beyond n0, and resume after it. Returns the number of loaded tokens."""
        boundaries: Sequence[int] = ()
        if self._host is not None:
            self._load_from(self._host, sequence, n0)
            boundaries = self._host.boundaries(sequence.id)
        self._resume(sequence)
        sequence.kept = frozenset(
            {depth * self.planner.grid_tokens for depth in self._wanted(sequence)}.union(boundaries)
        )
        return sequence.table.length - n0

    def _load_from(self, host: HostCache, sequence: _Sequence, n0: int) -> None:
        """If the load fails, what it was to bring is computed later, into the same blocks."""
        ask = partial(host.start, sequence.id, sequence.keys, sequence.prompt_tokens, n0, partial(self._room, sequence))
        while isinstance(answer := ask(), Wait):
            _copy(host)
        if not isinstance(answer, Loading):
            return
        sequence.table.length = dict(_copy(host))[sequence.id]
        self._commit(sequence)
        node, sequence.filling = sequence.filling, None
        if node is not None and sequence.table.length == answer.boundary:
            key = sequence.keys[self.planner.full_chunks(answer.boundary) - 1]
            self._checkpoints.commit(node, key, sequence.parent, sequence.touch)
        elif node is not None:
            self.pool.abort([node])

    def _room(self, sequence: _Sequence, n0: int, boundary: int) -> Sequence[Sequence[int]] | None:
        """Allocate what a load of [n0, boundary) fills, in the order of the groups; None if there is no room."""
        start, stop = self.planner.full_chunks(n0), self.planner.full_chunks(boundary)
        try:
            self._grow(sequence, boundary)
        except PoolExhausted:  # the checkpoint at n0 stays pinned until it is restored, and takes too much of the pool
            return None
        if self._checkpoints.are_needed(boundary):
            sequence.filling = self._checkpoints.make_room(sequence.keys, n0, boundary)
            if sequence.filling is None:
                return None
        return self._coordinator.destinations(sequence.chunks[start:stop], start, stop, sequence.filling)

    def _resume(self, sequence: _Sequence) -> None:
        """Restore windows and states of the request at the end of its hit."""
        length = sequence.table.length
        if not length:
            return
        node = self._coordinator.resume_node(sequence.keys, self.planner.full_chunks(length))
        if node is None:
            raise InternalError("a request is to resume where the device has nothing to resume from")
        self._checkpoints.restore(sequence.state, node, length)
        self._pin(sequence, sequence.parent)  # the checkpoint is copied and may be evicted

    def _wanted(self, sequence: _Sequence) -> frozenset[int]:
        """The depths in chunks at which the device pool itself wants a checkpoint of the prompt."""
        if not self.planner.has_checkpoints:
            return frozenset()
        return frozenset(
            self._coordinator.wanted_checkpoints(
                sequence.keys, sequence.table.length, sequence.prompt_tokens, self._checkpoint_interval
            )
        )

    def _forward(self, sequence: _Sequence, end: int) -> torch.Tensor:
        """Compute the tokens up to `end`. Returns the logits of the last one."""
        table = sequence.table
        if self._host is not None:
            _copy(self._host)  # first, because what is allocated may have to be stored before
        self._grow(sequence, end)
        logits = self._run(sequence, sequence.state, table, end)
        self._commit(sequence)
        self._take_checkpoint(sequence)
        self._report(sequence)
        return logits[-1].float()

    def _run(self, sequence: _Sequence, state: WorkingState, table: BlockTable, end: int) -> torch.Tensor:
        """Continue `state` with the tokens of the request up to `end`."""
        ids = torch.tensor([sequence.tokens[table.length : end]], device=self.model.device)
        table.begin_forward(end - table.length, ids.device)
        logits = self._compute(ids, table.length, state.cache, last_only=True)
        table.end_forward()
        return logits

    def _report(self, sequence: _Sequence) -> None:
        """Tell the host what is computed. A boundary is told once its checkpoint is there."""
        if self._host is not None:
            told = sequence.table.length if sequence.put_off is None else sequence.put_off - 1
            self._host.end_step({sequence.id: min(told, sequence.table.length)})

    def _chunk_ends(self, sequence: _Sequence, cuts: Sequence[int] | None) -> list[int]:
        """Where the chunks of the request's prefill end. Decides whether its last checkpoint is put off.

        A chunk that ends there would delay the first token by a forward pass. Where few tokens are left, they are
        computed at once instead, and after the first token a second time up to the checkpoint.
        """
        begin = sequence.table.length
        usual = self._usual_cuts(begin, sequence.prompt_tokens, sequence.kept)
        ends = [end for end in cuts or usual if end > begin]
        may_be = cuts is None and self.continuation is Continuation.CHUNKS
        is_next = len(ends) > 1 and ends[-2] in sequence.kept
        if may_be and is_next and ends[-1] - [begin, *ends][-3] <= PUT_OFF_TOKENS:
            sequence.put_off = ends.pop(-2)
        return ends

    def _prefill(
        self, sequence: _Sequence, ends: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[WorkingState, BlockTable] | None]:
        """Compute the prompt in chunks. Returns the logits of its last token, and what `_catch_up` begins with."""
        for end in ends[:-1]:
            self._forward(sequence, end)
        fork = None if sequence.put_off is None else sequence.state.fork()
        return self._forward(sequence, ends[-1]), fork

    def _catch_up(self, sequence: _Sequence, fork: tuple[WorkingState, BlockTable] | None) -> None:
        """Take the checkpoint that was put off, from a fork of the request at the position before it."""
        boundary, sequence.put_off = sequence.put_off, None
        if fork is None or boundary is None:
            return
        state, table = fork
        self._run(sequence, state, table, boundary)
        chunk = self.planner.full_chunks(boundary) - 1
        node = self._checkpoints.take(state, sequence.keys, boundary)
        if node is not None:
            self._checkpoints.commit(node, sequence.keys[chunk], sequence.chunks[chunk], sequence.touch)
        self._report(sequence)

    def _decode(self, sequence: _Sequence, token: int, choice: Choice) -> Iterator[int]:
        """Generate the tokens after the first one, `token`."""
        while not choice.is_over:
            sequence.tokens.append(token)
            token = choice.choose(self._forward(sequence, len(sequence.tokens)))
            yield token

    def _grow(self, sequence: _Sequence, num_tokens: int) -> None:
        """Allocate the missing blocks for the first `num_tokens` tokens of the request."""
        missing = -(-num_tokens // self.planner.grid_tokens) - len(sequence.chunks)
        if missing > 0:
            chunks = self.pool.allocate(missing)
            sequence.chunks += chunks
            sequence.table.blocks += self.pool.blocks_of(chunks)

    def _commit(self, sequence: _Sequence) -> None:
        """Commit the chunks that are full now under their keys.

        If a chunk is cached already, the request uses the cached one and frees its own. (The last chunk of a prompt
        that ends on a boundary is always computed again.)
        """
        if not self._prefix_caching:
            return
        self._hasher.extend(sequence.keys, sequence.tokens)
        full = self.planner.full_chunks(sequence.table.length)
        if full == sequence.committed:
            return
        while sequence.committed < full and self._share(sequence, sequence.committed):
            sequence.committed += 1
        begin, sequence.committed = sequence.committed, full
        if begin < full:
            parent = sequence.chunks[begin - 1] if begin else self.pool.root
            self.pool.commit(sequence.chunks[begin:full], sequence.keys[begin:full], parent, sequence.touch)
        sequence.parent = sequence.chunks[full - 1]
        self._pin(sequence, sequence.parent)

    def _share(self, sequence: _Sequence, at: int) -> bool:
        """Replace chunk `at` of the request by the cached one with its key, if there is one."""
        found = self.pool.find(sequence.keys[at])
        if found is None:
            return False
        self.pool.abort([sequence.chunks[at]])
        sequence.chunks[at] = found
        sequence.table.blocks[at : at + 1] = self.pool.blocks_of([found])
        return True

    def _pin(self, sequence: _Sequence, node: int) -> None:
        before, sequence.pin = sequence.pin, self.pool.pin(node)
        if before is not None:
            self.pool.unpin(before)

    def _take_checkpoint(self, sequence: _Sequence) -> None:
        """Take a checkpoint here, if one is wanted. In the answer, each new checkpoint replaces the one before."""
        length = sequence.table.length
        answers = length >= sequence.prompt_tokens
        if not self._prefix_caching or not self._checkpoints.are_needed(length):
            return
        if length not in sequence.kept and not answers:
            return
        key = sequence.keys[self.planner.full_chunks(length) - 1]
        taken = self._checkpoints.take(sequence.state, sequence.keys, length)
        is_new = taken is not None and self._checkpoints.commit(taken, key, sequence.parent, sequence.touch)
        if answers:
            if sequence.latest is not None:
                self._checkpoints.drop(sequence.latest)
            sequence.latest = key if is_new else None

    def _finish(self, sequence: _Sequence) -> None:
        try:
            if self._host is not None:
                self._host.end(sequence.id, sequence.table.length)
                _copy(self._host)
        finally:
            if sequence.pin is not None:
                self.pool.unpin(sequence.pin)
            self.pool.abort(sequence.chunks[sequence.committed :])
            if sequence.filling is not None:
                self.pool.abort([sequence.filling])


def _copy(host: HostCache) -> list[tuple[Hashable, int]]:
    """A step of the host cache and the end of all its copies. The loads that have ended, as from `HostCache.wait`."""
    try:
        host.begin_step()
    finally:  # also after an interrupt, wait for the transfers and resolve them
        ended = host.wait()
    return ended


def _take_in(host: HostCache) -> None:
    """Wait until a tier has told all that it holds from before, so that the first prompt finds it."""
    while (tier := host.statistics().tier) is not None and tier.state == OPENING:
        _copy(host)


def _named(below: FileTier, model: PreTrainedModel) -> FileTier:
    """The tier of this model, unless it is said whose it is."""
    return below if below.model else replace(below, model=model_name(model), revision=weights_revision(model))


def _max_model_len(model: PreTrainedModel, given: int | None) -> int:
    config, name = model.config.get_text_config(), "max_position_embeddings"
    said = config.to_dict().get(config.attribute_map.get(name, name))
    longest = said if given is None else given
    if longest is None:
        raise ConfigurationError(
            f"the configuration of {type(model).__name__} does not say how long a prompt may be: give max_model_len"
        )
    if longest < 1 or (said is not None and longest > said):
        raise ConfigurationError(f"max_model_len must be from 1 to {said or 'any number'}, got {given}")
    return int(longest)
