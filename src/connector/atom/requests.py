"""Knowledge that the scheduler half has of ATOM's requests: the keys of their chunks, and how many of these hold KV.

    first seen     the chunks of the prompt have keys; later tokens get theirs when their blocks hold them
    confirmed      its first blocks have ATOM's hash and hold the tokens of our keys: the device knows them now
    left           it has lost its blocks, and keeps its keys
    reset          what its blocks hold, and what is computed from that, is from before: nothing more is confirmed

ATOM gives a block its hash when the step that computed it has ended, or its load, or takes a block that has one. So a
request's first blocks with a hash are what a finished step has computed (rule 11). With one exception: of an answer,
ATOM may give a block its hash one token early, before the last token in it was computed. (It reads the tokens of a step
after the next one was launched, and supposes that this one has computed them; but it may have been a prefill of other
requests.) So of an answer the last token that is known does not count.

The tokens alone must determine the KV. Of a request with images they do not, so it has no keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from connector.atom.device import AtomDevice
from connector.common.next_use import next_use_of
from connector.common.request_flags import LOAD, STORE, allows
from cpu_prefix_cache import ChainHasher
from cpu_prefix_cache.deciding import Request


@dataclass(slots=True)
class _Known:
    keys: list[bytes]
    has_keys: bool
    confirmed: int = 0  # chunks


class KnownRequests:
    """By ATOM's sequences, which are forgotten when ATOM forgets them."""

    def __init__(self, block_tokens: int, hash: str) -> None:
        self.device: AtomDevice | None = None  # set when it is known
        self._block_tokens = block_tokens
        self._hasher = ChainHasher(block_tokens, hash)
        self._known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()

    def request(self, seq: Any) -> Request:
        """The sequence as the cache sees it."""
        stores, next_use = allows(seq.kv_transfer_params, STORE), next_use_of(seq.kv_transfer_params)
        return Request(seq.id, self._of(seq).keys, int(seq.num_tokens), stores, next_use)

    def may_load(self, seq: Any) -> bool:
        """Whether ATOM may resume it after a load. It then computes up to the end of the prompt and no further, so one
        that has answered already, and was preempted, is not loaded.
        """
        return seq.num_tokens == seq.num_prompt_tokens and allows(seq.kv_transfer_params, LOAD)

    def confirm(self, seq: Any) -> int:
        """How many of its first tokens are in blocks that hold KV. The device learns their keys."""
        known, device, width = self._of(seq), self.device, self._block_tokens
        if device is None or not known.has_keys:
            return 0
        last = min(_computed_at_most(seq) // width, len(seq.block_table))
        while known.confirmed < last:
            block, end = seq.block_table[known.confirmed], (known.confirmed + 1) * width
            if not device.holds(block, seq.token_ids[end - width : end]) or not device.is_settled(seq, block):
                break
            if known.confirmed == len(known.keys):
                self._hasher.extend(known.keys, seq.token_ids[:end])
            device.remember(block, known.keys[known.confirmed])
            known.confirmed += 1
        return known.confirmed * width

    def lost_blocks(self, seq: Any) -> None:
        self._of(seq).confirmed = 0

    def reset(self, running: Iterable[Any]) -> None:
        """Nothing that blocks hold now counts, nor what these requests compute."""
        if self.device is not None:
            self.device.forget_all()
        for seq in running:
            self._of(seq).has_keys = False

    def _of(self, seq: Any) -> _Known:
        known = self._known.get(seq)
        if known is None:
            has_keys = seq.multimodal_data is None
            keys = self._hasher.keys(seq.token_ids[: seq.num_prompt_tokens]) if has_keys else []
            known = self._known[seq] = _Known(keys, has_keys)
        return known


def _computed_at_most(seq: Any) -> int:
    """The prompt, and of an answer all tokens but the last that is known, and drafts and what stands in for tokens."""
    unknown = seq.num_placeholder_tokens + seq.num_draft_tokens + seq.num_rejected
    return max(int(seq.num_prompt_tokens), int(seq.num_tokens - 1 - unknown))
