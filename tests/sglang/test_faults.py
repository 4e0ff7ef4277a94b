"""Copies that fail or are late, requests that go, a host that is too small, a reset at any time: every answer is of the
right bytes, and no page is lost.
"""

import random
from threading import Semaphore
from types import SimpleNamespace

import pytest

from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import CorruptingCopier, FailingCopier, LateCopier
from tests.sglang.copiers import Failing, offers_are_late, with_copier
from tests.sglang.engine import LONGER, PROMPT, VOCABULARY, Engine, evicted, server_args
from tests.sglang.models import KINDS
from tests.support.simulated_driver import SimulatedDriver, pins_host_caches
from tests.support.threads import wait_until

KIND = KINDS["all"]
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def check(engine):
    """Check all that holds where nothing runs."""
    engine.drain()
    engine.linker.host.drain()
    engine.linker.host.cache.check_valid()
    assert engine.wrong == []
    assert engine.held_tokens == 0
    assert len(engine.answered) + len(engine.aborted) == engine.num_requests


# One fault


@every_kind
def test_a_load_that_fails_aborts_its_request_and_the_next_one_computes(monkeypatch, kind):
    copiers = with_copier(monkeypatch, Failing)
    with evicted(kind) as engine:
        copiers[0].fails = Direction.LOAD
        engine.run(LONGER)
        copiers[0].fails = None
        assert len(engine.aborted) == 1
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == len(LONGER) and len(engine.answered) == 2
        check(engine)


@every_kind
def test_a_store_that_fails_is_offered_again(monkeypatch, kind):
    copiers = with_copier(monkeypatch, Failing)
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        copiers[0].fails = Direction.STORE
        engine.run(PROMPT)
        engine.run(LONGER)  # of what the device has
        engine.evict()
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed < len(LONGER) // 2
        check(engine)


@every_kind
def test_a_node_without_room_on_the_host_is_offered_again(monkeypatch, kind):
    """On a device there is none until the region is pinned."""
    driver = SimulatedDriver()
    driver.gate = Semaphore(0)
    pins_host_caches(monkeypatch, driver)
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        engine.run(PROMPT)
        driver.gate.release(100)
        host = engine.linker.host
        wait_until(lambda: host.statistics().ready_bytes == host.statistics().host_bytes)
        engine.run(LONGER)  # of what the device has
        engine.evict()
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed < len(LONGER) // 2
        check(engine)
        engine.tree.release_host_resources()


def offered_again(engine):
    """The nodes that SGLang offers with a prompt that it has offered before."""
    engine.run(PROMPT)
    offered = []
    engine.linker.offload = lambda *given, **others: offered.append(given)
    engine.run(PROMPT)
    return offered


@every_kind
def test_a_node_that_the_host_keeps_is_offered_once(kind):
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        assert offered_again(engine) == []


@every_kind
def test_a_host_cache_that_is_off_is_offered_each_node_once(kind):
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        engine.linker.host.cache.edge.is_off = True
        assert offered_again(engine) == []


@every_kind
def test_a_client_that_goes_while_its_request_waits(kind):
    with evicted(kind) as engine:
        request = engine.submit(LONGER)
        request.init_next_round_input(engine.tree)
        assert request.host_hit_length
        engine._take_back_state(request)
        engine.abort(request)
        assert engine.linker.host.statistics().leases == 0
        engine.run(LONGER)
        check(engine)


@every_kind
def test_a_load_that_is_cancelled_before_it_has_begun(kind):
    with evicted(kind) as engine:
        before = engine.linker.host.statistics().cache.bytes_loaded
        request = engine.submit(LONGER)
        admitted = engine._admit()
        assert admitted == [request] and engine.linker.host.statistics().leases == 1
        engine.tree.release_aborted_request(request.cache_request_handle)
        assert engine.linker.host.statistics().leases == 0
        assert engine.tree.ready_to_load_host_cache() == -1
        assert engine.linker.host.statistics().cache.bytes_loaded == before


@every_kind
def test_a_client_that_goes_when_half_of_its_prompt_is_computed(kind):
    with evicted(kind, chunk=16) as engine:
        request = engine.submit([*PROMPT[:20], *range(500, 540)])
        engine.step()
        assert request is engine.chunked
        engine.abort(request)
        engine.run(LONGER)
        check(engine)


@every_kind
def test_a_promise_that_was_evicted_meanwhile_is_computed(kind):
    """SGLang keeps a promise of an earlier round, in which a request was not admitted."""
    with evicted(kind, "12KiB") as engine:
        request = engine.submit(LONGER)
        request.init_next_round_input(engine.tree)
        promised = request.host_hit_length
        engine._take_back_state(request)
        engine.waiting.remove(request)
        for seed in range(20):
            engine.run(random.Random(seed).sample(range(VOCABULARY), 40))
        assert promised and engine.tree.linker.has_hit(request.rid)
        assert engine.tree.linker.load_back(request) == (0, request.last_node)
        engine.evict()
        assert engine.held_tokens == 0


@every_kind
def test_a_flush_forgets_what_the_host_has(kind):
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        engine.run(PROMPT)
        engine.flush()
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == len(LONGER)
        check(engine)


@every_kind
def test_a_flush_while_stores_are_under_way_registers_nothing(monkeypatch, kind):
    copiers = with_copier(monkeypatch, lambda copier, tensors: LateCopier(copier, tensors, queries=30))
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        engine.submit(PROMPT)
        while engine.waiting or engine.chunked:
            engine.step()
        assert engine.tree.linker.pending_offloads
        engine.flush()
        assert not engine.tree.linker.pending_offloads
        copiers[0].queries = engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == len(LONGER)
        check(engine)


@every_kind
def test_a_flush_forgets_pages_of_which_no_index_has_arrived(monkeypatch, kind):
    """Others are computed into these pages: they are not to be stored as what was offered."""
    offers_are_late(monkeypatch)
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        engine.submit(PROMPT)
        while engine.waiting or engine.chunked:
            engine.step()
        assert engine.linker._offered
        engine.flush()
        engine.run(list(range(400, 450)))
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == len(LONGER)
        check(engine)


def test_stores_are_reported_in_their_order():
    """SGLang takes the oldest outcome for that of the oldest store."""
    with server_args(host_bytes="1MiB") as args:
        linker = Engine(args, KINDS["full"]).linker
        stores = [
            SimpleNamespace(is_done=done, is_kept=kept) for done, kept in ((False, False), (True, False), (True, True))
        ]
        linker._offloads.extend(stores)
        assert linker.num_completed_offloads() == 0
        stores[0].is_done = stores[0].is_kept = True
        assert linker.num_completed_offloads() == 3
        assert [linker.pop_completed_offload() for _ in stores] == [True, False, True]


def test_a_node_is_locked_until_its_store_has_ended(monkeypatch):
    with_copier(monkeypatch, lambda copier, tensors: LateCopier(copier, tensors, queries=30))
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, KINDS["full"])
        engine.submit(PROMPT)
        while engine.waiting or engine.chunked:
            engine.step()
        engine.evict()
        assert engine.held_tokens
        engine.settle()
        assert engine.held_tokens == 0


# Any mix of faults

FAULTS = {
    "none": None,
    "late": LateCopier,
    "failing": lambda copier, tensors: FailingCopier(copier, tensors, share=0.05),
    "late and failing": lambda copier, tensors: LateCopier(FailingCopier(copier, tensors, share=0.05)),
}


def requests(engine, seed, num_requests):
    """Prompts that share beginnings; some are aborted, some find that everything is flushed."""
    draw = random.Random(seed)
    bases = [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(5, 50))] for _ in range(6)]
    for _ in range(num_requests):
        base = draw.choice(bases)
        begin = base if draw.random() < 0.5 else base[: draw.randrange(1, len(base) + 1)]
        tokens = [*begin, *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20)))]
        if draw.random() < 0.4 and len(tokens) < 60:
            bases[draw.randrange(len(bases))] = tokens
        engine.submit(tokens)
        while draw.random() < 0.5:
            engine.step()
        if draw.random() < 0.1 and engine.waiting:
            engine.abort(draw.choice(engine.waiting))
        if draw.random() < 0.1 and engine.chunked is not None:
            engine.abort(engine.chunked)
        if draw.random() < 0.02:
            engine.drain()
            engine.flush()
        if draw.random() < 0.15:
            engine.evict()


@pytest.mark.parametrize("host_bytes", ["1MiB", "32KiB"])
@pytest.mark.parametrize("fault", FAULTS)
@every_kind
def test_every_answer_is_of_the_right_bytes(monkeypatch, kind, fault, host_bytes):
    if FAULTS[fault] is not None:
        with_copier(monkeypatch, FAULTS[fault])
    if "late" in fault:
        offers_are_late(monkeypatch)
    with server_args(host_bytes=host_bytes) as args:
        engine = Engine(args, kind)
        requests(engine, seed=fault, num_requests=60)
        check(engine)
        assert engine.linker.host.statistics().cache.bytes_loaded
        engine.evict()
        assert engine.held_tokens == 0
        engine.tree.release_host_resources()


@every_kind
def test_a_damaged_load_among_all_of_these_is_seen(monkeypatch, kind):
    with_copier(monkeypatch, lambda copier, tensors: CorruptingCopier(copier, tensors, loads=None))
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, kind)
        requests(engine, seed="none", num_requests=60)
        assert engine.wrong
