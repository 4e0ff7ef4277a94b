"""Lazy offload keeps its promise: chunks that the device evicts next have been saved (S7.47, O8.29)."""

from itertools import chain as concatenated
from itertools import islice
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import (
    HybridChunkPlanner,
    PoolExhausted,
    PrefixGroup,
    RankReport,
    Request,
    TransferPlan,
)
from cpu_prefix_cache.testing import Engine
from cpu_prefix_cache.testing.slots import PoolSlots
from property_tests.models.engines import QueueSlots

STORY = st.lists(st.tuples(st.text("abcdefgh", min_size=1, max_size=4), st.integers(1, 3), st.booleans()), max_size=40)

# Blocks of the stretch are used again, and those that then leave next were not in it: 3,000 stories find one like this.
USED_AGAIN = [
    ("c", 1, False),
    ("aaaa", 1, False),
    ("daa", 1, False),
    ("baa", 1, True),
    ("a", 1, False),
    ("aaaa", 1, False),
]

# Of the front only held blocks are left, and others wait; when the stores land, the first of them are handed out.
ALL_HELD = [(prompt, 1, prompt == "a") for prompt in ("b", "ca", "da", "ba", "aa", "a", "ea")]
# In the last step one block of the front is used and another comes to wait: as many wait as before.
ONE_CAME_AND_ONE_WENT = [("c", 1, False), ("baaa", 1, False), ("a", 1, True), ("a", 1, False), ("c", 1, False)]


class LazyEngine(Engine):
    """Requests run for some steps and are gone. A request that finds no room is turned away.

    The last chunk of each is decoded: it is reported to the cache at the end.
    """

    checks = False  # but in `lands`

    def __init__(self, slots: int, width: int, *, pooled: bool = False, host: int = 400, **options: Any) -> None:
        attention = PrefixGroup(name="attention", block_tokens=4 // width, block_bytes=8)
        planner = HybridChunkPlanner([attention], max_model_len=100, grid_tokens=4)
        device = PoolSlots(planner, slots) if pooled else QueueSlots(slots, width)
        super().__init__("lazy", device, host, planner=planner, **options)
        self.running: list[tuple[int, str]] = []
        self.moving: list[TransferPlan] = []

    def comes(self, prompt: str, steps: int) -> None:
        id = str(len(self.requests))
        try:
            self.starts(id, prompt, load=False)
        except PoolExhausted:
            return
        self.fills(id)
        self.cache.computed(id, 4 * len(prompt) - 4)
        self.running.append((steps, id))

    def end_some(self) -> None:
        for left, id in self.running:
            if not left:
                self.ends(id)
        self.running = [(left - 1, id) for left, id in self.running if left]

    def moves(self, lands: bool) -> None:
        self.moving += self.steps().transfers
        if lands:
            self.lands()

    def lands(self) -> None:
        self.reports(self.moving)
        self.cache.check_valid()
        self.device.check_valid()

    def on_its_way(self) -> set[bytes]:
        return {key for transfer in self.cache.edge.ledger for key in transfer.keys}

    def is_reachable(self, key: bytes) -> bool:
        """Whether all that this chunk hangs below is on the device or on the host."""
        above = (key[:end] for end in range(1, len(key)))
        return all(each in self.device.places or self.cache.pool.find(each) is not None for each in above)

    def next_to_leave(self, count: int) -> list[bytes]:
        order = islice(self.device.device.soonest_evicted(), max(0, count))
        return [key for _, key in order if key is not None]


@given(width=st.sampled_from([1, 2, 4]), slots=st.integers(8, 40), story=STORY)
@example(width=1, slots=13, story=USED_AGAIN)
@example(width=1, slots=9, story=ONE_CAME_AND_ONE_WENT)
@example(width=1, slots=8, story=ALL_HELD)
def test_chunks_that_leave_next_are_on_the_host_or_in_flight(width: int, slots: int, story: list[Any]) -> None:
    """With room on the host and no limit to a step, whatever was used again in between, and however it was copied."""
    engine = LazyEngine(slots, width, max_tokens=1_000)
    for prompt, for_steps, lands in story:
        engine.comes(prompt, for_steps)
        engine.end_some()
        engine.moves(lands=False)
        coming = engine.on_its_way()
        promised = slots * width // 2
        for key in engine.next_to_leave(promised - len(coming) * width):  # what moves is held, and is of the front
            is_safe = key in coming or engine.cache.pool.find(key) is not None or not engine.is_reachable(key)
            assert is_safe, f"{key!r} is about to leave"
        if lands:
            engine.lands()


@given(
    slots=st.integers(8, 40),
    host_blocks=st.integers(1, 6),
    ahead_blocks=st.integers(2, 8),
    policy=st.sampled_from(["lru", "arc"]),
    story=STORY,
)
def test_nothing_is_stored_twice_while_it_waits_in_the_stretch(
    slots: int, host_blocks: int, ahead_blocks: int, policy: str, story: list[Any]
) -> None:
    """Chunks that a small host evicts meanwhile are not missed before they, or others with them, are used again."""
    engine = LazyEngine(slots, 1, host=host_blocks, ahead_blocks=ahead_blocks, policy=policy, max_tokens=1_000)
    stored: set[bytes] = set()  # while in the stretch, and there since
    for prompt, for_steps, _ in story:
        engine.comes(prompt, for_steps)
        engine.end_some()
        stretch = set(engine.next_to_leave(ahead_blocks))
        stored &= stretch
        engine.moves(lands=False)
        coming = engine.on_its_way()
        assert stored.isdisjoint(coming), f"{stored & coming} is stored again"
        stored |= coming & stretch
        engine.lands()


@given(width=st.sampled_from([1, 2, 4]), slots=st.integers(16, 40), story=STORY)
def test_nothing_is_lost_if_no_step_takes_more_than_is_covered(width: int, slots: int, story: list[Any]) -> None:
    """Not even where nearly all of the device is in use, and what a request leaves is handed out in the next step.

    Of copies that end with the step. Those on their way longer are not made up for.
    """
    engine = LazyEngine(slots, width, max_tokens=1_000)
    known: set[bytes] = set()
    for prompt, for_steps, _ in story:
        engine.end_some()
        engine.comes(prompt, for_steps)
        engine.moves(lands=True)
        for key in known - engine.device.places.keys():
            assert engine.cache.pool.find(key) is not None, f"{key!r} is lost"
        known |= {key for _, id in engine.running for key in engine.requests[id].keys}
    assert engine.cache.statistics().lost_before_store == 0


@given(
    width=st.sampled_from([1, 2, 4]),
    slots=st.integers(24, 60),
    lengths=st.lists(st.integers(1, 5), min_size=20, max_size=40),
)
def test_nothing_is_lost_of_requests_that_begin_and_end_between_two_steps(
    width: int, slots: int, lengths: list[int]
) -> None:
    """Each block they had is back before anybody looks, some of them without a key, as if it had never left."""
    engine = LazyEngine(slots, width, max_tokens=4 * 5)
    for number, length in enumerate(lengths):
        keys = [b"%d/%d" % (number, at) for at in range(length)]
        holding = engine.device.take([], 0, length)
        engine.device.publish(holding, keys, length)
        engine.cache.admit(Request(str(number), keys, 4 * length), 0)
        engine.cache.finished(str(number), 4 * length)
        engine.device.let_go(holding)
        engine.moves(lands=True)
        engine.moves(lands=True)
    known = {b"%d/%d" % (number, at) for number, length in enumerate(lengths) for at in range(length)}
    for key in known - engine.device.places.keys():
        assert engine.cache.pool.find(key) is not None, f"{key!r} is lost"


@given(
    width=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12),
    step_chunks=st.integers(1, 4),
    report_steps=st.integers(1, 4),
)
def test_nothing_is_lost_of_prompts_longer_than_a_step(
    width: int, lengths: list[int], step_chunks: int, report_steps: int
) -> None:
    """Computed a step at a time, one after the other without a break, and reported as late as `report_steps` allows.

    The device has room for three of them, and twice for what those steps allocate.
    """
    room = 3 * max(lengths) + 2 * (1 + report_steps) * step_chunks
    engine = LazyEngine(room, width, max_tokens=4 * step_chunks, report_steps=report_steps)
    slots, cache = engine.device, engine.cache
    planned: list[list[int]] = []
    known: set[bytes] = set()
    for prompt, length in enumerate(lengths):
        keys = [b"%d/%d" % (prompt, at) for at in range(length)]
        cache.admit(Request(str(prompt), keys, 4 * length + 1), 0)
        holdings = []
        for start in range(0, length, step_chunks):
            portion = keys[start : start + step_chunks]
            holding = slots.take([], 0, len(portion))
            assert holding is not None, "what is held leaves too little"
            for key in known - slots.places.keys():
                assert cache.pool.find(key) is not None, f"{key!r} is lost"
            cache.report(RankReport(0, frozenset(concatenated.from_iterable(planned[: 1 - report_steps or None]))))
            cache.computed(str(prompt), 4 * start)
            planned.append([transfer.id for transfer in cache.step().transfers])
            slots.publish(holding, portion, len(portion))
            holdings.append(holding)
        cache.finished(str(prompt), 4 * length)
        for holding in reversed(holdings):
            slots.let_go(holding)
        known.update(keys)


@given(width=st.sampled_from([1, 2, 4]), slots=st.integers(8, 40), step_chunks=st.integers(1, 4), story=STORY)
def test_a_device_at_rest_is_soon_covered(width: int, slots: int, step_chunks: int, story: list[Any]) -> None:
    """However little a step may store: nothing is passed over by the walk.

    Of a device whose blocks wait in the order of their release. A BlockPool orders by admission: what is released late
    joins ahead of the walk, and is seen only when the stretch has room again.
    """
    engine = LazyEngine(slots, width, max_tokens=4 * step_chunks)
    for prompt, for_steps, lands in story:
        engine.comes(prompt, for_steps)
        engine.end_some()
        engine.moves(lands)
    for _ in range(slots + 5):
        engine.end_some()
        engine.moves(lands=True)
    for key in engine.next_to_leave(min(2 * step_chunks, slots // 2) * width // 2):
        assert not engine.is_reachable(key) or engine.cache.pool.find(key) is not None, f"{key!r} is passed over"


@given(
    pooled=st.booleans(),
    slots=st.integers(8, 40),
    host=st.integers(2, 12),
    step_chunks=st.integers(1, 8),
    report_steps=st.integers(1, 4),
    story=st.lists(st.tuples(st.text("ab", min_size=1, max_size=8), st.integers(0, 9), st.booleans()), max_size=20),
)
@example(False, 11, 6, 1, 1, [("ab", 0, False), ("aaaaaaaa", 0, False), ("baaa", 2, False), ("aaaaa", 1, True)])
@example(False, 9, 4, 1, 3, [("abaaaa", 0, False), ("aabaaa", 0, True), ("a", 0, True), ("aaa", 0, True)])
def test_a_host_smaller_than_the_stretch_comes_to_rest(
    pooled: bool, slots: int, host: int, step_chunks: int, report_steps: int, story: list[Any]
) -> None:
    """Neither its own stores nor a chain it can never complete are a reason to look for chunks the host evicted."""
    engine = LazyEngine(slots, 1, pooled=pooled, host=host, max_tokens=4 * step_chunks, report_steps=report_steps)
    for prompt, for_steps, lands in story:
        engine.comes(prompt, for_steps)
        engine.end_some()
        engine.moves(lands)
    at_most = 10 * slots
    while transfers := engine.steps().transfers:
        engine.moving += transfers
        engine.lands()
        at_most -= 1
        assert at_most, "it stores for ever"
