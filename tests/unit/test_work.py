"""Rule 16: a step costs what changed in it. Held by counting, not by seconds."""

import pytest

from cpu_prefix_cache import Pending
from cpu_prefix_cache.deciding import (
    HybridChunkPlanner,
    PooledDevice,
    PrefixGroup,
    Request,
)
from cpu_prefix_cache.testing import Engine
from cpu_prefix_cache.testing.engine import chain
from property_tests.models.engines import QueueSlots
from tests.unit.test_checkpoints import FULL, STATE
from tests.unit.test_checkpoints import GRID as GRID_OF_CHECKPOINTS
from tests.unit.test_checkpoints import Engine as Checkpointing

GRID = 16
PLANNER = HybridChunkPlanner([PrefixGroup(name="attention", block_tokens=GRID, block_bytes=100)], max_model_len=100_000)


def letters(number, chunks):
    """A prompt that begins like no other."""
    return chr(1_000 + number) + "".join(chr(3_000 + at) for at in range(1, chunks))


class Fleet(Engine):
    """Many requests that decode, one token to a step. Only those that are due are reported."""

    checks = False

    def __init__(self, requests, mode, device_chunks, host_chunks):
        super().__init__(mode, QueueSlots(device_chunks), host_chunks, planner=PLANNER, max_tokens=64 * GRID)
        self.reported = 0
        for number in range(requests):
            self.starts(str(number), letters(number, 8), extra=number % GRID - 7 * GRID)
        self.tokens = {id: request.num_tokens for id, request in self.requests.items()}
        for _ in range(3):  # the first is prefill
            self.step()

    def step(self):
        plan = self.steps()
        for id in self.cache.due():
            self.reported += 1
            self.fills(id, self.tokens[id] // GRID)
            self.cache.computed(id, self.tokens[id])
        self.tokens = {id: tokens + 1 for id, tokens in self.tokens.items()}
        self.reports(plan.transfers)

    def cost(self, steps):
        work = self.cache.statistics().work
        calls = self.device.calls
        reported = self.reported
        for _ in range(steps):
            self.step()
        return self.cache.statistics().work - work, self.device.calls - calls, self.reported - reported


def test_a_decoding_request_costs_something_only_at_a_boundary():
    for mode in ("eager", "lazy"):
        work, calls, reported = Fleet(256, mode, 4_000, 4_000).cost(4 * GRID)
        boundaries = 256 * 4
        assert reported <= boundaries + 256, mode  # of 256 x 64 tokens
        assert work <= 4 * boundaries, mode
        assert calls <= 12 * boundaries, mode


def test_a_step_in_which_nothing_happens_costs_nothing():
    for mode in ("eager", "lazy"):
        fleet = Fleet(16, mode, 500, 500)
        before = fleet.cache.statistics().work, fleet.device.calls
        for _ in range(1_000):
            fleet.cache.step()
        assert fleet.cache.statistics().work - before[0] <= 64
        assert fleet.device.calls - before[1] <= 4 * 1_000 + 64, "a look at the first two that wait"


def test_a_lookup_that_waits_for_a_load_does_not_read_the_whole_prompt(monkeypatch):
    """A convoy: all but the first prompt on a prefix are looked up in each step, while threads of the process copy."""
    prefix, *others = [letters(number, 60) for number in range(7)]
    engine = Engine("lazy", device=200, host=400)
    for prompt in (prefix, *others):
        engine.serves(prompt)
    assert engine.asks(prefix + "z").boundary == 60 * 4
    assert engine.starts("first", prefix + "y") is not None
    monkeypatch.setattr(engine.cache.coordinator, "longest_boundary", None)
    assert isinstance(engine.asks(prefix + "z"), Pending)
    with pytest.raises(TypeError):
        engine.asks("another")


class CountingDevice(PooledDevice):
    """Counts the blocks of the order that were read, and not the reads."""

    read = 0

    def soonest_evicted(self):
        for place in super().soonest_evicted():
            self.read += 1
            yield place


@pytest.mark.parametrize("in_use", [0, 190])
def test_a_step_in_which_nothing_happens_reads_no_order(in_use):
    """On a device that is a pool of ours too, where nearly all is in use and where nothing is."""
    engine = Engine("lazy", device=200, host=400, max_tokens=16)
    device = engine.cache._device = engine.cache.edge.offload._device = CountingDevice(engine.gpu)
    for number in range(3):
        engine.serves(letters(number, 60))
    engine.gpu.pin(*engine.gpu.allocate(in_use))
    for _ in range(5):
        engine.copies()
    before = device.read
    for _ in range(100):
        engine.steps()
    assert device.read == before > 0


def test_a_step_that_can_store_nothing_costs_nothing():
    """Whether its stores are on their way and do not land, or the host is full of pins."""
    for host, lands in ((1_000, False), (10, True)):
        engine = Engine("lazy", QueueSlots(600), host, planner=PLANNER, max_tokens=200 * GRID)
        for number in range(20):
            engine.starts(str(number), letters(number, 30), load=False)
            engine.fills(str(number))
            engine.ends(str(number))
            if not number:
                engine.copies()
                leases = [engine.reserves(letters(0, at)) for at in range(1, 31)]
        for _ in range(30):  # until the sweep of what is remembered has caught up
            transfers = engine.steps().transfers
            engine.reports(transfers if lands else ())
        before = engine.cache.statistics().work, engine.device.calls
        for _ in range(20):
            engine.cache.step()
        assert engine.cache.statistics().work == before[0]
        assert engine.device.calls <= before[1] + 3 * 20
        del leases


def test_a_boundary_in_decode_costs_no_more_after_many_checkpoints():
    """Checkpoints that the host has are looked at again at the end of the request, and not at each boundary."""

    def work(chunks):
        engine = Checkpointing(FULL, STATE, host=3_000, device=3_000, checkpoint_interval=GRID_OF_CHECKPOINTS)
        prompt = letters(0, chunks + 4)
        engine.requests[prompt] = Request(prompt, chain(prompt), chunks * GRID_OF_CHECKPOINTS)
        engine.cache.admit(engine.requests[prompt], 0, now=0.0)
        engine.computes(prompt, chunks)
        engine.rests()
        before = engine.cache.statistics().work
        for end in range(chunks + 1, chunks + 5):
            engine.computes(prompt, end, keep=())
            engine.rests()
        assert engine.cache.statistics().checkpoints_stored >= chunks - 1
        return engine.cache.statistics().work - before

    assert work(400) == work(20) <= 5 * 4


def test_each_step_looks_at_its_portion_of_what_is_remembered_however_many_ranks_report():
    def remembered_after_each_step(ranks: int) -> list[int]:
        engine = Engine("lazy", device=2_000, host=10, ranks=ranks)
        for number in range(10):
            engine.starts(str(number), letters(number, 200))
            engine.computes(str(number))
            engine.ends(str(number))
        engine.device_forgets()
        after = []
        for _ in range(30):
            engine.cache.step()
            for rank in range(ranks):
                engine.reports(rank=rank)
            after.append(engine.cache.statistics().remembered)
        return after

    alone = remembered_after_each_step(1)
    assert alone == remembered_after_each_step(4) and alone[0] > alone[-1] == 0


def test_bad_blocks_are_looked_for_only_when_there_are_some():
    fleet = Fleet(16, "eager", 500, 500)

    class Never:
        def stores(self):
            raise AssertionError("all transfers were gone through for nothing")

    fleet.cache.edge._completion._ledger = Never()
    fleet.cache.invalidated(())
    with pytest.raises(AssertionError, match="for nothing"):
        fleet.cache.invalidated((0,))  # the control: this one has to look


def test_a_pool_a_hundred_times_larger_costs_no_more():
    for mode in ("eager", "lazy"):
        small = Fleet(32, mode, 600, 600).cost(3 * GRID)
        large = Fleet(32, mode, 60_000, 60_000).cost(3 * GRID)
        for here, there in zip(small, large, strict=True):
            assert there <= here + here // 10 + 8, (mode, small, large)


def test_a_device_that_has_been_covered_is_not_looked_at_again():
    """A device full of waiting chunks, and no step that allocates."""
    fleet = Fleet(32, "lazy", 600, 6_000)
    for _ in range(6 * GRID):
        fleet.step()
    for id in list(fleet.holdings):
        fleet.cache.finished(id, fleet.tokens[id])
        fleet.leaves(id)
    for _ in range(20):
        fleet.step()
    before = fleet.cache.statistics().work
    for _ in range(500):
        fleet.step()
    assert fleet.cache.statistics().work - before <= 8


def work_on_a_declined_front(chunks):
    """A step in which so many chunks come into the front, of a prompt that was had only once."""
    engine = Engine("lazy", device=4 * chunks, host=2 * chunks, max_tokens=4 * chunks, store_after=2)
    engine.starts("r", letters(0, chunks))
    engine.computes("r")
    engine.ends("r")
    before = engine.cache.statistics().work
    engine.gpu.allocate(len(engine.gpu.free))
    engine.copies()
    return engine.cache.statistics().work - before


def work_on_what_leaves_and_is_declined(chunks):
    """So many chunks of a prompt that was had only once leave the device at once."""
    engine = Engine("lazy", device=chunks, host=2 * chunks, hands_out_first=True, store_after=2)
    engine.starts("r", letters(0, chunks))
    engine.computes("r")
    engine.ends("r")
    before = engine.cache.statistics()
    engine.device_forgets()
    engine.cache.step()
    after = engine.cache.statistics()
    assert after.store_declined == before.store_declined + chunks
    return after.work - before.work


@pytest.mark.parametrize("work", [work_on_a_declined_front, work_on_what_leaves_and_is_declined])
def test_chunks_that_are_declined_cost_once(work):
    few, many = work(50), work(500)
    assert 0 < few < many <= 11 * few
