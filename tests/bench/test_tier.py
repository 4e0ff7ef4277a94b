"""`cpu-prefix-cache bench --tier`: what it measures of a small file, what it says, and that nothing is left behind."""

import json
import subprocess
import sys

import pytest

from cpu_prefix_cache import PrefixCacheError
from cpu_prefix_cache.bench import file_rates, tier_bench
from cpu_prefix_cache.bench.file_rates import FileUnderTest, measure_file
from cpu_prefix_cache.bench.tier_report import break_even
from cpu_prefix_cache.cli import main

SLOT = 8192


@pytest.fixture
def small(monkeypatch):
    """What takes a second: slots of two pages, eight at a time, and one run of each."""
    monkeypatch.setattr(file_rates, "TRANSFER_BYTES", 8 * SLOT)
    monkeypatch.setattr(tier_bench, "SLOT_BYTES", (SLOT, SLOT // 2))
    monkeypatch.setattr(tier_bench, "LEAST_BYTES", SLOT)
    monkeypatch.setattr(tier_bench, "measure_file", lambda file: measure_file(file, 1))


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

    monkeypatch.setattr(tier_bench, "measure_file", interrupted)
    assert main(["bench", "--tier", f"{tmp_path}:1MiB"]) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_what_was_read_is_verified(tmp_path):
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
        (["--prefill-rate", "5"], "--prefill-rate is for --tier"),
    ],
)
def test_what_cannot_be_measured_is_said(capsys, options, sentence):
    assert main(["bench", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_file_faster_than_computing_is_worth_reading():
    assert break_even(2.0, 1_000_000, 1_000).endswith("long prefixes would be read")
    assert break_even(0.5, 1_000_000, 1_000).endswith("nothing would be read")


def test_without_torch_it_says_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None; from cpu_prefix_cache.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "bench", "--tier", "/tmp"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "pip install 'cpu-prefix-cache[torch]'" in result.stderr
