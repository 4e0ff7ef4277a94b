"""Engines as processes that serve prompts on one pool until they are to end, or are killed at any moment.

Copies are slow, block by block, so that a kill often comes in the middle of one. All bytes of all requests are checked.
"""

import random
import time
from itertools import chain

from cpu_prefix_cache.testing import MeddlingCopier
from tests.unit.keeper.pool_engine import PoolEngine

SERVED, LOADED, STORED = range(3)  # counts that outlive the process
COPY_SECONDS = 0.0005


class SlowCopier(MeddlingCopier):
    def __init__(self, copier, tensors):
        super().__init__(copier)

    def copy(self, direction, copies):
        for copy in copies:
            for host, device in zip(copy.host_blocks, copy.device_blocks, strict=True):
                event = super().copy(direction, [copy._replace(host_blocks=(host,), device_blocks=(device,))])
                time.sleep(COPY_SECONDS)
        return event


def a_prompt(draw):
    """Engines have beginnings in common, and few ends, so they often want the same chunk at once."""
    beginning = draw.choice(["abcdefgh", "ijklmnop", "abcdqrst", "uv"])
    return beginning[: draw.randint(1, 8)] + "".join(chr(1000 + draw.randint(0, 40)) for _ in range(draw.randint(0, 3)))


def distinct(prompt):
    return "".join(dict.fromkeys(prompt))


def live(address, seed, is_over, counts):
    """Serve until `is_over`, which has no lock: a process that was killed would keep it. A wrong byte is an
    AssertionError, and so an exit code.
    """
    draw = random.Random(seed)
    with PoolEngine(address, device_blocks=24, wrap_copier=SlowCopier) as engine:
        while not is_over.value:
            counts[LOADED] += engine.serves(distinct(a_prompt(draw)))
            counts[SERVED] += 1
            if draw.random() < 0.7:
                engine.rests()
                engine.forgets()
        engine.rests()
        assert engine.is_whole, "device blocks are held for ever"
        counts[STORED] += engine.host.statistics().cache.chunks_stored


def all_slots(count):
    """A prompt that fills so many slots, of letters that no other prompt has."""
    return "".join(map(chr, chain(range(5000, 5000 + count))))
