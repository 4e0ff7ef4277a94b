"""`cpu-prefix-cache bench --tier`: its figures of a small file and of a store, and that nothing is left behind."""

import json
import subprocess
import sys

import pytest

from cpu_prefix_cache import PrefixCacheError
from cpu_prefix_cache.stores.keyed_store import Got
from cpu_prefix_cache.stores.opening import OURS
from cpu_prefix_cache.testing import MemoryStore
from cpu_prefix_cache.tools.bench import slot_rates, tier_bench
from cpu_prefix_cache.tools.bench.file_rates import FileUnderTest
from cpu_prefix_cache.tools.bench.slot_rates import measure_slots
from cpu_prefix_cache.tools.bench.tier_report import break_even
from cpu_prefix_cache.tools.cli import main

SLOT = 8192


@pytest.fixture
def small(monkeypatch):
    """A bench of one second: slots of two pages, eight at a time, and one run of each."""
    monkeypatch.setattr(slot_rates, "READ_BYTES", 8 * SLOT)
    monkeypatch.setattr(tier_bench, "SLOT_BYTES", (SLOT, SLOT // 2))
    monkeypatch.setattr(tier_bench, "LEAST_BYTES", SLOT)
    monkeypatch.setattr(tier_bench, "measure_slots", lambda slots: measure_slots(slots, 1))
    monkeypatch.setattr(tier_bench, "STORE_BYTES", 64 * SLOT)


@pytest.mark.usefixtures("small")
def test_it_prints_rates_and_the_break_even_writes_them_and_leaves_nothing(tmp_path, capsys):
    disk, out = tmp_path / "disk", tmp_path / "out.json"
    disk.mkdir()
    model = ["--bytes-per-token", "1000", "--prefill-rate", "1"]
    assert main(["bench", "--tier", f"{disk}:2MiB", *model, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"a file of 2.0 MiB in {disk}, ")
    assert printed.count("verified") == printed.count("plain  ") == 4
    assert "long prefixes would be read" in printed
    written = json.loads(out.read_text())
    large = [each for each in written["rates"] if (each["slot_bytes"], each["method"]) == (SLOT, "verified")]
    assert {each["direction"]: each["gb_per_s"] for each in large} == {
        "read": written["read_gb_per_s"],
        "write": written["write_gb_per_s"],
    }
    assert not list(disk.iterdir())


@pytest.mark.usefixtures("small")
def test_interrupted_it_leaves_nothing_either(tmp_path, monkeypatch):
    def interrupted(file):
        file.write()
        raise KeyboardInterrupt

    monkeypatch.setattr(tier_bench, "measure_slots", interrupted)
    assert main(["bench", "--tier", f"{tmp_path}:1MiB"]) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_the_slots_read_are_verified(tmp_path):
    file = FileUnderTest(str(tmp_path), 64 * SLOT, SLOT)
    file.write()
    assert file.read().seconds > 0
    file.plain_write()
    with open(file.blocks_file, "r+b") as blocks:
        blocks.write(b"something else")
    with pytest.raises(PrefixCacheError, match="1 of 64 slots"):
        file.read()
    file.close()
    file.remove()
    assert not list(tmp_path.iterdir())


class Kept(MemoryStore):
    """The store at memory://: its history, and the values left in it."""

    last = None

    def __init__(self, url):
        super().__init__()
        Kept.last = self
        self.put = []
        self.is_closed = False

    def put_from(self, keys, buffers, timeout):
        self.put += keys
        return super().put_from(keys, buffers, timeout)

    def close(self):
        self.is_closed = True


class Forgets(Kept):
    """As a server that has less memory than is put."""

    def get_into(self, keys, buffers, timeout):
        return [Got.MISSING] * len(keys)


class Damages(Kept):
    def get_into(self, keys, buffers, timeout):
        found = super().get_into(keys, buffers, timeout)
        for each in buffers[:1]:
            each[-1][-1] ^= 1
        return found


class Fails(Kept):
    def put_from(self, keys, buffers, timeout):
        raise TimeoutError("the server did not answer in time")


@pytest.fixture
def at_memory(small, monkeypatch):
    def use(kind):
        monkeypatch.setitem(OURS, "memory", f"{__name__}:{kind.__name__}")

    use(Kept)
    return use


@pytest.mark.usefixtures("at_memory")
def test_a_store_is_measured_like_a_file_and_nothing_is_left_in_it(tmp_path, capsys):
    out = tmp_path / "out.json"
    model = ["--bytes-per-token", "1000", "--prefill-rate", "1"]
    assert main(["bench", "--tier", "memory://user:secret@here", *model, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("values of 512.0 KiB in memory://here\n") and "secret" not in printed + out.read_text()
    assert printed.count("verified") == printed.count("plain  ") == 4
    assert "long prefixes would be read" in printed
    assert json.loads(out.read_text())["read_gb_per_s"] > 0
    assert len(set(Kept.last.put)) == 2 * (64 + 128) and not Kept.last.values and Kept.last.is_closed


@pytest.mark.usefixtures("at_memory")
def test_an_interrupted_measurement_leaves_nothing_in_the_store(monkeypatch):
    def interrupted(slots):
        slots.write()
        assert Kept.last.values
        raise KeyboardInterrupt

    monkeypatch.setattr(tier_bench, "measure_slots", interrupted)
    assert main(["bench", "--tier", "memory://here"]) == 130
    assert not Kept.last.values and Kept.last.is_closed


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Forgets, "64 of 64 slots in memory://here are not what was written"),
        (Damages, "slots in memory://here are not what was written"),
        (Fails, "did not answer in time"),
    ],
)
def test_a_store_that_fails_is_reported(at_memory, capsys, kind, sentence):
    at_memory(kind)
    assert main(["bench", "--tier", "memory://here"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tier", "/no/such/folder"], "does not exist"),
        (["--tier", "/tmp:much"], "a size is"),
        (["--tier", "/tmp:1MiB"], "measures little"),
        (["--tier", "/tmp", "--prefill-rate", "5"], "give --model or --bytes-per-token"),
        (["--tier", "/tmp", "--plot", "x.png"], "--tier measures none"),
        (["--tier", "/tmp", "--json", "/no/such/folder/x.json"], "no such folder"),
        (["--tier", "/tmp:100000TB"], "the disk has or allows less"),
        (["--tier", "nobody://here"], "a store is SCHEME://ADDRESS"),
        (["--prefill-rate", "5"], "--prefill-rate is for --tier"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(capsys, options, sentence):
    assert main(["bench", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_file_faster_than_computing_is_worth_reading():
    assert break_even(2.0, 1_000_000, 1_000).endswith("long prefixes would be read")
    assert break_even(0.5, 1_000_000, 1_000).endswith("nothing would be read")


def test_a_missing_torch_is_named_with_its_install_command():
    program = (
        "import sys; sys.modules['torch'] = None; "
        "from cpu_prefix_cache.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "bench", "--tier", "/tmp"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr.endswith(": pip install torch\n")
