"""Host memory as the prefix cache of `model.generate`: a `past_key_values` that begins where earlier prompts ended.

    past      a prompt's longest known beginning is brought into device blocks and copied into a transformers' cache.
              Where the model has windows or states, the prompt is computed up to the boundaries at which they are to be
              kept, because they are not known later. In a batch, each row is computed up to the column of the furthest
    generate  anything that takes `past_key_values`: beams, streamers, processors are transformers' own
    end       what has been computed of the prompt is copied into device blocks under the keys of its tokens; what these
              held goes to host memory

Device blocks are held while something is copied, not while a model computes. They keep what was used last.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from connector.transformers.changes import Weights
from connector.transformers.held import KEEPS_NONE, Past, before_forward
from connector.transformers.identity import longest, named, renewed
from connector.transformers.inputs import InputReader, Prompt, in_rows
from connector.transformers.paged import PagedPast
from connector.transformers.past import ModelPast
from connector.transformers.running import generating, logits
from connector.transformers.steps import WaitingDevice, copy_all
from connector.transformers.trials import TAIL, takes_several, try_batch, try_images
from connector.transformers.versions import warn_if_untested
from cpu_prefix_cache import (
    ChainHasher,
    CopierWrapper,
    FileTier,
    Hit,
    HostCache,
    HostOptions,
    HostStatistics,
    Miss,
    MisuseError,
    SharedTier,
)
from cpu_prefix_cache.deciding import RAW, Placement, PoolExhausted, check_whole, num_bytes

SPARE = 8  # of a past, one part in so many is room for tokens of an answer
# So few tokens take hardly longer in one forward pass than in each of two: a checkpoint between them is taken later.
# With two, after 2,048 known tokens and 32 new ones, small models of Gemma 3, Qwen3.5 and Falcon-H1 took 1.8 to 1.9
# times as long to the first token.
PUT_OFF_TOKENS = 32


class HostPrefixCache(AbstractContextManager["HostPrefixCache"]):
    """Prefixes of prompts of one model, kept in host memory. `close` it, or use it in a `with`.

        host_bytes            host memory, in bytes or as a text: "2GiB"
        device_bytes          memory of the model's device for the blocks that pass through it; a prompt that is longer
                              is computed anew each time. Default: the longest prompt's, at most a quarter of
                              `host_bytes`
        offload               lazy or eager. Default: eager above a tier, which a restart finds with the latest prompts
                              then
        policy                one of cpu_prefix_cache.POLICIES
        block_tokens          tokens of a device block, which are found as a whole
        max_model_len         the most tokens of a prompt; needed for models without one, like Bloom and Mamba
        checkpoint_interval   if given, take a checkpoint every so many tokens, beside those the cache keeps anyway
        below                 a tier for what the host cannot hold (docs/tiers.md)
        codec                 form in which the host keeps bf16 full attention: none or exponent (docs/coded_blocks.md)
        wrap_copier           for tests: see HostCache

    Several pasts may be open, in any threads. Raises ConfigurationError with a message that names the remedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        host_bytes: int | str,
        device_bytes: int | str | None = None,
        offload: str | None = None,
        policy: str = "lru",
        block_tokens: int = 16,
        max_model_len: int | None = None,
        checkpoint_interval: int | None = None,
        below: FileTier | SharedTier | None = None,
        codec: str = RAW,
        wrap_copier: CopierWrapper | None = None,
    ) -> None:
        check_whole("block_tokens", block_tokens, least=1)
        if max_model_len is not None:
            check_whole("max_model_len", max_model_len, least=1)
        warn_if_untested()
        self.model = model = generating(model).eval()
        self.max_model_len = longest(model, max_model_len)
        self._past = ModelPast(model, block_tokens, codec)
        self._takes_several = takes_several(model, self.max_model_len)
        host = num_bytes("host_bytes", host_bytes)
        device = None if device_bytes is None else num_bytes("device_bytes", device_bytes)
        self._kv = PagedPast(self._past, self.max_model_len, device, host)
        self.planner, self._pool = self._kv.planner, self._kv.pool
        self._hasher = ChainHasher(block_tokens, "xxh3_128" if below is None else "sha256")
        self._reader = InputReader(model, self.max_model_len, self._hasher)
        self._tried: set[str] = set()
        tier = None if below is None else named(below, model)
        self._revisions = {tier.revision} if isinstance(tier, SharedTier) else set()  # that were its weights'
        self._host = HostCache(
            WaitingDevice(self._pool, hands_out_first=True),
            self._kv.layout(),
            host_bytes=host,
            max_model_len=self.max_model_len,
            max_step_tokens=min(self.max_model_len, self._kv.num_blocks * block_tokens),
            options=HostOptions(
                offload=offload or ("lazy" if below is None else "eager"),
                policy=policy,
                checkpoint_interval=checkpoint_interval,
                wrap_copier=wrap_copier,
            ),
            below=tier,
        )
        self._host.prepare()
        while (opening := self._host.statistics().tier) is not None and opening.state == "opening":
            copy_all(self._host)  # so that the first prompt finds all that the tier has from before
        hook = model.register_forward_pre_hook(partial(before_forward, self._past), with_kwargs=True)
        weakref.finalize(self, hook.remove)  # not at `close`: a past may be open
        self._lock = threading.RLock()
        self._weights, self._weights_dtype = Weights(model, self.reset), model.dtype
        self._resets, self._dtype, self._is_closed = 0, self._computes_in(), False

    @contextmanager
    def past(
        self,
        input_ids: torch.Tensor | Sequence[Any],
        attention_mask: torch.Tensor | Sequence[Any] | None = None,
        *,
        next_use: float | None = None,
        **others: torch.Tensor,
    ) -> Iterator[Past]:
        """`past_key_values` with the longest known beginning of a prompt, token ids [tokens] or [1, tokens], or of each
        row of a batch, [rows, tokens], padded on the left. `others` are the images of one prompt.

        Generate with `past.inputs`: these inputs, without the images that the past has. What the model computes of them
        inside the `with` is kept under their key at its end, unless it ends by an exception. `next_use` is a hint, as
        of `HostCache.start`.

        Raises PromptRefused for what is no prompt of the model, and MisuseError after `close`. The model's first call
        with it raises MisuseError if its weights, adapters or mode have changed meanwhile, and for more tokens than
        those behind the past, or others.
        """
        ids = in_rows(input_ids, self._past.device)
        others = {name: value for name, value in others.items() if value is not None}
        mask = None if attention_mask is None else in_rows(attention_mask, self._past.device)
        prompts = self._reader.prompts(ids, mask, others)
        inputs = {"input_ids": ids, **({} if mask is None else {"attention_mask": mask}), **others}
        past: Past | None = None
        try:
            with self._lock, torch.no_grad():
                self._check_open()
                self._weights.follow()
                self._check_dtype()
                self._try(prompts)
                past = self._begin(prompts, inputs, next_use)
            yield past
        except BaseException:
            past = None  # nothing is kept
            raise
        finally:
            with self._lock, torch.no_grad():
                self._end(prompts, past)

    def statistics(self) -> HostStatistics:
        with self._lock:
            return self._host.statistics()

    def reset(self) -> None:
        """Nothing cached before now is used again. New weights need no call: they are noticed (changes.py)."""
        with self._lock:
            self._check_open()
            revision = renewed(self.model, self._revisions) if self._revisions else None
            self.forget_device()
            self._weights.look()
            self._weights_dtype = self.model.dtype
            self._host.reset(revision)

    def forget_device(self) -> None:
        """Empty the device's blocks. What host memory has stays."""
        with self._lock:
            self._check_open()
            self._pool.reset()
            self._resets += 1

    def close(self, *error: object) -> None:
        """Write to the tier what only the host has, and give the memory back. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._host.close()
            finally:
                self._kv.region = self._kv.region.new_empty(0)

    __exit__ = close

    # A prompt begins

    def _try(self, prompts: Sequence[Prompt]) -> None:
        """Try the model with its first images, and with its first batch of rows of different lengths."""
        images = prompts[0].images
        if images is not None and "images" not in self._tried:
            try_images(self.model, prompts[0].tokens, images)
            self._tried.add("images")
        if any(prompt.pad for prompt in prompts) and "batch" not in self._tried:
            try_batch(self.model, self._past, left=TAIL if self._takes_several else 1)
            self._tried.add("batch")

    def _begin(self, prompts: Sequence[Prompt], inputs: dict[str, torch.Tensor], next_use: float | None) -> Past:
        pads, pasts = [prompt.pad for prompt in prompts], [self._known(prompt, next_use) for prompt in prompts]
        columns = max(pad + past.get_seq_length() for pad, past in zip(pads, pasts, strict=True))
        if columns > min(pads):  # some row has tokens: no padding is left to compute, and every row ends there
            for prompt, past in zip(prompts, pasts, strict=True):
                self._compute(past, prompt, columns - prompt.pad)
        past = Past.joined(pasts, pads, self._room(prompts[0], columns))
        self._settle()
        text = {name: value for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
        past.inputs, past.goes_on = text if columns else inputs, partial(self._goes_on, prompts)
        past.leaves_out = past.inputs.keys() != inputs.keys()
        return past

    def _known(self, prompt: Prompt, next_use: float | None) -> Past:
        """A past of one row with what is known of a prompt, and what must be computed before `generate` goes on."""
        with self._kv.place(prompt.keys, len(prompt.tokens)) as place:
            on_device = place.length
            self._load(prompt, place, next_use)
            prompt.computed = place.length
            past = self._filled(prompt, place)
            past.hit_tokens, past.device_hit_tokens = place.length, min(on_device, place.length)
            self._compute_ahead(past, prompt, place)
            return past

    def _compute_ahead(self, past: Past, prompt: Prompt, place: Placement) -> None:
        """Compute up to the boundaries at which something is to be kept. A model that takes several tokens only from
        position 0 computes one by one behind them, up to the last.
        """
        length = max(place.length, prompt.behind - 1)
        boundaries = [each for each in self._host.boundaries(prompt.id) if length < each < len(prompt.tokens)]
        if len(prompt.tokens) - place.length <= PUT_OFF_TOKENS and self._takes_several:
            prompt.put_off = boundaries
            return
        with suppress(PoolExhausted):  # the prompt is longer than the device's blocks
            is_one = not place.length and not self._takes_several
            self._compute_to(past, prompt, place, boundaries[-1:] if is_one else boundaries)
        if not self._takes_several:
            self._compute(past, prompt, len(prompt.tokens) - 1)
        if boundaries:  # a step of its own: what is stored in time depends on how much one hands out
            copy_all(self._host)

    def _give_up(self, prompt: Prompt) -> None:
        if prompt.is_running:
            self._host.end(prompt.id, prompt.computed)
            prompt.is_running = False
            copy_all(self._host)

    def _goes_on(self, prompts: Sequence[Prompt], begun: int) -> None:
        """The model goes on behind so many tokens of the past."""
        with self._lock:
            if not self._is_closed:
                self._weights.follow()  # they may be others for the length of `generate` alone
            self._check_dtype()
            if begun and prompts[0].resets != self._resets:
                change = "other weights or adapters or in another mode: the cache was reset since it was handed out"
                raise MisuseError(f"what this past holds was computed by {change}")

    def _settle(self) -> None:
        """Blocks may be copied by another thread next, in another stream of the device."""
        if self._past.device.type != "cpu":
            torch.accelerator.synchronize(self._past.device)

    def _load(self, prompt: Prompt, place: Placement, next_use: float | None) -> None:
        """Load what the host has beyond the device's. Where that fails, the prompt starts again, and computes it."""
        start = partial(self._host.start, prompt.id, prompt.keys, num_tokens=len(prompt.tokens), next_use=next_use)
        room: Callable[[int, int], Sequence[Sequence[int]] | None] = partial(place.room, self._kv)
        prompt.is_running, prompt.resets = True, self._resets
        while not isinstance(answer := start(on_device=place.length, allocate=room), Miss):
            ended = dict(copy_all(self._host))
            if isinstance(answer, Hit):
                place.loaded(ended[prompt.id], answer.boundary, self._kv)
                if place.length == answer.boundary:
                    return
                self._host.end(prompt.id, place.length)
                room = _no_room  # a tier may give the host back what has failed

    def _filled(self, prompt: Prompt, place: Placement) -> Past:
        """A past with the tokens that a placement has of a prompt."""
        past = Past(self._past)
        place.begin_behind(prompt.behind)
        if place.length:
            self._kv.restore(past, place, self._room(prompt, place.length))
        return past

    def _room(self, prompt: Prompt, columns: int) -> int:
        """Tokens that may come behind so many columns: the rest of the prompt, and some of an answer."""
        total = prompt.pad + len(prompt.tokens)
        return total - columns + total // SPARE

    def _compute_to(self, past: Past, prompt: Prompt, place: Placement, boundaries: Sequence[int]) -> None:
        """Compute the prompt up to each boundary, and keep what is there. Raises PoolExhausted."""
        for end in boundaries:
            self._compute(past, prompt, end)
            self._keep(past, 0, place, end)
            if self._kv.are_needed(end):
                place.take_checkpoint(self._kv, past, end)
            self._report(prompt, end)

    def _compute(self, past: Past, prompt: Prompt, end: int) -> None:
        """Compute the tokens of a prompt behind its past of one row, up to `end`."""
        images = prompt.images
        while (begin := past.get_seq_length()) < end:
            until = end if begin == 0 or self._takes_several else begin + 1
            others = {} if images is None or images.end <= begin else images.up_to(until)
            logits(self.model, torch.tensor([prompt.tokens[:until]], device=self._past.device), past, **others)
            if past.get_seq_length() == begin:
                raise MisuseError(KEEPS_NONE)

    # What has been computed

    def _keep(self, past: Past, row: int, place: Placement, end: int) -> None:
        """Put the first `end` tokens of a row into the device's blocks. Raises PoolExhausted."""
        place.grow(end)
        copy_all(self._host)  # what the new blocks held is stored before it is overwritten
        self._kv.keep(past, row, place)
        place.commit(end)

    def _report(self, prompt: Prompt, tokens: int) -> None:
        prompt.computed = tokens
        self._host.end_step({prompt.id: tokens})

    def _end(self, prompts: Sequence[Prompt], past: Past | None) -> None:
        if self._is_closed or not any(prompt.is_running for prompt in prompts):
            return
        try:
            self._settle()
            self._weights.follow()
            if past is not None and prompts[0].resets == self._resets:
                for row, prompt in enumerate(prompts):
                    with suppress(PoolExhausted):
                        self._keep_all(prompt, past, row)
        finally:
            for prompt in prompts:
                self._give_up(prompt)

    def _keep_all(self, prompt: Prompt, past: Past, row: int) -> None:
        full = min(past.length(row), len(prompt.tokens)) // self.planner.grid_tokens * self.planner.grid_tokens
        if boundaries := [each for each in prompt.put_off if each <= full]:
            with self._kv.place(prompt.keys, boundaries[0]) as place:
                self._compute_to(self._filled(prompt, place), prompt, place, boundaries)
        with self._kv.place(prompt.keys, full + 1) as place:
            self._keep(past, row, place, full)
        self._report(prompt, full)

    def _check_open(self) -> None:
        if self._is_closed:
            raise MisuseError("the cache is closed: make another one")

    def _check_dtype(self) -> None:
        if (dtype := self._computes_in()) != self._dtype:
            raise MisuseError(f"the model computes in {dtype}, and its blocks are {self._dtype}: make another cache")

    def _computes_in(self) -> torch.dtype:
        kind = self._past.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._weights_dtype


def _no_room(n0: int, boundary: int) -> None:
    """No blocks for a load, so that there is none."""
