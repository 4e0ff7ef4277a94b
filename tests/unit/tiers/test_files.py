"""Resets, with real files: the last reset of a process holds for the next one."""

import os
import threading
import time

import pytest

from tests.unit.test_host_tier import engine_with, serve, tier


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


def watched(monkeypatch):
    """The calls to the system that may wait for a disk, from now on: name and thread of each."""
    calls = []

    def watch(name):
        call = getattr(os, name)

        def instead(*arguments, **named):
            calls.append((name, threading.current_thread() is threading.main_thread()))
            return call(*arguments, **named)

        monkeypatch.setattr(os, name, instead)

    for name in ("open", "pread", "preadv", "pwrite", "pwritev", "fsync", "replace", "unlink", "stat", "listdir"):
        watch(name)
    return calls


def test_the_engines_thread_waits_for_no_file(left, monkeypatch):
    """Not in steps, not in resets, not when it takes in what was found: a frozen disk costs no step (rule 15)."""
    engine = engine_with(tier(left, offload="eager"))
    calls = watched(monkeypatch)
    for seed in range(3):
        wrong, seen = serve(engine, number=15, seed=seed)
        assert wrong == []
        engine.host.reset()
    monkeypatch.undo()
    engine.host.close()
    assert seen.found > 0 and seen.hit_tokens > 0
    by_others = {name for name, is_main in calls if not is_main}
    assert {"pwrite", "pwritev", "preadv", "fsync", "replace"} <= by_others, "what threads of the tier do is seen"
    assert [name for name, is_main in calls if is_main] == []
