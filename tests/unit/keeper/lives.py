"""Engines as processes that serve prompts on one pool until they are to end, or are killed at any moment.

Copies are slow, piece by piece, so that a kill often comes in the middle of one. All bytes of all requests are checked.
"""

import random
import time
from itertools import chain
from math import gcd

from cpu_prefix_cache.testing import MeddlingCopier
from tests.unit.keeper.pool_engine import PoolEngine

SERVED, LOADED, STORED = range(3)  # counts that outlive the process
COPY_SECONDS = 0.0005


class SlowCopier(MeddlingCopier):
    def __init__(self, copier, tensors):
        super().__init__(copier)

    def copy(self, direction, copies):
        for copy in copies:
            pieces = gcd(len(copy.host_blocks), len(copy.device_blocks))
            host, device = (len(each) // pieces for each in (copy.host_blocks, copy.device_blocks))
            for at in range(pieces):
                blocks = copy.host_blocks[at * host :][:host], copy.device_blocks[at * device :][:device]
                event = super().copy(direction, [copy._replace(host_blocks=blocks[0], device_blocks=blocks[1])])
                time.sleep(COPY_SECONDS)
        return event


def a_prompt(draw):
    """Engines have beginnings in common, and few ends, so they often want the same chunk at once."""
    beginning = draw.choice(["abcdefgh", "ijklmnop", "abcdqrst", "uv"])
    return beginning[: draw.randint(1, 8)] + "".join(chr(1000 + draw.randint(0, 40)) for _ in range(draw.randint(0, 3)))


def distinct(prompt):
    return "".join(dict.fromkeys(prompt))


def full(address, **options):
    return PoolEngine(address, **{"device_blocks": 24, **options})


def live(engine_at, address, seed, is_over, counts):
    """Serve until `is_over`, which has no lock: a process that was killed would keep it. A wrong byte is an
    AssertionError, and so an exit code.
    """
    draw = random.Random(seed)
    with engine_at(address, wrap_copier=SlowCopier) as engine:
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
