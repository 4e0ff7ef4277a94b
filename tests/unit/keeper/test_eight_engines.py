"""Eight engines on one pool, each request at any of them: all load chunks of others, and all bytes are right.

Conversations with beginnings in common go on turn by turn. After each request its device forgets all and its memory is
poisoned, so all that a later turn finds comes from slots; each block is compared with the pattern of its key.
"""

import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from cpu_prefix_cache.keeper import questions, takes
from tests.support.host_engine import PATIENCE, POISON, keys_of
from tests.unit.keeper.pool_engine import KeeperProcess, PoolEngine

ENGINES, SESSIONS, TURNS = 8, 12, 5
BEGINNINGS = ("abcdef", "abcdgh", "uvwxyz")
TURN = 2  # chunks that each turn adds
ROOM, SCARCE = 160, 64  # slots; all sessions together have 136 chunks


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine answers late."""
    monkeypatch.setattr(questions, "ASK_SECONDS", PATIENCE / 2)
    monkeypatch.setattr(takes, "TAKE_SECONDS", PATIENCE / 2)


class Engines:
    """Engines that serve at the same time, each the prompts that come to it one after the other."""

    def __init__(self, engines, threads, seed):
        self.engines, self.threads, self.draw = engines, threads, random.Random(seed)
        self.served = [set() for _ in engines]  # keys
        self.foreign = [0 for _ in engines]  # loaded chunks that this engine had never computed or loaded

    def turn(self, prompts):
        """Serve each at an engine drawn at random. How many chunks of each were loaded."""
        routed = defaultdict(list)
        for prompt in prompts:
            routed[self.draw.randrange(len(self.engines))].append(prompt)
        results = self.threads.map(self.serve, routed.keys(), routed.values())
        return {prompt: loaded for each in results for prompt, loaded in each.items()}

    def serve(self, at, prompts):
        return {prompt: self.serve_one(at, prompt) for prompt in prompts}

    def serve_one(self, at, prompt):
        engine, keys = self.engines[at], keys_of(prompt)
        assert engine.is_whole and (engine.kv == POISON).all(), "the device still has something"
        loaded = engine.serves(prompt)  # compares all bytes
        engine.rests()
        engine.forgets()
        engine.settles()
        self.foreign[at] += len(set(keys[:loaded]) - self.served[at])
        self.served[at].update(keys)
        return loaded

    def stored(self):
        return sum(engine.host.statistics().cache.chunks_stored for engine in self.engines)

    @property
    def slots(self):
        """All slots, as the engines have them mapped."""
        return self.engines[0].host._arena.blocks


@pytest.fixture
def engines_of(tmp_path):
    with ExitStack() as stack:

        def begin(slots):
            keeper = stack.enter_context(KeeperProcess(tmp_path, slots=slots))
            engines = [stack.enter_context(PoolEngine(keeper.address, device_blocks=24)) for _ in range(ENGINES)]
            return Engines(engines, stack.enter_context(ThreadPoolExecutor(ENGINES)), seed=slots)

        yield begin


def conversations():
    """The prompts of each turn."""
    letters = [iter(map(chr, range(1000 * at, 1000 * (at + 1)))) for at in range(1, SESSIONS + 1)]
    prompts = [BEGINNINGS[at % len(BEGINNINGS)] for at in range(SESSIONS)]
    for _ in range(TURNS):
        prompts = [
            prompt + "".join(next(own) for _ in range(TURN)) for prompt, own in zip(prompts, letters, strict=True)
        ]
        yield prompts


def test_each_turn_finds_all_of_the_one_before_it_wherever_that_was(engines_of):
    engines = engines_of(ROOM)
    first, *later = conversations()
    engines.turn(first)
    for prompts in later:
        assert engines.turn(prompts) == {prompt: len(prompt) - TURN for prompt in prompts}
    assert min(engines.foreign) > 0
    assert sum(engines.foreign) > SESSIONS * TURNS  # each turn came to one that had not the one before, on average


def test_chunks_that_are_found_in_a_pool_that_overflows_are_right(engines_of):
    engines = engines_of(SCARCE)
    loaded = [sum(engines.turn(prompts).values()) for prompts in conversations()]
    assert engines.stored() > SCARCE, "nothing had to leave"
    assert sum(loaded) > sum(engines.foreign) > SESSIONS


def test_one_damaged_byte_of_a_slot_shows(engines_of):
    """The control of both tests above."""
    engines = engines_of(ROOM)
    before = engines.slots.clone()
    engines.serve(0, BEGINNINGS[:1])
    written = (engines.slots != before).any(dim=1).nonzero().flatten().tolist()
    assert len(written) == len(BEGINNINGS[0])
    engines.slots[engines.draw.choice(written), 5] ^= 1
    with pytest.raises(AssertionError, match="hold other bytes"):
        engines.turn(next(conversations()))
