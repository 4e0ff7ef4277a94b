"""A keeper with files or a store below its pool, as a process, and what the files have."""

import json

from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.records import SIZE, parse, seed_of
from cpu_prefix_cache.stores.opening import GROUP
from tests.support.host_engine import CHUNK_BYTES
from tests.support.packages import install
from tests.support.threads import wait_until
from tests.unit.keeper.pool_engine import KeeperProcess


def install_store(folder, monkeypatch):
    """Let keepers have stores such as folder:///mnt/kv, of a package in this folder."""
    package = folder / "package"
    package.mkdir()
    install(package, monkeypatch, GROUP, {"folder": "tests.unit.stores.example_store:FolderStore"})
    monkeypatch.setattr(KeeperProcess, "packages", (package,))


class PatientKeeper(KeeperProcess):
    """It waits long for what is below its pool."""

    program = ("-m", "tests.unit.keeper.patient_keeper")


class NodeWithStore(PatientKeeper):
    """The keeper of one of several nodes, which have this store."""

    def __init__(self, folder, url, **options):
        folder.mkdir()
        super().__init__(folder, slots=128, below=url, **{"adopt-seconds": 0, **options})


class Node(PatientKeeper):
    """A keeper, with files that have so many slots, or 4 times the pool's."""

    def __init__(self, folder, slots=64, block_bytes=CHUNK_BYTES, file_slots=None, **options):
        self.files = folder / "files"
        self.files.mkdir()
        size = (file_slots or 4 * slots) * (block_bytes + SIZE) + (64 << 10)
        options = {"adopt-seconds": 0, "below": f"file:{self.files}:{size}", **options}
        super().__init__(folder, slots, block_bytes, **options)

    def begins_again(self):
        """Keeper and engines are gone; the next keeper has taken in what the files have."""
        self.kill()
        self.start()

    def is_open(self):
        return "is open below the pool" in self.log.read_text()

    def has_opened(self):
        wait_until(self.is_open)

    @property
    def folder(self):
        (found,) = self.files.glob("*/rank-0-of-1")
        return found

    def records(self):
        """The seed of the records, and the records, slot by slot; None: it holds nothing."""
        made_for = json.loads((self.folder / "manifest.json").read_text())
        seed = seed_of(Namespace(tuple(made_for["namespace"].items())).digest, 0, 1)
        data = (self.folder / "records").read_bytes()
        return seed, [parse(data[at : at + SIZE], seed) for at in range(0, len(data), SIZE)]

    def holds(self, slots):
        wait_until(lambda: sum(record is not None for record in self.records()[1]) >= slots)


class UsualNode(Node):
    """One that does not."""

    program = KeeperProcess.program
