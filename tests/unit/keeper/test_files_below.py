"""Files below a keeper's pool, with keepers that are processes: what is found when all of a node was killed.

Engines compare every byte that they load (`pool_engine.py`). A test waits for what the files have, and for the keeper's
word that it has taken them in, so that no engine computes what was to be found.
"""

import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest

from cpu_prefix_cache.keeper import questions
from cpu_prefix_cache.keeper.protocol import Kind
from cpu_prefix_cache.offload import prefill_rate
from cpu_prefix_cache.slab.records import SIZE, Record, checksum, pack
from tests.support.host_engine import CHUNK_BYTES, GRID, PATIENCE
from tests.support.threads import wait_until
from tests.unit.keeper.hybrid_engine import BLOCK_BYTES, HybridEngine
from tests.unit.keeper.node_with_files import Node
from tests.unit.keeper.pool_engine import PoolEngine

pytestmark = pytest.mark.usefixtures("patience")

PROMPT = "abcdef"


def damage(node, at=0, forged=False):
    """Flip a bit of each slot; `forged`: and have the records say that this is right."""
    seed, records = node.records()
    blocks = bytearray((node.folder / "blocks").read_bytes())
    table = bytearray((node.folder / "records").read_bytes())
    width = len(blocks) // len(records)
    for slot, record in enumerate(records):
        blocks[slot * width + at] ^= 1
        if record is not None and forged:
            digest = checksum(blocks[slot * width : (slot + 1) * width])
            table[slot * SIZE : (slot + 1) * SIZE] = pack(Record(slot, record.label, digest), seed)
    (node.folder / "blocks").write_bytes(blocks)
    (node.folder / "records").write_bytes(table)


MODELS = {
    "full attention": (PoolEngine, CHUNK_BYTES, 6),
    "a window and a state": (HybridEngine, BLOCK_BYTES, 6 * 3 + 5),
}


@pytest.mark.parametrize("model", MODELS)
def test_all_is_found_after_keeper_and_engines_were_killed(tmp_path, model):
    engine_at, block_bytes, slots = MODELS[model]
    with Node(tmp_path, slots=128, block_bytes=block_bytes) as node:
        with engine_at(node.address) as engine:
            engine.stores(PROMPT)
            node.holds(slots)
        node.begins_again()
        with engine_at(node.address) as engine, engine_at(node.address) as other:
            node.has_opened()
            assert engine.serves(PROMPT) == len(PROMPT)
            engine.rests()
            assert other.serves(PROMPT) == len(PROMPT), "it is in the pool now"


def test_a_keeper_that_is_ended_leaves_its_files_to_the_next_one(tmp_path):
    with Node(tmp_path) as node:
        with PoolEngine(node.address) as engine:
            engine.stores(PROMPT)
            node.holds(len(PROMPT))
        node.kill(signal.SIGTERM)
        assert node.process.returncode == 0
        node.start()
        with PoolEngine(node.address) as engine:
            node.has_opened()
            assert engine.serves(PROMPT) == len(PROMPT)


class EndedNode(Node):
    program = ("-m", "tests.unit.keeper.ended_keeper")


def test_a_keeper_that_is_ended_while_it_begins_to_write_has_written(tmp_path):
    with EndedNode(tmp_path) as node, PoolEngine(node.address) as engine:
        engine.serves(PROMPT)
        engine.rests()
        assert node.process.wait(PATIENCE) == 0
        node.holds(len(PROMPT))
        assert "Traceback" not in node.log.read_text()


@pytest.mark.parametrize(("forged", "loaded"), [(False, 0), (True, len(PROMPT))])
def test_a_damaged_file_is_a_miss_and_bytes_that_differ_would_show(tmp_path, forged, loaded):
    with Node(tmp_path) as node:
        with PoolEngine(node.address) as engine:
            engine.stores(PROMPT)
            node.holds(len(PROMPT))
        node.kill()
        damage(node, forged=forged)
        node.start()
        with PoolEngine(node.address) as engine:
            node.has_opened()
            with pytest.raises(AssertionError, match="hold other bytes") if forged else nullcontext():
                assert engine.serves(PROMPT) == loaded
        if not forged:
            with PoolEngine(node.address) as engine:
                engine.stores(PROMPT)
                assert engine.serves(PROMPT) == len(PROMPT), "it was computed, and stored again"


def test_engines_of_other_weights_do_not_meet_in_the_files(tmp_path):
    with Node(tmp_path) as node:
        with PoolEngine(node.address) as engine:
            engine.stores("abc")
            engine.host.reset("2")
            engine.weights = 2
            engine.stores("abcd")
            node.holds(3 + 4)
        node.begins_again()
        with PoolEngine(node.address) as one, PoolEngine(node.address, revision="2", weights=2) as two:
            node.has_opened()
            assert (one.serves("abcd"), two.serves("abcd")) == (3, 4)
        with PoolEngine(node.address, revision="3", weights=3) as three:
            assert three.serves("abcd") == 0


def test_the_region_comes_back_to_a_keeper_whose_files_are_there(tmp_path):
    with Node(tmp_path, **{"adopt-seconds": 5}) as node, PoolEngine(node.address) as engine:
        engine.stores("abc")
        node.holds(3)
        engine.stores("xyz")
        node.holds(6)
        node.kill()
        engine.serves("uvw")
        engine.rests()
        engine.forgets()
        node.start()
        node.has_opened()
        wait_until(lambda: engine.steps() or engine.host.cache._messenger.is_up)
        loaded = []

        def served():
            engine.forgets()
            loaded.append((engine.serves("abc"), engine.serves("xyz")))
            engine.rests()
            return loaded[-1] == (3, 3)

        wait_until(served)
        engine.stores("uvw")
        node.holds(9)


def test_a_prompt_that_has_left_the_pool_is_read_again(tmp_path):
    prompts = ["".join(chr(200 + 8 * number + at) for at in range(8)) for number in range(6)]
    with Node(tmp_path, slots=32, file_slots=128) as node, PoolEngine(node.address, device_blocks=24) as engine:
        engine.stores("a")
        node.has_opened()
        for at, prompt in enumerate(prompts):
            engine.stores(prompt)
            node.holds(1 + 8 * (at + 1))
        for prompt in prompts:
            assert engine.serves(prompt) == 8
            engine.rests()
            engine.forgets()


def test_a_question_has_the_time_in_which_a_chunk_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(prefill_rate, "MIN_TIMED_TOKENS", 1)
    with Node(tmp_path) as node, PoolEngine(node.address) as engine:
        sent = []
        monkeypatch.setattr(engine.host.cache._messenger, "send", lambda _, message: sent.append(message))
        for _ in range(2):
            engine.host.cache.prefilled(3, 0.3)
        monkeypatch.setattr(questions, "ASK_SECONDS", 0.01)
        engine.serves("xyz")
        assert [message.numbers for message in sent if message.kind is Kind.RUN] == [(GRID * 100_000_000,)]
        sent.clear()
        engine.serves("uvw")
        assert engine.host.cache._prefill.tokens_per_second != 10, "its own steps are timed, too"


class OddDisk(Node):
    program = ("-m", "tests.unit.keeper.odd_disk")

    def __init__(self, folder, monkeypatch, **options):
        monkeypatch.setenv("ODD_DISK", str(folder))
        self.place = folder
        super().__init__(folder, **options)


def test_requests_go_on_while_the_disk_is_frozen_and_find_all_when_it_thaws(tmp_path, monkeypatch):
    with OddDisk(tmp_path, monkeypatch) as node:
        with PoolEngine(node.address) as engine:
            engine.stores(PROMPT)
            node.holds(len(PROMPT))
        node.begins_again()
        with PoolEngine(node.address) as engine:
            node.has_opened()
            (tmp_path / "frozen").touch()
            assert engine.serves(PROMPT) == 0, "the answer comes by the keeper's deadline"
            engine.rests()
            engine.forgets()
            engine.stores("xyz")
            assert engine.serves("xyz") == 3
            engine.rests()
            engine.forgets()
            (tmp_path / "frozen").unlink()

            def served():
                engine.forgets()
                loaded = engine.serves(PROMPT)
                engine.rests()
                return loaded == len(PROMPT)

            wait_until(served)


def test_requests_go_on_while_the_disk_is_full(tmp_path, monkeypatch):
    with OddDisk(tmp_path, monkeypatch) as node, PoolEngine(node.address) as engine:
        engine.stores("a")
        node.holds(1)
        (tmp_path / "full").touch()
        for number in range(8):
            prompt = "".join(chr(200 + 3 * number + at) for at in range(3))
            engine.stores(prompt)
            assert engine.serves(prompt) == 3
            engine.rests()
            engine.forgets()
        wait_until(lambda: "only read" in node.log.read_text())
        assert engine.serves("a") == 1


@pytest.mark.parametrize(
    ("below", "sentence"), [("/missing:1GiB", "cannot be opened"), (":2000PiB", "no memory for an index")]
)
def test_files_that_cannot_be_made_leave_the_pool_as_it_is(tmp_path, below, sentence):
    with Node(tmp_path, below=f"file:{tmp_path}{below}") as node, PoolEngine(node.address) as engine:
        engine.stores(PROMPT)
        assert engine.serves(PROMPT) == len(PROMPT)
        assert sentence in node.log.read_text() and not node.is_open()


def test_a_keeper_with_files_imports_no_torch(tmp_path):
    with Node(tmp_path) as node, PoolEngine(node.address) as engine:
        engine.stores(PROMPT)
        node.holds(len(PROMPT))
        with open(f"/proc/{node.process.pid}/maps") as maps:
            found = maps.read()
        assert not [name for name in ("torch", "numpy", "triton", "cuda") if name in found]


@pytest.mark.parametrize(
    ("below", "sentence"),
    [
        ("elsewhere://localhost:6379", "unknown kind of tier"),
        ("file:/tmp:1MiB", "give the tier at least"),
        ("/nvme/kv", "unknown kind of tier"),
    ],
)
def test_a_keeper_refuses_what_cannot_be_below_it(tmp_path, below, sentence):
    command = [
        sys.executable,
        "-m",
        "cpu_prefix_cache.tools.cli",
        "keep",
        f"--socket={tmp_path}/kv",
        "--host-bytes=1MiB",
    ]
    ended = subprocess.run([*command, f"--below={below}"], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode and any(each in ended.stderr for each in sentence.split("|"))
