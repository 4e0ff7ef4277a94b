"""kill -9 of engines and of the keeper, at any moment: no wrong byte, no slot lost, and the others go on."""

import multiprocessing
import os
import random
import time

import pytest

from tests.unit.keeper.lives import LOADED, SERVED, all_slots, live
from tests.unit.keeper.pool_engine import ROOT, KeeperProcess, PoolEngine

KILLS = int(os.environ.get("CRASH_KILLS", "20"))
ENGINES = 3
SLOTS = 20
START_SECONDS = 60.0

# A server of forks, which has imported torch: an engine starts in milliseconds, and has no thread of ours.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.unit.keeper.lives"])


@pytest.fixture(autouse=True)
def _path_of_the_server(monkeypatch):
    """Its modules are those of this tree."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


class Lives:
    """Engines that are started again when they are killed. `counts` are of all lives of each."""

    def __init__(self, keeper, draw):
        self.keeper, self.draw = keeper, draw
        self.is_over = context.Event()
        self.counts = [context.RawArray("q", 3) for _ in range(ENGINES)]
        self.processes = [self.begin(at) for at in range(ENGINES)]

    def begin(self, at):
        arguments = self.keeper.address, self.draw.random(), self.is_over, self.counts[at]
        process = context.Process(target=live, args=arguments, daemon=True)
        process.start()
        return process

    def served(self):
        return [counts[SERVED] for counts in self.counts]

    def all_serve(self):
        """Wait until each has served one more request."""
        before, until = self.served(), time.monotonic() + START_SECONDS
        while not all(now > then for now, then in zip(self.served(), before, strict=True)):
            self.check()
            assert time.monotonic() < until, "an engine does not go on"
            time.sleep(0.01)

    def check(self):
        assert {process.exitcode for process in self.processes} <= {None}, "an engine has ended by itself"

    def kill(self, at):
        self.check()
        self.processes[at].kill()
        self.processes[at].join()
        self.processes[at] = self.begin(at)

    def end(self):
        self.is_over.set()
        for process in self.processes:
            process.join(START_SECONDS)
        assert {process.exitcode for process in self.processes} == {0}

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


def survives(folder, kills, seed):
    draw = random.Random(seed)
    with KeeperProcess(folder, slots=SLOTS) as keeper:
        lives = Lives(keeper, draw)
        try:
            lives.all_serve()
            for _ in range(kills):
                time.sleep(draw.uniform(0.0, 0.15))
                victim = draw.randint(0, ENGINES)
                if victim < ENGINES:
                    lives.kill(victim)
                else:
                    keeper.kill()
                    time.sleep(draw.choice([0.0, 0.1]))
                    keeper.start()
            lives.all_serve()
            lives.end()
        finally:
            lives.stop()
        assert sum(counts[LOADED] for counts in lives.counts) > kills
        with PoolEngine(keeper.address, device_blocks=SLOTS) as last:
            last.stores(all_slots(SLOTS))
            assert last.serves(all_slots(SLOTS)) == SLOTS, "a slot was lost"


@pytest.mark.slow
def test_engines_and_keepers_are_killed_at_any_moment(tmp_path):
    survives(tmp_path, KILLS, seed=KILLS)
