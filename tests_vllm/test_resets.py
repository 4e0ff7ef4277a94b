"""When the host is emptied by vLLM's resets: the option `reset`, under vLLM's own scheduler and block pool."""

import pytest

from tests_vllm.test_groups import every_model, last_boundary, noise, resumed, start  # noqa: F401


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


def test_an_idle_engine_is_told_before_its_next_request(start):  # noqa: F811
    """So files below the host hear of it, also if nothing comes any more."""
    engine, _, _ = filled(start, reset="with_device")
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.connector.has_pending_push_work()
    assert engine.cache.epoch == 1 and engine.cache.statistics().pool.cached == 0
