"""A HostPrefixCache beside `generate` without one, for every family."""

from functools import cache
from math import ceil

import torch

from connector.transformers import HostPrefixCache, ModelPast
from cpu_prefix_cache.deciding import HybridChunkPlanner
from random_models import WINDOW, build_family
from tests.connector.running import BLOCK, DEVICE, HIDDEN, document, error

# In deviations of the logits. Measured 2e-6 and 4e-2.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
LONGEST = 140  # tokens of a prompt
MAX_MODEL_LEN = 8 * LONGEST
FILLERS = 4  # prompts that take more than the device has; what they leave on it shows as a device hit


@cache
def model(family, window=WINDOW, dtype=torch.float32):
    torch.set_num_threads(1)
    return build_family(family, hidden=HIDDEN, layers=2, window=window).to(DEVICE, dtype)


def planner_of(of, block_tokens=BLOCK):
    return HybridChunkPlanner(ModelPast(of, block_tokens).groups, max_model_len=MAX_MODEL_LEN)


def device_bytes(of, block_tokens=BLOCK, blocks=None):
    """Two prompts and a few checkpoints. With less, one step can hand out more than half of the pool, and a lazy cache
    loses what it cannot foresee.
    """
    planner = planner_of(of, block_tokens)
    checkpoint = max(map(planner.checkpoint_blocks, range(1, 20)))
    blocks = blocks or 2 * ceil(LONGEST / block_tokens) + 3 * checkpoint
    return blocks * ModelPast(of, block_tokens).block_bytes


def generated(of, tokens, past=None, new_tokens=2, **options):
    """Logits of every step, and the tokens."""
    options = dict(do_sample=False, max_new_tokens=new_tokens) | options
    if past is not None:
        options["past_key_values"] = past
    answer = of.generate(
        torch.tensor([tokens], device=DEVICE), return_dict_in_generate=True, output_logits=True, **options
    )
    return [each[0] for each in answer.logits], answer.sequences[0, len(tokens) :].tolist()


@cache
def plain(family, shape, tokens, new_tokens):
    return generated(model(family, *shape), tokens, new_tokens=new_tokens)


class Pair:
    """A cache whose device holds two prompts and a few checkpoints, and the model without it."""

    def __init__(
        self,
        family,
        offload="lazy",
        *,
        window=WINDOW,
        dtype=torch.float32,
        block_tokens=BLOCK,
        blocks=None,
        host_bytes=1 << 23,
        **options,
    ) -> None:
        self.family, self.shape, self.tolerance = family, (window, dtype), TOLERANCE[dtype]
        self.cache = HostPrefixCache(
            model(family, *self.shape),
            host_bytes=host_bytes,
            device_bytes=device_bytes(model(family, *self.shape), block_tokens, blocks),
            offload=offload,
            block_tokens=block_tokens,
            max_model_len=MAX_MODEL_LEN,
            **options,
        )

    def ask(self, ids, new_tokens=2):
        """The past, how far the logits are from those without it, and whether the tokens agree.

        In half precision two tokens may be as likely: of its answers the first logits are compared.
        """
        with self.cache.past(ids) as past:
            logits, tokens = generated(self.cache.model, ids, past, new_tokens)
        reference, expected = plain(self.family, self.shape, tuple(ids), new_tokens)
        count = len(logits) if self.shape[1] == torch.float32 else 1
        off = max(error(*both) for both in zip(logits[:count], reference[:count], strict=True))
        return past, off, tokens == expected

    def ask_right(self, ids, new_tokens=2):
        past, off, same = self.ask(ids, new_tokens)
        assert off <= self.tolerance
        assert same or self.shape[1] != torch.float32
        return past

    def evict_all(self):
        """Fill the device with something else."""
        for seed in range(FILLERS):
            ids = document(9000 + seed, LONGEST - 13)
            with self.cache.past(ids) as past, torch.no_grad():
                self.cache.model(torch.tensor([ids[past.get_seq_length() :]], device=DEVICE), past_key_values=past)

    def is_at_rest(self):
        """Nothing is held, moving or half written, and every rule holds."""
        host = self.cache._host.cache
        pools = [self.cache._pool, host.pool]
        for pool in (self.cache._pool, host):
            pool.check_valid()
        assert not host.has_transfers and host.statistics().running == 0
        return all(
            (each.pinned, each.writing, each.retired) == (0, 0, 0) for each in (pool.statistics() for pool in pools)
        )

    @property
    def takes_several_tokens(self):
        return self.cache._takes_several


def on_host(past):
    return past.hit_tokens - past.device_hit_tokens
