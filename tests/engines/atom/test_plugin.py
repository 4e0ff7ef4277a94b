"""ATOM finds the connector in all of its processes, and its scheduler hands the connector its blocks."""

import multiprocessing
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.atom.source import VARIABLE, WHY_NOT_REAL, unpacked

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.kv_transfer.disaggregation.factory import KVConnectorFactory
from atom.model_engine.scheduler import Scheduler

import connector.atom.plugin
from connector.atom.plugin import register
from connector.atom.scheduler import CPUPrefixCacheScheduler
from connector.atom.worker import CPUPrefixCacheWorker
from tests.engines.atom.engine import config_of, transfer_config

ROOT = Path(__file__).parents[3]


def is_known():
    return "cpu_prefix_cache" in KVConnectorFactory._registry


def tell(depth, queue):
    """Whether this process knows the connector, and those that it spawns."""
    queue.put((depth, is_known()))
    if depth:
        child = multiprocessing.get_context("spawn").Process(target=tell, args=(depth - 1, queue))
        child.start()
        child.join()


MAIN = """
import multiprocessing, sys
from tests.engines.atom import source
{register}
if __name__ == "__main__":
    from tests.engines.atom.test_plugin import tell
    queue = multiprocessing.get_context("spawn").Queue()
    tell(2, queue)
    print(sorted(queue.get() for _ in range(3)))
"""


@pytest.mark.parametrize("registers", [True, False])
def test_processes_that_atom_spawns_know_the_connector(tmp_path, registers):
    """An engine's process spawns the ranks' processes; each imports the main module of the program."""
    main = tmp_path / "main.py"
    main.write_text(MAIN.format(register="from connector.atom.plugin import register; register()" if registers else ""))
    path = ":".join(map(str, (ROOT, ROOT / "src", unpacked())))
    env = {"PYTHONPATH": path, "PATH": "", VARIABLE: str(unpacked())}
    ran = subprocess.run([sys.executable, main], capture_output=True, text=True, env=env)
    assert ran.stdout.splitlines()[-1] == str([(depth, registers) for depth in range(3)]), ran.stderr


def test_the_server_registers_where_spawned_processes_import_it():
    KVConnectorFactory._registry.pop("cpu_prefix_cache", None)
    runpy.run_module("connector.atom.serve", run_name="__mp_main__")
    assert is_known()


class Asked:
    """A factory, whose release takes all flags of the connector, or fewer."""

    @classmethod
    def with_flags(
        cls, name, *, worker_module, worker_class, scheduler_module, scheduler_class, requires_pd_staging=True,
        reads_block_regions=True, offload=False,
    ):  # fmt: skip
        cls.said = dict(staging=requires_pd_staging, regions=reads_block_regions, offload=offload)

    @classmethod
    def before_flags(cls, name, *, worker_module, worker_class, scheduler_module, scheduler_class):
        cls.said = {}


@pytest.mark.parametrize(
    ("register_of", "said"),
    [("with_flags", dict(staging=False, regions=True, offload=True)), ("before_flags", {})],
)
def test_the_connector_is_registered_as_offloading(monkeypatch, register_of, said):
    """By the defaults it would be one that sends KV to other instances, and does not offload."""
    monkeypatch.setattr(connector.atom.plugin.KVConnectorFactory, "register", getattr(Asked, register_of))
    register()
    assert Asked.said == said


def test_the_connector_needs_no_staging_pool():
    register()
    assert not KVConnectorFactory.topology_uses_pd_staging(transfer_config(9))


def test_registering_twice_patches_schedulers_once():
    register()
    init = Scheduler.__init__
    register()
    assert Scheduler.__init__ is init
    scheduler = Scheduler(config_of(kv_transfer_config=transfer_config(9)))
    assert isinstance(scheduler.kv_connector, CPUPrefixCacheScheduler)
    assert scheduler.kv_connector._requests.device._pool._pool is scheduler.block_manager.kv


def test_another_connector_is_left_alone():
    register()
    assert Scheduler(config_of(kv_transfer_config={})).kv_connector is None


# Read by ATOM of a connector that offloads by chunks of its own, with a default.
NOT_OURS = {"adjust_prefill_chunk_after_alloc", "should_park_partial_prefill_for_load"}
# Read besides by releases after ffdf3bb5d, with a default.
LATER = {
    "cancel_pending_load",
    "max_pending_saves",
    "release_stalled_save",
    "save_abandon_timeout_s",
    "source_blocks_released",
    "take_source_safe_releases",
}


def test_every_attribute_that_atom_reads_of_a_connector_is_known():
    """ATOM reads by name and takes a default for a missing one, so a name that is new is never noticed there."""
    files = (unpacked() / "atom" / "model_engine").glob("*.py")
    asks = re.compile(r'\b(?:kv_)?connector(?:\.|,\s*")(\w+)|_connector_flag\("(\w+)"')
    asked = {"".join(found) for file in files for found in asks.findall(file.read_text())}
    assert {"is_offload", "get_statistics", "should_defer_free"} <= asked
    assert asked - {*dir(CPUPrefixCacheScheduler), *dir(CPUPrefixCacheWorker)} <= NOT_OURS | LATER
