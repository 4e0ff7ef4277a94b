"""Tests that the machine does not allow, or only in the long run, are skipped, and counted in the last lines. For each
story the longest step of the engine is printed, beside what it may be on an idle machine.
"""

import os
from collections import Counter
from contextlib import closing

import pytest

from tests.stores.disk.mounts import Ext4, Faulty, MountError, missing
from tests.stores.disk.watch import Engine

BAR_CLOCK, BAR_PROCESSOR = 0.5, 0.025  # seconds, of a step on an idle machine
MISSING = missing()
if "DISK_SECONDS" not in os.environ:
    MISSING["patience"] = "what only the long run has (DISK_SECONDS=8)"
told = []  # of each story
skipped = Counter()


def pytest_configure(config):
    config.addinivalue_line("markers", "on(name): skipped where this machine does not have it")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("on"):
        if why := MISSING.get(mark.args[0]):
            skipped[why] += 1
            pytest.skip(why)


def pytest_terminal_summary(terminalreporter):
    if told:
        terminalreporter.line(
            "the longest step, ms of clock and of processor (bar: 500, 25); compared blocks; the story"
        )
    for story, seen in told:
        above = " ABOVE THE BAR" if seen["clock"] > BAR_CLOCK or seen["processor"] > BAR_PROCESSOR else ""
        times = f"{seen['clock'] * 1e3:8.1f} {seen['processor'] * 1e3:7.1f}"
        terminalreporter.line(f"{times} {seen['compared']:7} {story}{above}")


def pytest_unconfigure(config):
    for why, count in skipped.items():
        config.get_terminal_writer().line(f"not tested: {count} of tests/stores/disk: {why}")


class Bed:
    """Engines of one test, on a tier in `path`."""

    def __init__(self, path, talks):
        self.path = path
        self._talks = talks
        self.engines = []

    def engine(self, **options):
        engine = Engine(self.path, self._talks / f"talk-{len(self.engines)}", **options)
        self.engines.append(engine)
        return engine

    def story(self, engine, name):
        return Story(engine, name)

    def close(self):
        for engine in self.engines:
            engine.kill()


class Story:
    """Whatever happens in it, no byte is wrong, and the engine has not ended."""

    def __init__(self, engine, name):
        self._engine, self._name = engine, name

    def __enter__(self):
        self._compared = self._engine.begin_story()["compared"]

    def __exit__(self, kind, *rest):
        if kind is None:
            seen = self._engine.seen
            told.append((self._name, {**seen, "compared": seen["compared"] - self._compared}))
            assert seen["wrong"] == 0, f"{seen}\n{self._engine.log[-4000:]}"


@pytest.fixture
def bed(tmp_path):
    """On the disk of the machine."""
    (tmp_path / "tier").mkdir()
    with closing(Bed(tmp_path / "tier", tmp_path)) as made:
        yield made


@pytest.fixture
def ext4(tmp_path):
    with closing(mounted(Ext4, tmp_path)) as made:
        yield made


@pytest.fixture
def faulty(tmp_path):
    with closing(mounted(Faulty, tmp_path)) as made:
        yield made


def mounted(kind, folder):
    """Skips the test where the kernel refuses what seemed to be there, as it may in a container."""
    try:
        return kind(folder)
    except MountError as error:
        skipped[str(error)] += 1
        pytest.skip(str(error))


@pytest.fixture
def on_ext4(ext4, tmp_path):
    with closing(Bed(ext4.path, tmp_path)) as made:
        yield made


@pytest.fixture
def on_faulty(faulty, tmp_path):
    with closing(Bed(faulty.path, tmp_path)) as made:
        yield made
