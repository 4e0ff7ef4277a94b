"""A generator with a cache beside the same engine without one, for every family."""

from functools import cache
from math import ceil

import torch

from connector.transformers import PrefixCachedGenerator
from connector.transformers.continuing import Continuation
from random_models import WINDOW, build_family
from tests.connector.running import error, prompt

# In deviations of the logits. Measured 2e-6 and 4e-2.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
BLOCK = 16
PREFILL = 64
LONGEST = 140  # tokens of a prompt and its answer
FILLERS = 3  # prompts that take more than the device has; what they leave on it shows as a device hit


@cache
def model(family, window=WINDOW, dtype=torch.float32):
    torch.set_num_threads(1)
    return build_family(family, hidden=32, layers=2, window=window).to(dtype)


@cache
def plain(family, window=WINDOW, dtype=torch.float32, block_tokens=BLOCK, prefill_tokens=PREFILL):
    """The engine without a cache."""
    return PrefixCachedGenerator(
        model(family, window, dtype),
        device_blocks=2 * ceil(LONGEST / block_tokens) + 16,
        block_tokens=block_tokens,
        prefill_tokens=prefill_tokens,
        prefix_caching=False,
    )


@cache
def uncached(engine, ids, new_tokens, cuts):
    return engine.answer(ids, new_tokens, cuts=cuts)


class Pair:
    """A generator whose device pool holds two prompts and a few checkpoints, and the same one without a cache.

    With less, one step can hand out more than half of the pool, and a lazy cache loses what it cannot foresee.
    """

    def __init__(
        self, family, offload, policy="lru", wrap_copier=None, device_blocks=None, host_bytes=1 << 23, **shape
    ) -> None:
        self.plain = plain(family, **shape)
        block_tokens = self.plain.planner.grid_tokens
        checkpoint = max(self.plain.planner.checkpoint_blocks(depth) for depth in range(1, 20))
        self.cached = PrefixCachedGenerator(
            self.plain.model,
            device_blocks=device_blocks or 2 * ceil(LONGEST / block_tokens) + 3 * checkpoint,
            host_bytes=0 if offload == "off" else host_bytes,
            offload=offload,
            policy=policy,
            block_tokens=block_tokens,
            prefill_tokens=self.plain.prefill_tokens,
            wrap_copier=wrap_copier,
        )
        self.tolerance = TOLERANCE[self.plain.model.dtype]

    def ask(self, ids, new_tokens=2):
        """The answer, how far its logits are from the plain engine's, in deviations, and whether the tokens agree."""
        answer = self.cached.answer(ids, new_tokens)
        cuts = tuple(self.cached.cuts_without_cache(answer))
        reference = uncached(self.plain, tuple(ids), new_tokens, cuts)
        return answer, error(answer.first_logits, reference.first_logits), answer.tokens == reference.tokens

    def ask_right(self, ids, new_tokens=2):
        answer, off, same = self.ask(ids, new_tokens)
        assert off <= self.tolerance
        assert same or self.plain.model.dtype != torch.float32  # in half precision two may be as likely
        return answer

    def evict_all(self):
        """Fill the device with something else."""
        for seed in range(FILLERS):
            self.cached.answer(document(9000 + seed, LONGEST - 13), 1)

    def is_at_rest(self):
        """Nothing is held, moving or half written, and every rule holds."""
        self.cached.pool.check_valid()
        pools = [self.cached.pool.statistics()]
        if self.cached._host is not None:
            host = self.cached._host.cache
            host.check_valid()
            assert not host.has_transfers
            assert host.statistics().running == 0
            pools.append(host.pool.statistics())
        return all((each.pinned, each.writing, each.retired) == (0, 0, 0) for each in pools)

    @property
    def takes_several_tokens(self):
        return self.cached.continuation is Continuation.CHUNKS


def document(seed, length):
    return prompt(seed, length).tolist()


def last_boundary(length, block_tokens=BLOCK):
    return (length - 1) // block_tokens * block_tokens


def hit(answer):
    return answer.device_hit_tokens + answer.host_hit_tokens
