"""When the host is emptied by vLLM's resets: the option `reset`, under vLLM's own scheduler and block pool."""

import pytest

from tests.vllm.engine import NEVER
from tests.vllm.test_groups import forget, last_boundary, noise, resumed, start  # noqa: F401


def filled(start, **options):  # noqa: F811
    engine = start("full, window, state", offload="eager", **options)
    prompt = noise(engine, 30)
    engine.run(prompt)
    engine.drain()
    return engine, prompt, last_boundary(engine, prompt)


@pytest.mark.parametrize(("mode", "is_kept"), [("with_device", False), ("with_connector", True), ("never", True)])
def test_a_reset_of_the_device_alone(start, mode, is_kept):  # noqa: F811
    engine, prompt, boundary = filled(start, reset=mode)
    assert engine.scheduler.reset_prefix_cache()
    assert resumed(engine, prompt) == (0, boundary if is_kept else 0)
    assert engine.cache.epoch == (0 if is_kept else 1)
    engine.check_nothing_leaked()


@pytest.mark.parametrize(("mode", "is_kept"), [("with_device", False), ("with_connector", False), ("never", True)])
def test_a_reset_of_device_and_connector_is_one(start, mode, is_kept):  # noqa: F811
    engine, prompt, boundary = filled(start, reset=mode)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.cache.epoch == (0 if is_kept else 1), "at once"
    assert resumed(engine, prompt) == (0, boundary if is_kept else 0)
    assert engine.cache.epoch == (0 if is_kept else 1)


def test_a_device_that_was_not_reset_leaves_the_host_as_it_is(start):  # noqa: F811
    """vLLM's reset fails while a request runs, and the caller repeats it."""
    engine, prompt, _ = filled(start, reset="with_device")
    engine.submit(noise(engine, 20), max_tokens=8)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.cache.epoch == 0
    assert engine.scheduler.reset_prefix_cache()
    assert resumed(engine, prompt) == (0, 0) and engine.cache.epoch == 1


def test_a_reset_reaches_an_idle_engine_before_its_next_request(start):  # noqa: F811
    """It reaches the files below the host, also if nothing comes any more."""
    engine, _, _ = filled(start, reset="with_device")
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.connector.has_pending_push_work()
    assert engine.cache.epoch == 1 and engine.cache.statistics().pool.cached == 0


# While copies are in flight


def stored_for_ever(start, **options):  # noqa: F811
    """An engine without requests, whose stores do not end before `go_on`, and the prompt that they store."""
    engine = start("full, window, state", offload="eager", device_blocks=120, **options)
    hold_up(engine)
    prompt = noise(engine, 30)
    engine.submit(prompt)
    step_until(engine, lambda: not engine.requests)
    engine.step()
    assert engine.cache.statistics().storing
    return engine, prompt, last_boundary(engine, prompt)


def step_until(engine, condition) -> None:
    for _ in range(200):
        if condition():
            return
        engine.step()
    raise AssertionError("it does not come to that")


def hold_up(engine) -> None:
    for rank in engine.ranks:
        rank.pace = NEVER


def go_on(engine) -> None:
    for rank in engine.ranks:
        rank.pace = 0
    engine.drain()


@pytest.mark.parametrize(("mode", "is_kept"), [("with_device", False), ("with_connector", True), ("never", True)])
def test_stores_in_flight_do_not_keep_vllm_from_a_reset(start, mode, is_kept):  # noqa: F811
    """Their blocks are not handed out before they have ended, so where the host is kept it has them then."""
    engine, prompt, boundary = stored_for_ever(start, reset=mode)
    lent = engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    assert engine.scheduler.reset_prefix_cache()
    assert not any(engine.on_device(prompt))
    assert engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks() == lent > 0
    assert engine.scheduler.reset_prefix_cache(), "as often as anybody likes"
    other = noise(engine, 30)
    engine.submit(other)
    step_until(engine, lambda: not engine.requests)
    go_on(engine)
    assert resumed(engine, prompt) == (0, boundary if is_kept else 0)
    engine.check_nothing_leaked()


def test_a_request_that_runs_keeps_vllm_from_a_reset_and_no_store_is_lost_by_that(start):  # noqa: F811
    engine, prompt, boundary = stored_for_ever(start, reset="with_device")
    engine.submit(noise(engine, 20), max_tokens=8)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    go_on(engine)
    forget(engine, prompt)
    assert engine.cache.epoch == 0 and resumed(engine, prompt) == (0, boundary)
    engine.check_nothing_leaked()


def test_a_load_in_flight_keeps_vllm_from_a_reset(start):  # noqa: F811
    """Its request has the blocks that it fills, and would go on with KV of before."""
    engine, prompt, boundary = filled(start, reset="with_device")
    forget(engine, prompt)
    hold_up(engine)
    engine.submit(prompt)
    step_until(engine, lambda: engine.cache.statistics().loading)
    assert not engine.scheduler.reset_prefix_cache()
    go_on(engine)
    assert engine.cache.epoch == 0 and engine.admitted[-1] == (0, boundary)
    engine.check_nothing_leaked()


def test_running_requests_are_preempted_by_a_reset_though_stores_are_in_flight(start):  # noqa: F811
    engine, _, _ = stored_for_ever(start, reset="with_device")
    second = noise(engine, 30)
    engine.submit(second, max_tokens=8)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    go_on(engine)
    assert engine.cache.epoch == 1 and resumed(engine, second) != (0, 0), "on the device, from after the reset"
    engine.check_nothing_leaked()


@pytest.mark.parametrize("mode", ["with_device", "with_connector", "never"])
def test_a_reset_of_the_connector_reports_memory_in_use(start, mode):  # noqa: F811
    """vLLM goes to sleep if it reports that none is."""
    engine, prompt, boundary = stored_for_ever(start, reset=mode)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not any(engine.on_device(prompt))
    go_on(engine)
    assert resumed(engine, prompt) == (0, boundary if mode == "never" else 0)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)


def test_a_release_that_would_go_to_sleep_all_the_same_refuses_the_reset(start, monkeypatch):  # noqa: F811
    """vLLM 0.30 raises because its own reset has failed, and for nothing else."""
    monkeypatch.setattr("vllm.__version__", "0.30.0")
    engine, prompt, _ = stored_for_ever(start, reset="with_device")
    assert not engine.scheduler.reset_prefix_cache()
    go_on(engine)
    assert engine.cache.epoch == 0 and any(engine.on_device(prompt))


def test_a_build_that_is_no_release_is_reset_around_copies_too(start, monkeypatch):  # noqa: F811
    monkeypatch.setattr("vllm.__version__", "0.34.0.dev1+g1234567")
    engine, prompt, _ = stored_for_ever(start, reset="with_device")
    assert engine.scheduler.reset_prefix_cache()
    go_on(engine)
    assert engine.cache.epoch == 1 and not any(engine.on_device(prompt))
