"""Looks at the files of adapters, under vLLM's own scheduler: which ones, how often, and what a mount that hangs costs.

What adapters compute is tested in `test_real_adapters.py`.
"""

import threading
from collections import Counter

import pytest
from vllm.lora.request import LoRARequest

from connector.vllm import adapters
from tests.vllm.engine import NEVER, Engine
from tests.vllm.test_connector import PROMPT, flood, start  # noqa: F401

ENOUGH = 28  # tokens of PROMPT in whole blocks
TOO_LONG = 20  # seconds: what is awaited comes at once


class Looks:
    """Counts looks. Those at paths that hang wait for `goes_on`."""

    def __init__(self):
        self.of = Counter()
        self.hanging = set()
        self.goes_on = threading.Event()
        self._look = adapters.files_in

    def __call__(self, path):
        self.of[path] += 1
        if path in self.hanging:
            assert self.goes_on.wait(TOO_LONG)
        return self._look(path)

    def release(self):
        self.goes_on.set()
        for thread in threading.enumerate():
            if isinstance(thread, adapters.Look):
                thread.join(TOO_LONG)
        assert not any(isinstance(thread, adapters.Look) for thread in threading.enumerate())


@pytest.fixture
def looks(monkeypatch):
    looks = Looks()
    monkeypatch.setattr(adapters, "files_in", looks)
    monkeypatch.setattr(adapters, "WAIT", TOO_LONG)  # whoever answers at all, answers in time
    yield looks
    looks.release()


@pytest.fixture
def adapter(tmp_path):
    return saved(tmp_path / "sql")


def saved(folder):
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return LoRARequest(folder.name, 1, str(folder))


def submit(engine: Engine, adapter, prompt=PROMPT):
    id = engine.submit(prompt)
    engine.requests[id].lora_request = adapter
    return id


def loaded(engine: Engine, adapter) -> int:
    """Tokens that the host gives to a request that the device has nothing of."""
    flood(engine)
    submit(engine, adapter)
    engine.drain()
    on_device, boundary = engine.admitted[-1]
    assert on_device == 0
    return boundary


@pytest.fixture
def filled(start, looks, adapter):  # noqa: F811
    """An engine whose host has PROMPT, computed with an adapter."""
    engine = start(offload="eager")
    assert [loaded(engine, adapter), loaded(engine, adapter)] == [0, ENOUGH]
    return engine


def test_a_checkpoint_below_the_folder_changes_nothing(filled, adapter, tmp_path, log):
    checkpoint = tmp_path / "sql" / "checkpoint-100"
    checkpoint.mkdir()
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        (checkpoint / name).write_bytes(b"others")
    (tmp_path / "sql" / "training_args.bin").write_bytes(b"vLLM does not load it")
    assert loaded(filled, adapter) == ENOUGH
    assert "other files" not in log.text


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"]
)
def test_a_file_that_is_replaced_is_seen_until_a_reset(filled, adapter, tmp_path, log, name):
    (tmp_path / "sql" / name).write_bytes(b"of another size")
    assert [loaded(filled, adapter), loaded(filled, adapter)] == [0, 0]
    assert log.text.count("other files than before") == 1
    assert loaded(filled, None) == ENOUGH, "the fake device has one key for all adapters, and the host has kept it"
    filled.reset()
    assert [loaded(filled, adapter), loaded(filled, adapter)] == [0, ENOUGH]


def test_a_reset_to_an_earlier_revision_brings_no_replaced_adapter_back(looks, adapter, tmp_path):
    """KV that was stored under it is found again, in a store or a pool, and is of the old files."""
    seen = adapters.Adapters("until a reset", "1")

    def may_be_used():
        seen.look("r", adapter)
        same = seen.are_same("r", adapter)
        seen.passed("r")
        return same

    assert may_be_used()
    (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(b"of another size")
    assert not may_be_used()
    seen.forget("1")
    assert not may_be_used()
    seen.forget("2")
    assert may_be_used()
    seen.forget("1")
    assert not may_be_used()
    seen.forget(None)
    assert may_be_used()


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("with_device", "until vLLM's reset_prefix_cache() is called"),
        ("with_connector", "until vLLM's reset_prefix_cache(reset_connector=True) is called"),
        ("never", "as long as the engine runs, because the option reset is never; load it under another name"),
    ],
)
def test_the_warning_names_what_brings_the_adapter_back(start, looks, adapter, tmp_path, log, mode, sentence):  # noqa: F811
    engine = start(offload="eager", reset=mode)
    loaded(engine, adapter)
    (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(b"of another size")
    assert loaded(engine, adapter) == 0
    assert sentence in log.text


@pytest.fixture
def waiting(filled, adapter):
    """A request that is looked up in each step, because it waits for what another one loads."""
    flood(filled)
    filled.ranks[0].pace = NEVER
    submit(filled, adapter)
    id = submit(filled, adapter)
    yield id
    filled.ranks[0].pace = None
    filled.drain()
    assert filled.half._adapters._looks == {}
    filled.check_nothing_leaked()


def test_a_request_that_waits_is_looked_at_once(filled, looks, waiting, monkeypatch):
    lookups, lookup = Counter(), filled.half.get_num_new_matched_tokens

    def counted(request, tokens):
        lookups[request.request_id] += 1
        return lookup(request, tokens)

    monkeypatch.setattr(filled.half, "get_num_new_matched_tokens", counted)
    before = looks.of.total()
    for _ in range(5):
        filled.step()
    assert lookups[waiting] == 5
    assert looks.of.total() == before + 2, "one for each request"


def test_a_request_that_ends_while_it_waits_leaves_nothing(filled, waiting):
    filled.step()
    assert list(filled.half._adapters._looks) == [waiting]
    filled.abort(waiting)
    assert filled.half._adapters._looks == {}


def test_a_request_that_waits_across_a_reset_is_looked_at_again(filled, looks, waiting):
    filled.step()
    before = looks.of.total()
    filled.reset()
    assert filled.half._adapters._looks == {}
    filled.step()
    assert looks.of.total() > before


def test_a_mount_that_hangs_keeps_no_step_waiting(filled, looks, adapter, tmp_path, monkeypatch, log):
    other = saved(tmp_path / "chat")
    monkeypatch.setattr(adapters, "WAIT", 0)
    looks.hanging = {adapter.lora_path}
    before = looks.of[adapter.lora_path]
    assert [loaded(filled, adapter), loaded(filled, adapter)] == [0, 0], "they are computed"
    assert looks.of[adapter.lora_path] == before + 1, "there is one look under way"
    assert log.text.count("the host loads and stores nothing for it until they can") == 1
    monkeypatch.setattr(adapters, "WAIT", TOO_LONG)
    assert loaded(filled, other) == ENOUGH, "another mount"
    looks.release()
    assert loaded(filled, adapter) == ENOUGH
    filled.check_nothing_leaked()


def test_nothing_is_stored_of_an_adapter_that_is_unknown(start, looks, adapter, monkeypatch):  # noqa: F811
    engine = start(offload="eager")
    monkeypatch.setattr(adapters, "WAIT", 0)
    looks.hanging = {adapter.lora_path}
    loaded(engine, adapter)
    looks.release()
    monkeypatch.setattr(adapters, "WAIT", TOO_LONG)
    assert [loaded(engine, adapter), loaded(engine, adapter)] == [0, ENOUGH]


def test_many_adapters_on_a_mount_that_hangs_take_few_threads(start, looks, tmp_path, monkeypatch):  # noqa: F811
    engine = start()
    monkeypatch.setattr(adapters, "WAIT", 0)
    many = [saved(tmp_path / f"adapter {number}") for number in range(adapters.MAX_LATE + 3)]
    looks.hanging = {each.lora_path for each in many}
    for each in many:
        submit(engine, each)
    engine.drain()
    assert sum(looks.of.values()) == adapters.MAX_LATE


def test_files_that_cannot_be_looked_at_are_unknown_and_missing_ones_are_nobodys(start, looks, log):  # noqa: F811
    engine = start(offload="eager")
    assert [loaded(engine, LoRARequest("hub", 1, "org/name")) for _ in range(2)] == [0, ENOUGH]
    assert loaded(engine, LoRARequest("long", 2, "/" + "n" * 5000)) == 0
    assert "cannot be looked at (" in log.text
