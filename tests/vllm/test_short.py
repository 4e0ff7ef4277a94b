"""Short hits, for whose loads compute waits and no request, under vLLM's scheduler."""

import pytest

from connector.vllm.scheduler import SchedulerHalf
from tests.vllm.engine import (
    BLOCK,
    LOADING,
    POISON,
    RUNNING,
    Engine,
    FakeRank,
    drafting,
    full,
    latent,
    state,
    window,
)
from tests.vllm.keeper_line import KeeperHere
from tests.vllm.test_connector import PROMPT, flood
from tests.vllm.test_stress import live_through

ANY = 2**40  # bytes
WAITING = ["windows", "states", "blocks of two lengths"]
TWO_RANKS = dict(ranks=2, tensor_parallel=True)
MODELS = {
    "a latent in one region": TWO_RANKS | dict(groups=[latent()]),
    "context parallel": TWO_RANKS | dict(context_parallel=2),
    "a drafter": dict(drafter=drafting("eagle", drafts=0)),
    "priorities": dict(priorities=True),
}


@pytest.fixture
def start(tmp_path):
    """An engine that has PROMPT on the host, and not on the device."""

    def start(others=12, **options):
        engine = Engine(tmp_path, **{"host_blocks": 1000, "slowest": 1, "sync_load_bytes": ANY, **options})
        while engine.cache.pool.statistics().ready < engine.cache.pool.capacity:
            engine.step()
        engine.run(PROMPT)
        flood(engine, others)
        return engine

    return start


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_a_hit_is_computed_in_the_step_that_loads_it(start, offload):
    engine = start(offload=offload)
    loaded = engine.submit(PROMPT)
    engine.step()
    request = engine.requests[loaded]
    assert request.status is RUNNING and request.num_output_tokens == 1
    assert engine.admitted[-1] == (0, 28)
    engine.drain()
    engine.check_nothing_leaked()


def test_a_part_of_a_hit_that_ends_within_a_chunk_is_not_computed_on(start, monkeypatch):
    """No release takes one."""
    engine = start()
    taken = SchedulerHalf.update_state_after_alloc
    monkeypatch.setattr(
        SchedulerHalf,
        "update_state_after_alloc",
        lambda half, request, blocks, count: taken(half, request, blocks, count - 1),
    )
    engine.submit(PROMPT)
    with pytest.raises(RuntimeError, match="no whole chunks, and would compute behind them"):
        engine.step()


def test_stores_of_what_it_overwrites_come_first(start):
    """The host has no room for all that the device holds: so nothing is stored before it leaves."""
    engine = start(offload="lazy", others=6, host_blocks=40)
    engine.submit(PROMPT)
    stores = engine.counts["stores of what a load overwrites"]
    engine.step()
    assert engine.counts["stores of what a load overwrites"] > stores
    engine.drain()
    engine.check_nothing_leaked()


def test_control_a_step_that_computes_before_its_load_is_found(start, monkeypatch):
    engine = start(offload="eager")

    def later(rank, id):
        rank.device |= {block: POISON for _, block in rank.copies[id].writes}

    monkeypatch.setattr(FakeRank, "_load_now", later)
    engine.submit(PROMPT)
    with pytest.raises(AssertionError, match="reads wrong KV"):
        engine.step()


def test_more_than_the_bytes_of_a_step_waits(start):
    engine = start(offload="eager")
    other = list(range(100, 130))
    engine.run(other)
    flood(engine)
    engine.half._most_awaited = 10 * BLOCK
    first, second = engine.submit(PROMPT), engine.submit(other)
    engine.step()
    assert [engine.requests[id].status for id in (first, second)] == [RUNNING, LOADING]
    engine.drain()
    engine.check_nothing_leaked()


@pytest.mark.parametrize(("room", "status"), [(56, RUNNING), (55, LOADING)], ids=["room for both", "no room"])
def test_a_hit_behind_a_load_that_a_request_waits_for_takes_room_beside_it(start, room, status):
    """Both loads share a link, in turn: the step would wait for both."""
    engine = start(offload="eager")
    other = list(range(100, 130))
    engine.run(other)
    flood(engine)
    engine.half._most_awaited = 0
    engine.ranks[0].pace = 3
    waiting = engine.submit(other)
    engine.step()
    engine.half._most_awaited = room
    behind = engine.submit(PROMPT)
    engine.step()
    assert [engine.requests[id].status for id in (waiting, behind)] == [LOADING, status]
    engine.drain()
    assert not engine.half._parked
    engine.check_nothing_leaked()


def test_chunks_computed_behind_a_load_are_stored_although_their_request_ends_in_that_step(start):
    engine = start(offload="eager")
    longer = [*PROMPT, *range(700, 712)]
    for found in (28, 40):
        engine.run(longer, max_tokens=1)
        assert engine.admitted[-1] == (0, found)
        flood(engine)
    engine.check_nothing_leaked()


@pytest.mark.parametrize("groups", [[full(), window(9)], [full(), state()], [full(block=8), full()]], ids=WAITING)
def test_requests_wait_where_something_uses_blocks_before_the_ranks_have_the_plan(start, groups):
    engine = start(groups=groups, device_blocks=100, offload="eager")
    while any(engine.on_device(PROMPT)):
        flood(engine)
    waiting = engine.submit(PROMPT)
    engine.step()
    assert engine.requests[waiting].status is LOADING
    engine.drain()
    engine.check_nothing_leaked()


def test_requests_wait_in_a_pool_because_its_keeper_may_go_before_the_plan(tmp_path):
    engine = KeeperHere(400).engine(Engine, folder=tmp_path, sync_load_bytes=ANY)
    engine.run(PROMPT)
    flood(engine)
    engine.run(PROMPT)
    assert engine.counts["loads done"] == 1 and not engine.counts["loads computed on"]


@pytest.mark.parametrize(
    ("offload", "blocks"), [("lazy", 48), ("lazy", 140), ("eager", 48)], ids=["lazy", "lazy with room", "eager"]
)
@pytest.mark.parametrize(
    ("ranks", "asynchronous", "seed"),
    [(1, False, 1), (3, False, 5), (2, True, 3)],
    ids=["one-rank", "three-ranks", "async"],
)
def test_no_request_ever_reads_wrong_kv(tmp_path, ranks, asynchronous, seed, offload, blocks):
    """Where compute waits for all loads; test_stress.py has both ways."""
    options = dict(offload=offload, device_blocks=blocks, failure_rate=0.03, sync_load_bytes=ANY)
    engine = Engine(tmp_path, ranks=ranks, asynchronous=asynchronous, seed=seed, **options)
    live_through(engine, requests=300)
    engine.check_nothing_leaked()
    assert engine.counts["loads computed on"] and not engine.counts["loads done"]


@pytest.mark.parametrize("model", MODELS)
def test_no_request_ever_reads_wrong_kv_of_other_models(tmp_path, model):
    engine = Engine(tmp_path, device_blocks=96, failure_rate=0.03, sync_load_bytes=ANY, **MODELS[model])
    live_through(engine, requests=300)
    engine.check_nothing_leaked()
    assert engine.counts["loads computed on"] and not engine.counts["loads done"]
