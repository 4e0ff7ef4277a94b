"""Generation with a prefix cache, for any causal Hugging Face model.

A small but complete KV cache manager of an engine. Prompts are taken in batches: each is prefilled by itself, and then
they decode together. The life of a request:

    tokens -> keys              ChainHasher
    device hit                  KVCacheCoordinator over the device's BlockPool       n0
    host hit                    HostCache.start                                      b >= n0
    load [n0, b)                into blocks of the device pool, allocated when there is something to load
    resume at b                 windows and states are copied out of the checkpoint at b
    prefill [b, n)              in chunks; every full block is committed to the device pool under its key, and where
                                the cache wants a checkpoint, a prefill chunk ends and the checkpoint is taken
    first token                 chosen by sampling.py; only then the last blocks of the prompt are committed, and a
                                checkpoint shortly before it is taken, which was put off
    decode                      the same, a token at a time, with those of the batch whose answers go on, as rows of one
                                WorkingState; only the latest checkpoint is kept
    finish                      with the batch: the cache plans its last stores; the blocks stay until they are evicted

Before each forward pass the host cache copies, and the engine waits for it.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from connector.transformers.changes import Weights
from connector.transformers.checkpoints import PUT_OFF_TOKENS, PastCheckpoints
from connector.transformers.continuing import Continuation, check_continues, check_decodes_together
from connector.transformers.forward import ForwardPass
from connector.transformers.identity import Revisions, longest, named
from connector.transformers.paged import PagedKV
from connector.transformers.past import ModelPast
from connector.transformers.prompts import Prompt, PromptReader, PromptRefused, placeholders
from connector.transformers.rows import BlockTable
from connector.transformers.sampling import SamplingSettings, TokenChooser, check_configuration
from connector.transformers.steps import copy_all, take_in
from connector.transformers.versions import warn_if_untested
from connector.transformers.whole_numbers import check_whole, num_bytes
from connector.transformers.working import WorkingState
from cpu_prefix_cache import (
    OFFLOAD_MODES,
    ChainHasher,
    ConfigurationError,
    CopierWrapper,
    FileTier,
    Hit,
    HostCache,
    HostStatistics,
    MisuseError,
    Pending,
    SharedTier,
    Thresholds,
)
from cpu_prefix_cache.deciding import (
    CacheStatistics,
    HybridChunkPlanner,
    InternalError,
    KVCacheCoordinator,
    Pin,
    PooledDevice,
    PoolExhausted,
    new_pool,
)
from cpu_prefix_cache.tier import TierStatistics


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
    which prefill chunks ended; the last one is `prompt_tokens`. `ttft_seconds` is the time to the first token from when
    the request was admitted.
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt that can be answered, as token ids, and what decides its answer."""

    tokens: list[int]
    choice: TokenChooser


@dataclass(slots=True)
class _Sequence:
    """A running request: its tokens, its device blocks, and the pin on the deepest cached one of them.

    `last` is the token chosen last, which is not computed yet. `answer` has no tokens before the batch ends.

    `kept` are the boundaries of its prompt at which checkpoints are taken; that at `put_off`, if there is one, after
    the first token. `latest` is the key of the chunk after which the latest checkpoint of its answer was taken.
    """

    id: str
    choice: TokenChooser
    prompt_tokens: int
    tokens: list[int]
    keys: list[bytes]
    chunks: list[int]
    table: BlockTable
    parent: int
    pin: Pin | None
    touch: Any
    last: int = 0
    answer: Generation | None = None
    filling: int | None = None  # the checkpoint that its load fills, not committed yet
    committed: int = 0  # chunks; it writes the others
    resets: int = 0  # of the generator, when it was admitted: what it computes since another one is not cached
    kept: frozenset[int] = frozenset()
    put_off: int | None = None
    latest: bytes | None = None


class PrefixCachedGenerator:
    """Generation whose shared prefixes are computed once.

    tokenizer             None: each byte is a token
    device_blocks         size of the device pool, in blocks of `block_tokens` tokens. Checkpoints take blocks too
    host_bytes            host memory of the cache behind it, in bytes or as a text: "2GiB"
    offload, policy       lazy, eager or off; one of cpu_prefix_cache.POLICIES
    store_after           a chunk is stored once so many prompts of at least `min_store_tokens` tokens had it
    prefill_tokens        prefill runs in chunks that end on multiples of this
    batch_size            `generate` decodes so many requests together, or as many as the device pool has room for
    max_model_len         the most tokens of a prompt and its answer; needed for models without one, like Mamba
    checkpoint_interval   if given, take a checkpoint every so many tokens, beside those the cache keeps anyway
    prefix_caching        False: every prompt is computed from its first token, for comparison
    wrap_copier           for tests: see HostCache
    below                 a tier for what the host cannot hold, of files or of a store that is shared (docs/tiers.md).
                          Without a `model` it gets the name of this one, and a digest of its weights as `revision`

    Threads may share it: it answers one batch at a time, and another thread waits for its turn. Statistics
    are read without waiting.

    `close` it, or use it in a `with`: that gives its memory back. With a tier below it also writes what only the host
    has, and lets another process have the files.

    Raises ConfigurationError with a message that names the remedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        device_blocks: int,
        host_bytes: int | str = 0,
        offload: str = "lazy",
        policy: str = "lru",
        store_after: int = 1,
        min_store_tokens: int = 0,
        block_tokens: int = 16,
        prefill_tokens: int = 256,
        batch_size: int = 1,
        max_model_len: int | None = None,
        checkpoint_interval: int | None = None,
        prefix_caching: bool = True,
        wrap_copier: CopierWrapper | None = None,
        below: FileTier | SharedTier | None = None,
    ) -> None:
        if offload not in (*OFFLOAD_MODES, "off"):
            raise ConfigurationError(f"offload must be one of {', '.join(OFFLOAD_MODES)}, off; got {offload!r}")
        check_whole(
            device_blocks=device_blocks,
            store_after=store_after,
            min_store_tokens=min_store_tokens,
            block_tokens=block_tokens,
            prefill_tokens=prefill_tokens,
            batch_size=batch_size,
            max_model_len=max_model_len,
            checkpoint_interval=checkpoint_interval,
        )
        host_bytes = num_bytes("host_bytes", host_bytes)
        if device_blocks < 1:
            raise ConfigurationError(f"the device pool needs at least 1 block, got {device_blocks}")
        if block_tokens < 1 or prefill_tokens < 1 or prefill_tokens % block_tokens:
            raise ConfigurationError(
                f"prefill_tokens must be a multiple of the {block_tokens} tokens of a block, got {prefill_tokens}"
            )
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, got {batch_size}")
        warn_if_untested()
        check_configuration(model)
        self.model = model.eval()
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.prefill_tokens = prefill_tokens
        self.batch_size = batch_size
        self.max_model_len = longest(model, max_model_len)
        self.past = ModelPast(model)
        self.continuation = check_continues(model, self.past, self.max_model_len)
        if batch_size > 1:
            check_decodes_together(model, self.past)
        self.kv = PagedKV(self.past, device_blocks, block_tokens, model.device)
        self.planner = HybridChunkPlanner(self.kv.groups, max_model_len=self.max_model_len)
        self.pool = new_pool(self.planner, device_blocks, on_device=True)
        self._coordinator = KVCacheCoordinator(self.planner, self.pool, on_device=True)
        self._checkpoints = PastCheckpoints(self.past, self.kv, self._coordinator)
        self._compute = ForwardPass(model)
        self._placeholders = placeholders(model.config.to_dict())
        self._dtype = model.dtype
        self._lock = threading.RLock()  # of one thread at a time: its processors may ask for another answer
        self._is_closed = False
        self._has_tier = below is not None
        tier = None if below is None else named(below, model)
        self._revisions = Revisions(model, tier)
        self._hasher = ChainHasher(block_tokens, "xxh3_128" if below is None else "sha256")
        self._checkpoint_interval = checkpoint_interval
        self._prefix_caching = prefix_caching
        self._host: HostCache | None = None
        self._last_statistics: HostStatistics | None = None
        if prefix_caching and offload != "off":
            if not host_bytes:
                raise ConfigurationError('host_bytes is 0; to use no host memory, set offload="off"')
            self._host = HostCache(
                PooledDevice(self.pool, hands_out_first=True),
                self.kv.layout,
                host_bytes=host_bytes,
                max_model_len=self.max_model_len,
                # a load allocates up to a whole prompt in one step, and decode a block for each request
                max_step_tokens=min(max(self.max_model_len, batch_size * block_tokens), device_blocks * block_tokens),
                offload=offload,
                policy=policy,
                thresholds=Thresholds(store_after, min_store_tokens),
                checkpoint_interval=checkpoint_interval,
                wrap_copier=wrap_copier,
                below=tier,
            )
            self._host.prepare()
            take_in(self._host)
        elif below is not None:
            raise ConfigurationError("a tier is below host memory: give host_bytes, and an offload other than off")
        self._weights = Weights(model, self.reset)
        self._resets = 0
        self._served = 0

    def generate(
        self, prompts: Prompt | Iterable[Prompt] | None = None, max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[Generation]:
        """Answer one prompt or several (see prompts.py) in their order, `batch_size` of them whenever one is requested.

        The options are those of `answer`, which lists its errors; but several requests that are decoded together
        have no streamer. What is raised for a prompt comes after the answers to those before it.
        """
        if self.batch_size > 1 and options.get("streamer") is not None:
            raise ConfigurationError(
                f"a streamer hears one answer, and this generator decodes {self.batch_size} together: leave it out, "
                "set batch_size to 1, or call answer"
            )
        settings = self._settings(max_new_tokens, **options)
        return self._in_batches(self._asked(prompt, settings) for prompt in self._reader(settings).each(prompts))

    def answer(
        self,
        prompt: Prompt | None = None,
        max_new_tokens: int | None = None,
        cuts: Sequence[int] | None = None,
        **options: Any,
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
        settings = self._settings(max_new_tokens, **options)
        asked = self._asked(self._reader(settings).one(prompt), settings)
        if cuts is not None and (list(cuts) != sorted(set(cuts)) or list(cuts[-1:]) != [len(asked.tokens)]):
            raise PromptRefused(
                f"cuts must ascend and end at the prompt's {len(asked.tokens)} tokens, got {list(cuts)}"
            )
        [answer] = self._answer_together([asked], cuts)
        return answer

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
        """Nothing cached before now is used again. New weights need no call: they are noticed (changes.py)."""
        with self._lock:
            self._check_open()
            revision = self._revisions.renewed()
            self.pool.reset()
            self._resets += 1
            self._weights = Weights(self.model, self.reset)
            if self._host is not None:
                self._host.reset(revision)

    def close(self) -> None:
        """Write to the tier what only the host has, and give the memory back. Nothing is generated any more.

        After an interrupt it may be called again.
        """
        with self._lock:
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

    def _check_not_cast(self) -> None:
        if self.model.dtype != self._dtype:
            raise MisuseError(
                f"the model was cast to {self.model.dtype} after the generator was made, which holds {self._dtype}: "
                "make another generator"
            )

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
    ) -> SamplingSettings:
        check_whole(seed=seed)
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        return SamplingSettings(
            self.model,
            self.tokenizer,
            generation_config,
            options,
            seed=seed,
            logits_processor=logits_processor or (),
            stopping_criteria=stopping_criteria or (),
            streamer=streamer,
        )

    def _reader(self, settings: SamplingSettings) -> PromptReader:
        return PromptReader(settings.padding, self._ignores_zeros)

    def _ignores_zeros(self, name: str) -> bool:
        with self._lock:
            return self._compute.ignores_zeros(name)

    def _host_statistics(self) -> HostStatistics | None:
        host = self._host  # without the lock, which a batch holds; `close` may take the host away
        return self._last_statistics if host is None else host.statistics()

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
        if found := self._placeholders.keys() & set(tokens):
            names = ", ".join(sorted(self._placeholders[token] for token in found))
            raise PromptRefused(
                f"the prompt has tokens that stand for other input ({names} of the model's configuration), and this "
                "generator answers from token ids alone: use model.generate for it"
            )
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
        chunks = self._chunks(prompt_tokens, max_new_tokens)
        needed = chunks * self.planner.device_blocks_per_chunk + self._coordinator.num_blocks(chunks)
        if needed > self.pool.capacity:
            raise PromptRefused(f"{asked} take {needed} device blocks, but the pool has {self.pool.capacity}")

    def _chunks(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """The chunks of a prompt and its answer, whose last token is never computed."""
        return -(-(prompt_tokens + max_new_tokens - 1) // self.planner.grid_tokens)

    def _asked(self, prompt: str | list[int], settings: SamplingSettings) -> _Asked:
        with self._lock:  # for the tokenizer, too
            self._check_open()
            self._check_not_cast()
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self._check_tokens(tokens)
            choice = settings.for_prompt(tokens)
            self._check_fits(len(tokens), choice.max_new_tokens)
            return _Asked(tokens, choice)

    def _in_batches(self, prompts: Iterator[_Asked]) -> Iterator[Generation]:
        """Answer `prompts`. An error that ends them is raised after the answers to those before it."""
        waiting: list[_Asked] = []
        error: Exception | None = None
        while True:
            try:
                while len(waiting) < self.batch_size:
                    waiting.append(next(prompts))
            except StopIteration:
                pass
            except Exception as each:
                error = each
            if not waiting:
                break
            answers = self._answer_together(waiting)
            waiting = waiting[len(answers) :]
            yield from answers
        if error is not None:
            raise error

    def _answer_together(self, asked: Sequence[_Asked], cuts: Sequence[int] | None = None) -> list[Generation]:
        """Answer the first of these prompts, and with it as many of the next ones as the device pool has room for."""
        with self._lock, torch.inference_mode():
            self._check_open()
            if self._prefix_caching:
                self._weights.follow()
            return self._answer_first(asked, cuts)

    def _answer_first(self, asked: Sequence[_Asked], cuts: Sequence[int] | None) -> list[Generation]:
        running: list[_Sequence] = []
        pasts: list[tuple[WorkingState, int]] = []
        with ExitStack() as stack:
            for each in asked:
                begin = time.perf_counter()
                sequence = self._admit(each)
                stack.callback(self._release, sequence)
                if running and not self._has_room([*running, sequence]):
                    break
                stack.callback(self._end_on_host, sequence)
                running.append(sequence)
                pasts.append((self._begin(sequence, cuts, begin), 0))
            self._decode(running, pasts)
        return [self._end(sequence) for sequence in running]

    def _has_room(self, sequences: Sequence[_Sequence]) -> bool:
        """Whether the pool has room for the longest answers of all, and for a checkpoint that the last one loads."""
        if self._host is not None:
            copy_all(self._host)  # until then, blocks are held that are being stored
        chunks = [self._chunks(each.prompt_tokens, each.choice.max_new_tokens) for each in sequences]
        missing = sum(chunks) - sum(len(each.chunks) for each in sequences)
        wanted = missing * self.planner.device_blocks_per_chunk + self._coordinator.num_blocks(chunks[-1])
        return self.pool.num_available >= wanted

    def _begin(self, sequence: _Sequence, cuts: Sequence[int] | None, begin: float) -> WorkingState:
        """Compute the prompt of a request that came at `begin`, up to its first token. Returns its past."""
        state = WorkingState(self.past, self.kv, sequence.table)
        choice, device_hit = sequence.choice, sequence.table.length
        choice.begin()
        in_tier = self._tier_hits()
        host_hit = self._load(sequence, state, device_hit)
        in_tier = self._tier_hits() - in_tier
        ends = self._chunk_ends(sequence, cuts)
        first_logits, fork = self._prefill(sequence, state, ends)
        sequence.last = choice.choose(first_logits)
        sequence.answer = Generation(
            tokens=(),
            text="",
            prompt_tokens=sequence.prompt_tokens,
            device_hit_tokens=device_hit,
            host_hit_tokens=host_hit,
            computed_tokens=sequence.prompt_tokens - device_hit - host_hit,
            ttft_seconds=time.perf_counter() - begin,
            cuts=tuple(ends),
            first_logits=first_logits,
            tier_hit_tokens=in_tier,
        )
        self._settle(state, [sequence])
        self._catch_up(sequence, fork)
        return state

    def _end(self, sequence: _Sequence) -> Generation:
        """The answer of a request that has ended."""
        if sequence.answer is None:
            raise InternalError("a request ended before its first token")
        sequence.choice.end()
        tokens = sequence.choice.chosen
        return replace(sequence.answer, tokens=tokens, text=self.tokenizer.decode(tokens))

    def _usual_cuts(self, begin: int, end: int, kept: frozenset[int]) -> list[int]:
        """Where the chunks of a prefill of [begin, end) end. `kept` are the boundaries that get checkpoints."""
        if self.continuation is Continuation.TOKENS:
            # several tokens at once are possible only from position 0: up to the last checkpoint, then one by one
            once = max(kept, default=end) if begin == 0 else begin
            return [*([once] if begin == 0 else []), *range(once + 1, end + 1)]
        first = begin - begin % self.prefill_tokens + self.prefill_tokens
        return sorted({*range(first, end, self.prefill_tokens), end, *kept})

    def _admit(self, asked: _Asked) -> _Sequence:
        """Begin a request on its cached device blocks."""
        tokens = asked.tokens
        keys = self._hasher.keys(tokens) if self._prefix_caching else []
        self._served += 1
        n0 = self._coordinator.longest_boundary(keys, 0, len(tokens))
        chunks = self.planner.full_chunks(n0)
        node = self._coordinator.resume_node(keys, chunks) if chunks else None
        table = BlockTable(self.planner.grid_tokens)
        sequence = _Sequence(
            f"request-{self._served}",
            asked.choice,
            len(tokens),
            list(tokens),
            keys,
            path := self._path(keys, chunks),
            table,
            parent=self.pool.root,
            pin=None if node is None else self.pool.pin(node),
            touch=self.pool.touch(node),
            committed=chunks,
            resets=self._resets,
        )
        if path:
            sequence.parent = path[-1]
            table.blocks = list(self.pool.blocks_of(path))
        table.length = n0
        return sequence

    def _path(self, keys: Sequence[bytes], chunks: int) -> list[int]:
        """The device's nodes of the first `chunks` chunks."""
        deepest = self.pool.find(keys[chunks - 1]) if chunks else None
        return [] if deepest is None else self.pool.path(deepest, chunks)

    def _load(self, sequence: _Sequence, state: WorkingState, n0: int) -> int:
        """Load what the host has beyond n0, and resume after it. Returns the number of loaded tokens."""
        boundaries: Sequence[int] = ()
        if self._host is not None:
            self._load_from(self._host, sequence, n0)
            boundaries = self._host.boundaries(sequence.id)
        self._resume(sequence, state)
        sequence.kept = frozenset(
            {depth * self.planner.grid_tokens for depth in self._wanted(sequence)}.union(boundaries)
        )
        return sequence.table.length - n0

    def _load_from(self, host: HostCache, sequence: _Sequence, n0: int) -> None:
        """If the load fails, what it was to bring is computed later, into the same blocks."""
        ask = partial(
            host.start,
            sequence.id,
            sequence.keys,
            num_tokens=sequence.prompt_tokens,
            on_device=n0,
            allocate=partial(self._room, sequence),
        )
        while isinstance(answer := ask(), Pending):
            copy_all(host)
        if not isinstance(answer, Hit):
            return
        sequence.table.length = dict(copy_all(host))[sequence.id]
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

    def _resume(self, sequence: _Sequence, state: WorkingState) -> None:
        """Restore windows and states of the request at the end of its hit."""
        length = sequence.table.length
        if not length:
            return
        node = self._coordinator.resume_node(sequence.keys, self.planner.full_chunks(length))
        if node is None:
            raise InternalError("a request is to resume where the device has nothing to resume from")
        self._checkpoints.restore(state, node, length)
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

    def _forward(self, state: WorkingState, sequences: Sequence[_Sequence], tokens: int) -> torch.Tensor:
        """Compute the next `tokens` tokens of the requests that are the rows of `state`.

        Returns the logits of their last tokens, [rows, vocabulary].
        """
        for sequence in sequences:
            self._grow(sequence, sequence.table.length + tokens)
        if self._host is not None:
            copy_all(self._host)  # what the new blocks held is stored before it is overwritten
        return self._run(state, sequences, tokens)

    def _settle(self, state: WorkingState, sequences: Sequence[_Sequence]) -> None:
        """Cache what a forward pass has computed. Where a token is chosen from its logits, that comes first."""
        for row, sequence in enumerate(sequences):
            self._commit(sequence)
            self._take_checkpoint(sequence, state, row)
        self._report(sequences)

    def _run(self, state: WorkingState, sequences: Sequence[_Sequence], tokens: int) -> torch.Tensor:
        """Continue `state` with the next `tokens` tokens of these requests."""
        rows = state.rows
        ids = [each.tokens[begin : begin + tokens] for each, begin in zip(sequences, rows.lengths, strict=True)]
        rows.begin_forward(tokens, self.model.device)
        logits = self._compute(torch.tensor(ids, device=self.model.device), rows.lengths, state.cache, last=1)
        rows.end_forward()
        return logits[:, -1].float()

    def _report(self, sequences: Sequence[_Sequence]) -> None:
        """Report computed tokens to the host, a boundary once its checkpoint is there."""
        if self._host is not None:
            self._host.end_step({each.id: _told(each) for each in sequences})

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
        self, sequence: _Sequence, state: WorkingState, ends: Sequence[int]
    ) -> tuple[torch.Tensor, WorkingState | None]:
        """Compute the prompt in chunks. Returns the logits of its last token, and what `_catch_up` begins with."""
        for end in ends[:-1]:
            self._forward(state, [sequence], end - sequence.table.length)
            self._settle(state, [sequence])
        fork = None if sequence.put_off is None else state.fork()
        return self._forward(state, [sequence], ends[-1] - sequence.table.length)[0], fork

    def _catch_up(self, sequence: _Sequence, fork: WorkingState | None) -> None:
        """Take the checkpoint that was put off, from a fork of the request at the position before it."""
        boundary, sequence.put_off = sequence.put_off, None
        if fork is None or boundary is None:
            return
        self._run(fork, [sequence], boundary - fork.rows.columns)
        chunk = self.planner.full_chunks(boundary) - 1
        node = self._checkpoints.take(fork, 0, sequence.keys, boundary)
        if node is not None:
            self._checkpoints.commit(node, sequence.keys[chunk], sequence.chunks[chunk], sequence.touch)
        self._report([sequence])

    def _decode(self, sequences: Sequence[_Sequence], pasts: list[tuple[WorkingState, int]]) -> None:
        """Generate the tokens after the first ones, together. A request leaves the others when its answer has ended.

        `pasts` are the state and the row of each. They are changed here, so that no memory is kept for one that left.
        """
        while going := [at for at, each in enumerate(sequences) if not each.choice.is_over]:
            sequences, pasts[:] = [sequences[at] for at in going], [pasts[at] for at in going]
            state = WorkingState.joined(pasts)
            pasts[:] = [(state, row) for row in range(len(going))]
            for sequence in sequences:
                sequence.tokens.append(sequence.last)
            for sequence, logits in zip(sequences, self._forward(state, sequences, 1), strict=True):
                sequence.last = sequence.choice.choose(logits)
            self._settle(state, sequences)

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
        if not self._may_cache(sequence):
            return
        self._hasher.extend(sequence.keys, sequence.tokens)
        full = self.planner.full_chunks(sequence.table.length)
        if full == sequence.committed:
            return
        while sequence.committed < full and self._share(sequence, sequence.committed):
            sequence.committed += 1
        begin = sequence.committed
        if begin < full:
            parent = sequence.chunks[begin - 1] if begin else self.pool.root
            self.pool.commit(sequence.chunks[begin:full], sequence.keys[begin:full], parent, sequence.touch)
        sequence.committed = full
        sequence.parent = sequence.chunks[full - 1]
        self._pin(sequence, sequence.parent)

    def _may_cache(self, sequence: _Sequence) -> bool:
        """Whether what the request computes is cached: not if its own processors have had the generator reset."""
        return self._prefix_caching and sequence.resets == self._resets

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

    def _take_checkpoint(self, sequence: _Sequence, state: WorkingState, row: int) -> None:
        """Take a checkpoint here, if one is wanted. In the answer, each new checkpoint replaces the one before."""
        length = sequence.table.length
        answers = length >= sequence.prompt_tokens
        if not self._may_cache(sequence) or not self._checkpoints.are_needed(length):
            return
        if length not in sequence.kept and not answers:
            return
        key = sequence.keys[self.planner.full_chunks(length) - 1]
        taken = self._checkpoints.take(state, row, sequence.keys, length)
        is_new = taken is not None and self._checkpoints.commit(taken, key, sequence.parent, sequence.touch)
        if answers:
            if sequence.latest is not None:
                self._checkpoints.drop(sequence.latest)
            sequence.latest = key if is_new else None

    def _end_on_host(self, sequence: _Sequence) -> None:
        if self._host is not None:
            self._host.end(sequence.id, sequence.committed * self.planner.grid_tokens)
            copy_all(self._host)

    def _release(self, sequence: _Sequence) -> None:
        """Give up what a request holds of the pool."""
        if sequence.pin is not None:
            self.pool.unpin(sequence.pin)
        self.pool.abort(sequence.chunks[sequence.committed :])
        if sequence.filling is not None:
            self.pool.abort([sequence.filling])


def _told(sequence: _Sequence) -> int:
    """The tokens of a request that the host may store."""
    computed = sequence.table.length
    return computed if sequence.put_off is None else min(sequence.put_off - 1, computed)
