"""kill -9 of engines and of the keeper, at any moment: no wrong byte, no slot lost, and the others go on.

A wrong byte ends an engine, and so the test. After a kill the engines that live serve on, after one of the keeper with
none and with the next one; every second time it is measured how long it takes until some engine loads again.
"""

import multiprocessing
import os
import random
import time
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.support.host_engine import CHUNK_BYTES
from tests.support.threads import wait_until
from tests.unit.keeper.hybrid_engine import BLOCK_BYTES, HybridEngine
from tests.unit.keeper.lives import LOADED, SERVED, all_slots, full, live
from tests.unit.keeper.node_with_files import UsualNode, install_store
from tests.unit.keeper.pool_engine import ROOT, KeeperProcess

KILLS = int(os.environ.get("CRASH_KILLS", "20"))
ENGINES = 3
START_SECONDS = 60.0


class Model(NamedTuple):
    """Engines of one kind. A prompt of so many `chunks`, and what it takes to resume after it, fill all slots."""

    engine: Any
    chunks: int
    slots: int
    block_bytes: int


MODELS = {
    "full attention": Model(full, 20, 20, CHUNK_BYTES),
    "a window and a state": Model(HybridEngine, 30, 30 * 3 + 4 + 1, BLOCK_BYTES),
}

# A server of forks, which has imported torch: an engine starts in milliseconds, and has no thread of ours.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.unit.keeper.lives"])


@pytest.fixture(autouse=True)
def _path_of_the_server(monkeypatch):
    """Its modules are those of this tree."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


class Lives:
    """Engines that are started again when they are killed. `counts` are of all lives of each."""

    def __init__(self, model, keeper, draw):
        self.model, self.keeper, self.draw = model, keeper, draw
        self.is_over = context.RawValue("b", 0)
        self.counts = [context.RawArray("q", 3) for _ in range(ENGINES)]
        self.processes = [self.begin(at) for at in range(ENGINES)]

    def begin(self, at):
        arguments = self.model.engine, self.keeper.address, self.draw.random(), self.is_over, self.counts[at]
        process = context.Process(target=live, args=arguments, daemon=True)
        process.start()
        return process

    def served(self):
        return [counts[SERVED] for counts in self.counts]

    def loaded(self):
        return sum(counts[LOADED] for counts in self.counts)

    def all_serve(self, but=None):
        """Wait until each has served one more request, `but` that one."""
        before = self.served()
        others = [at for at in range(ENGINES) if at != but]
        self.wait_until(lambda: all(self.served()[at] > before[at] for at in others), "an engine does not go on")

    def wait_until(self, is_so, sentence):
        until = time.monotonic() + START_SECONDS
        while not is_so():
            self.check()
            assert time.monotonic() < until, sentence
            time.sleep(0.01)

    def check(self):
        assert {process.exitcode for process in self.processes} <= {None}, "an engine has ended by itself"

    def kill(self, at):
        self.check()
        self.processes[at].kill()
        self.processes[at].join()
        self.processes[at] = self.begin(at)

    def end(self):
        self.is_over.value = 1
        for process in self.processes:
            process.join(START_SECONDS)
        assert {process.exitcode for process in self.processes} == {0}

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


def kill_keeper(lives, keeper, draw):
    """Seconds from its end until an engine loads again; None where it was not waited for."""
    is_missing_for_long = draw.random() < 0.3
    if is_missing_for_long:
        lives.all_serve()  # they have joined
    keeper.kill()
    began = time.monotonic()
    if is_missing_for_long:
        lives.all_serve()
    keeper.start()
    if draw.random() < 0.5:
        return None
    before = lives.loaded()
    lives.wait_until(lambda: lives.loaded() > before, "nothing is found again")
    return time.monotonic() - began


def kill_all(lives, keeper):
    """All of a node: nothing is left but files."""
    for process in lives.processes:
        process.kill()
    keeper.kill()
    for at, process in enumerate(lives.processes):
        process.join()
        lives.processes[at] = lives.begin(at)
    keeper.start()
    lives.all_serve()


def survives(model, folder, kills, seed, keeper_at=KeeperProcess, of_all=0):
    """`of_all` of three kills are of a whole node, beside those of engines and of the keeper."""
    draw, back, began = random.Random(seed), [], time.monotonic()
    of_keeper = of_nodes = 0
    with keeper_at(folder, slots=model.slots, block_bytes=model.block_bytes) as keeper:
        lives = Lives(model, keeper, draw)
        try:
            lives.all_serve()
            for _ in range(kills):
                time.sleep(draw.uniform(0.0, 0.1))
                victim = draw.randint(0, ENGINES)
                if draw.random() * 3 < of_all:
                    of_nodes += 1
                    kill_all(lives, keeper)
                elif victim < ENGINES:
                    lives.kill(victim)
                    lives.all_serve(but=victim)
                else:
                    of_keeper += 1
                    back += [kill_keeper(lives, keeper, draw)]
            lives.all_serve()
            lives.end()
        finally:
            lives.stop()
        assert lives.loaded() > kills
        with model.engine(keeper.address) as last:
            wait_until(lambda: takes_all(last, model.chunks))  # else a slot was lost
    measured = sorted(each for each in back if each is not None) or [0.0]
    print(
        f"{kills} kills in {time.monotonic() - began:.0f} s, {of_keeper} of them of the keeper and "
        f"{of_nodes} of all: {sum(lives.served())} "
        f"requests served, {lives.loaded()} chunks loaded, no wrong byte, no slot lost; an engine loads again after "
        f"{measured[len(measured) // 2]:.1f} s in the median and {measured[-1]:.1f} s at most ({len(measured)} times)"
    )


def takes_all(engine, chunks):
    """Whether it can have all slots of the pool, once nothing is written to files any more."""
    engine.stores(all_slots(chunks))
    loaded = engine.serves(all_slots(chunks))
    engine.rests()
    engine.forgets()
    return loaded == chunks


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_engines_and_keepers_are_killed_at_any_moment(tmp_path, model):
    survives(MODELS[model], tmp_path, KILLS, seed=KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_nodes_with_files_are_killed_at_any_moment(tmp_path, model):
    survives(MODELS[model], tmp_path, KILLS, seed=KILLS, keeper_at=partial(UsualNode, **{"adopt-seconds": 2}), of_all=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_nodes_with_a_store_are_killed_at_any_moment(tmp_path, monkeypatch, model):
    install_store(tmp_path, monkeypatch)
    (tmp_path / "store").mkdir()
    node = partial(KeeperProcess, below=f"folder://{tmp_path / 'store'}", **{"adopt-seconds": 2})
    survives(MODELS[model], tmp_path, KILLS, seed=KILLS, keeper_at=node, of_all=1)
