"""Resets, with real files: what a process has said before it ends is what the next one goes by."""

import time

import pytest

from tests.test_host_tier import engine_with, serve, tier


@pytest.fixture
def left(tmp_path):
    """Files that an engine has left."""
    first = engine_with(tier(tmp_path, offload="eager"))
    serve(first, number=8)
    first.host.close()
    assert found_by(tmp_path) > 0
    return tmp_path


def found_by(path):
    """How many chunks an engine finds there that does nothing else."""
    engine = engine_with(tier(path, offload="eager"))
    deadline = time.monotonic() + 10
    while engine.host.statistics().tier.state == "opening" and time.monotonic() < deadline:
        engine.step()
    found = engine.host.statistics().tier.found
    engine.host.close()
    return found


def test_a_reset_counts_although_the_process_ends_before_the_next_step(left):  # S8.15
    engine = engine_with(tier(left, offload="eager"))
    for _ in range(20):
        engine.step()
    engine.host.reset()
    engine.host.close()
    assert found_by(left) == 0
